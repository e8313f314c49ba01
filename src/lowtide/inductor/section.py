"""The code for one section, made by Inductor of what `codegen` writes: both halves, before one of them runs.

What the forward makes, and how it lies, is read off its code; so the code for the backward is there, and has
been read, before anything runs, and a plan whose code holds too much need not be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from lowtide.aot.codegen import SectionCode, WrittenCode
from lowtide.aot.tangents import HANDED_OVER
from lowtide.compat.inductor import Generated, generated, is_to_be_run_again
from lowtide.compat.tensors import storage_key
from lowtide.inductor.reading import Read, read
from lowtide.ir.graph import Phase

# Told which half was compiled, and how to read its code, on which device and with which workspaces.
Found = Callable[[Phase, Callable[..., Read]], Read]
Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class GeneratedSection(SectionCode):
    """Both halves of a section, and what its backward is given from outside, without numbers."""

    forward: GeneratedForward
    backward: GeneratedBackward | None
    tangents: Sequence[Any] = ()

    def prepare(self, args: Sequence[Any]) -> None:
        """Generate the code of both halves, for arguments like these, if it is not there."""
        if self.forward.is_ready:
            return
        saved = self.forward.prepare(args)
        if self.backward is not None:
            self.backward.prepare([*saved, *self.tangents])


class GeneratedForward:
    """A forward that is compiled for the arguments that it first meets.

    What it hands over to the backward as it was given it, weights above all, it need not make, and Inductor
    not copy to have it lie otherwise.
    """

    def __init__(self, graph: fx.GraphModule, user_results: int, found: Found) -> None:
        self._graph = graph
        self._user_results = user_results
        self._handed_on = _taken_off(graph, user_results)
        self._found = found
        self._run: Generated | None = None
        self.given_up: tuple[int, ...] = ()  # what is saved that is the backward's alone, by place

    @property
    def is_ready(self) -> bool:
        """Whether there is code."""
        return self._run is not None

    def prepare(self, args: Sequence[Any]) -> Sequence[Any]:
        """Generate the code. Returns what it saves for the backward, without numbers."""
        self._run = generated(self._graph, args, is_backward=False, handed_out=self._user_results)
        found = self._found(Phase.FORWARD, partial(read, self._run.source_code, args))
        results = self._with_handed_on(found.given, found.made)
        shown, saved = results[: self._user_results], results[self._user_results :]
        self.given_up = _owned(saved, _storages(found.given) | _storages(shown))
        return saved

    def forward(self, args: list[Any]) -> Sequence[Any]:
        """Its results, the user's first. Empties `args`."""
        if self._run is None:
            self.prepare(args)
        assert self._run is not None, "it is prepared"
        given = {place: args[place] for place in self._handed_on.values()}
        return self._with_handed_on(given, self._run(args))

    def _with_handed_on(self, given: Any, made: Sequence[Any]) -> list[Any]:
        """What the code has made, and what was given, each at its place among the results."""
        rest = iter(made)
        count = len(made) + len(self._handed_on)
        return [
            given[self._handed_on[place]] if place in self._handed_on else next(rest)
            for place in range(count)
        ]


class GeneratedBackward:
    """A backward that is compiled for what its forward saves, and for gradients as they are expected.

    It writes over what its forward has saved for it alone, but for one that is to be run again.
    """

    def __init__(self, graph: fx.GraphModule, forward: GeneratedForward, tangents: int, found: Found) -> None:
        self._graph = graph
        self._found = found
        self._forward = forward
        self._tangents = tangents
        self._runs: dict[tuple[bool, tuple[Look | None, ...]], Generated] = {}

    def prepare(self, args: Sequence[Any], again: bool = False) -> Generated:
        """Generate the code, for arguments like these."""
        owned = () if again else self._forward.given_up
        run = self._runs[again, self._looks(args)] = generated(
            self._graph,
            args,
            is_backward=True,
            handed_out=len(args) + len(self._graph.graph.nodes),
            given_up=owned,
        )
        own = (*owned, *self._handed_over(args))
        self._found(Phase.BACKWARD, partial(read, run.source_code, args, owned=own))
        return run

    def _handed_over(self, args: Sequence[Any]) -> list[int]:
        """The places of gradients that nobody else has: that of a loss, one number, is its caller's."""
        places = range(len(args) - self._tangents, len(args)) if HANDED_OVER else ()
        return [at for at in places if isinstance(args[at], torch.Tensor) and args[at].numel() > 1]

    def forward(self, args: list[Any]) -> Any:
        """The gradients. Empties `args`."""
        again = is_to_be_run_again()
        run = self._runs.get((again, self._looks(args)))
        return (run or self.prepare(args, again))(args)

    def _looks(self, args: Sequence[Any]) -> tuple[Look | None, ...]:
        """How the gradients lie that it is given: what its forward has saved always lies the same."""
        return tuple(map(_look, args[len(args) - self._tangents :]))


def generated_section(
    code: WrittenCode, user_results: int, tangents: Sequence[Any], found: Found
) -> GeneratedSection:
    """`code` with generated kernels. The first results of its forward, so many, are the user's.

    Its backward is given `tangents` like these. Once a half is compiled, its code can be `found`.
    """
    forward = GeneratedForward(code.forward, user_results, found)
    if code.backward is None:
        return GeneratedSection(forward, None)
    backward = GeneratedBackward(code.backward, forward, len(tangents), found)
    return GeneratedSection(forward, backward, tangents)


def _taken_off(graph: fx.GraphModule, user_results: int) -> dict[int, int]:
    """Results that are arguments, by their places, which the graph does not return any longer."""
    places = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    (output,) = graph.graph.find_nodes(op="output")
    results = output.args[0]
    found = {at: places[node] for at, node in enumerate(results) if at >= user_results and node in places}
    output.args = (tuple(node for at, node in enumerate(results) if at not in found),)
    graph.recompile()
    return found


def _look(arg: Any) -> Look | None:
    return (tuple(arg.shape), arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else None


def _storages(things: Sequence[Any]) -> set[int]:
    return {storage_key(each) for each in things if isinstance(each, torch.Tensor)}


def _owned(saved: Sequence[Any], taken: set[int]) -> tuple[int, ...]:
    """The places of tensors whose memory is no other's."""
    keys = [storage_key(each) if isinstance(each, torch.Tensor) else None for each in saved]
    return tuple(
        at for at, key in enumerate(keys) if key is not None and key not in taken and keys.count(key) == 1
    )
