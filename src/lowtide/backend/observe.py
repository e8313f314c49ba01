"""What passes between the graphs of a step, seen by watching them run once.

Every graph is known alone: what it is given, what it makes, and the same of its backward. Which of that is
one tensor shows only when they run. So does who else holds it: what passes from one graph to the next and is
held by nobody when the backward is over need not be counted to the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.aot.draw import Drawn
from lowtide.aot.join import Place, joined
from lowtide.compat.tensors import StorageWeakRef
from lowtide.ir.graph import Graph, Role

Storages = list[StorageWeakRef | None]  # None where there is no tensor


@dataclass(kw_only=True)
class Run:
    """One run of one graph. Tensors are known by their storages, and none is kept alive."""

    drawn: Drawn
    given: Storages
    made: Storages
    tangents: Storages = field(default_factory=list)
    gradients: Storages = field(default_factory=list)
    gone: frozenset[int] = frozenset()  # the values that nobody held when the backward was over
    is_whole: bool = False  # its backward has come to its end

    @property
    def parameters(self) -> dict[StorageWeakRef, int]:
        """The parameters that it was given, as far as Dynamo says so, and their bytes."""
        values = self.drawn.graph.values
        return {
            storage: values[value].bytes
            for storage, value in zip(self.given, self.drawn.given, strict=True)
            if storage is not None and value is not None and values[value].role is Role.PARAMETER
        }

    def look(self) -> None:
        """The backward is over: see what is gone."""
        storages, values = (*self.made, *self.gradients), (*self.drawn.made, *self.drawn.gradients)
        self.gone = frozenset(
            value
            for storage, value in zip(storages, values, strict=True)
            if storage is not None and value is not None and storage.expired()
        )


def storages_of(things: Sequence[Any]) -> Storages:
    """Where each of `things` lies that is a tensor."""
    return [
        StorageWeakRef(thing.untyped_storage()) if isinstance(thing, torch.Tensor) else None
        for thing in things
    ]


def joined_runs(runs: Sequence[Run]) -> Graph:
    """The graph of a step with these runs, forwards in this order and backwards in the opposite one."""
    links = _links(runs)
    return joined([run.drawn.graph for run in runs], links, _passing(runs, links))


def _links(runs: Sequence[Run]) -> dict[Place, Place]:
    """What one graph was given that another had or made."""
    links: dict[Place, Place] = {}
    seen: dict[int, Place] = {}

    def add(part: int, storages: Storages, values: Sequence[int | None], *, comes: bool) -> None:
        for storage, value in zip(storages, values, strict=True):
            if value is None or storage is None:
                continue
            if comes and storage.cdata in seen and seen[storage.cdata] != (part, value):
                links.setdefault((part, value), seen[storage.cdata])
            else:
                seen[storage.cdata] = (part, value)

    for part, run in enumerate(runs):
        add(part, run.given, run.drawn.given, comes=True)
        add(part, run.made, run.drawn.made, comes=False)
    seen.clear()
    for part, run in reversed(list(enumerate(runs))):
        add(part, run.tangents, run.drawn.tangents, comes=True)
        add(part, run.gradients, run.drawn.gradients, comes=False)
    return links


def _passing(runs: Sequence[Run], links: Mapping[Place, Place]) -> frozenset[Place]:
    """What one graph made, another was given, and nobody else held to the end; and the gradients of it.

    Gradients of anything else are not among them even if nobody held them. Whether a parameter keeps
    what it is given depends on what it had before, and the next step may differ in that.
    """
    found: set[Place] = set()
    for part, run in enumerate(runs):
        drawn = run.drawn
        # The first results of a backward are gradients of what the forward was given, in that order.
        for given, gradient in zip(drawn.given, drawn.gradients, strict=False):
            origin = None if given is None else links.get((part, given))
            if origin is None or origin[1] not in runs[origin[0]].drawn.made:
                continue
            if origin[1] in runs[origin[0]].gone:
                found.add(origin)
            if gradient is not None and gradient in run.gone:
                found.add((part, gradient))
    return frozenset(found)
