"""How the gradients that enter a captured backward lie in memory.

AOTAutograd traces a backward before any gradient has arrived, and takes each to lie as the output does whose
gradient it is. One that arrives in another way is copied, and what follows sums up the copy: in another order
than eager PyTorch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from typing import Any

import torch
from torch._functorch._aot_autograd import collect_metadata_analysis, runtime_wrappers

from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private(
        "torch._functorch._aot_autograd.runtime_wrappers.coerce_to_expected_memory_format",
        "copies a gradient that does not lie as it was taken to",
        parameters=("x", "memory_format"),
    ),
    Private(
        "torch._functorch._aot_autograd.collect_metadata_analysis.coerce_tangent_and_suggest_memory_format",
        "says how a gradient is taken to lie",
        parameters=("x",),
    ),
)

Strides = tuple[int, ...]
Layout = tuple[tuple[int, ...], Strides]  # a shape and strides


def gradients_told(told: Callable[[torch.Tensor, Strides | None], None]) -> AbstractContextManager[None]:
    """While the block runs, each gradient that enters a captured backward is told, just before that begins.

    It comes with the strides that it was taken to have, if any.
    """
    before = runtime_wrappers.coerce_to_expected_memory_format

    def coerced(x: torch.Tensor, memory_format: Any) -> torch.Tensor:
        told(x, None if memory_format.stride is None else tuple(memory_format.stride))
        found: torch.Tensor = before(x, memory_format)
        return found

    why = "AOTAutograd's guess is held against what comes"
    return patched(runtime_wrappers, "coerce_to_expected_memory_format", coerced, why=why, since="torch 2.11")


@contextmanager
def gradients_laid_out(layouts: Sequence[Layout | None]) -> Iterator[None]:
    """While one graph is traced, its gradients are taken to lie like this.

    It is left at the guess where nothing is known, or what is known is of another shape.
    """
    before = collect_metadata_analysis.coerce_tangent_and_suggest_memory_format
    known = cycle(layouts)  # the gradients may be looked at more often than once, always all of them

    def taken(x: Any) -> tuple[Any, Any, bool]:
        guess, layout, is_new = before(x)
        found = next(known)
        if found is None or not isinstance(guess, torch.Tensor) or guess.shape != found[0]:
            return guess, layout, is_new
        return guess.new_empty_strided(*found), layout, True

    with patched(
        collect_metadata_analysis,
        "coerce_tangent_and_suggest_memory_format",
        taken if layouts else before,
        why="gradients lie as they were seen to",
        since="torch 2.11",
    ):
        yield
