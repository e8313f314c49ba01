"""A name that its library does not promise to keep, and why lowtide uses it all the same."""

from __future__ import annotations

from dataclasses import dataclass

TORCHES = ("2.11", "2.12", "2.13")  # the releases of torch that lowtide admits


@dataclass(frozen=True, slots=True)
class Private:
    """One private name: what it is for, and the releases of its library in which it was seen.

    `name` is the full name: 'torch._C._current_graph_task_id', or 'torch.Tensor._version' for an attribute.
    `parameters` are those that lowtide passes by name. What `needs_cuda` is missing in builds for the CPU.
    What is not in every Python is asked for before it is used: `pythons` are the first and the last that have
    it.
    `tests/compat` fails, and says what to look at, where the name or one of the parameters is gone.
    """

    name: str
    why: str
    parameters: tuple[str, ...] = ()
    seen: tuple[str, ...] = TORCHES
    needs_cuda: bool = False
    pythons: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
