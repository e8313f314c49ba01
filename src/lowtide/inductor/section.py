"""The code for one section, made by Inductor of what `codegen` writes: compiled when it is first run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from lowtide.aot.codegen import SectionCode, WrittenCode
from lowtide.compat.inductor import Generated, generated, is_to_be_run_again
from lowtide.compat.tensors import storage_key
from lowtide.inductor.reading import growth_bytes
from lowtide.ir.graph import Phase

# Told which half was compiled, and how to read off what it holds, on which device and with which workspaces.
Found = Callable[[Phase, Callable[..., int]], None]


class GeneratedForward:
    """A forward that is compiled for the arguments that it first meets."""

    def __init__(self, graph: fx.GraphModule, user_results: int, found: Found) -> None:
        self._graph = graph
        self._user_results = user_results
        self._found = found
        self._run: Generated | None = None
        self.given_up: tuple[int, ...] = ()  # what is saved that is the backward's alone, by place

    def forward(self, args: list[Any]) -> Sequence[Any]:
        """Its results, the user's first. Empties `args`."""
        if self._run is not None:
            return self._run(args)
        self._run = generated(self._graph, args, is_backward=False, handed_out=self._user_results)
        self._found(Phase.FORWARD, partial(growth_bytes, self._run.source_code, args))
        taken = _storages(args)
        results = self._run(args)
        self.given_up = _owned(
            results[self._user_results :], taken | _storages(results[: self._user_results])
        )
        return results


class GeneratedBackward:
    """A backward that is compiled for the arguments that it first meets.

    It writes over what its forward has saved for it alone, but for one that is to be run again.
    """

    def __init__(self, graph: fx.GraphModule, forward: GeneratedForward, found: Found) -> None:
        self._graph = graph
        self._found = found
        self._forward = forward
        self._runs: dict[bool, Generated] = {}

    def forward(self, args: list[Any]) -> Any:
        """The gradients. Empties `args`."""
        again = is_to_be_run_again()
        if again not in self._runs:
            owned = () if again else self._forward.given_up
            run = self._runs[again] = generated(
                self._graph,
                args,
                is_backward=True,
                handed_out=len(args) + len(self._graph.graph.nodes),
                given_up=owned,
            )
            self._found(Phase.BACKWARD, partial(growth_bytes, run.source_code, args, owned=owned))
        return self._runs[again](args)


def generated_section(code: WrittenCode, user_results: int, found: Found) -> SectionCode:
    """`code` with generated kernels. The first results of its forward, so many, are the user's.

    Once a half is compiled, what its code holds can be `found`.
    """
    forward = GeneratedForward(code.forward, user_results, found)
    if code.backward is None:
        return SectionCode(forward, None)
    return SectionCode(forward, GeneratedBackward(code.backward, forward, found))


def _storages(things: Sequence[Any]) -> set[int]:
    return {storage_key(each) for each in things if isinstance(each, torch.Tensor)}


def _owned(saved: Sequence[Any], taken: set[int]) -> tuple[int, ...]:
    """The places of tensors whose memory is no other's."""
    keys = [storage_key(each) if isinstance(each, torch.Tensor) else None for each in saved]
    return tuple(
        at for at, key in enumerate(keys) if key is not None and key not in taken and keys.count(key) == 1
    )
