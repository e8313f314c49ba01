"""A schedule: the order of computes and frees. It says nothing about bytes; `simulate` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lowtide.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an op. A second compute of the same op is a recomputation."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Give a value's memory back."""

    value: int


Step: TypeAlias = Compute | Free


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in the order in which they happen."""

    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


def straight(graph: Graph) -> Schedule:
    """Every op once, in graph order; every value freed right after the last op that touches it.

    This is what an executor does that recomputes nothing and holds nothing longer than needed.
    Resident values and the graph's outputs are never freed.
    """
    return in_order(graph, range(len(graph.ops)))


def in_order(graph: Graph, order: Sequence[int]) -> Schedule:
    """The ops in this order, every value freed after the last one that touches it before it is made again.

    Resident values are never freed, nor are the graph's outputs when they have been made for the last time.
    """
    last_touch: dict[int, int] = {}
    dying: dict[int, list[int]] = {}
    for position, number in enumerate(order):
        op = graph.ops[number]
        for value in op.creates:
            if value in last_touch:
                dying.setdefault(last_touch[value], []).append(value)
        for value in (*op.creates, *op.reads, *op.mutates):
            if value in graph.creator:
                last_touch[value] = position
    for value in last_touch.keys() - graph.outputs:
        dying.setdefault(last_touch[value], []).append(value)
    steps: list[Step] = []
    for position, number in enumerate(order):
        steps.append(Compute(number))
        steps.extend(Free(value) for value in sorted(dying.get(position, ())))
    return Schedule(tuple(steps))
