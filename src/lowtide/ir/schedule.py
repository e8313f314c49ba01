"""A schedule: the steps of a training step, in order. It says nothing about bytes; `simulate` does.

Steps are an open family. A new kind is a subclass of `Step` in `KINDS`, and has one place for each of:

    what it holds   its `event`, which `walk` hands to `simulate` and to all who follow values
    what it does    `Executor` and `codegen`; each refuses by name the kinds it does not know
    how it reads    in a file `notation` writes its tag and its fields; a report shows its events
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lowtide.errors import IllegalSchedule
from lowtide.ir.graph import Graph, Op


class Event(NamedTuple):
    """What one step does to the values of a graph.

    While the step runs, what is `born` is there, with the workspace of `op`, and what `died` is not. What is
    born without an op was there before, and comes back as it was.
    """

    position: int
    step: Step
    op: Op | None
    born: tuple[int, ...] = ()
    died: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a schedule. Every kind has a tag, and its fields are whole numbers."""

    kind: ClassVar[str]

    @property
    def runs(self) -> int | None:
        """The number of the op that it runs; None if it runs none."""
        return None

    def event(self, graph: Graph, position: int) -> Event:
        """What it does to the values of `graph` as the step at `position`.

        Raises:
            IllegalSchedule: it runs an op that is not in the graph.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it holds")


@dataclass(frozen=True, slots=True)
class Compute(Step):
    """Run an op. A second compute of the same op is a recomputation."""

    kind: ClassVar[str] = "compute"
    op: int

    @property
    def runs(self) -> int:
        """The number of the op."""
        return self.op

    def event(self, graph: Graph, position: int) -> Event:
        """The op runs, and what it creates is born."""
        if not 0 <= self.op < len(graph.ops):
            raise IllegalSchedule(f"step {position} computes op {self.op}, which is not in the graph")
        op = graph.ops[self.op]
        return Event(position, self, op, op.creates)


@dataclass(frozen=True, slots=True)
class Free(Step):
    """Give a value's memory back."""

    kind: ClassVar[str] = "free"
    value: int

    def event(self, graph: Graph, position: int) -> Event:
        """The value is gone."""
        return Event(position, self, None, (), (self.value,))


KINDS: dict[str, type[Step]] = {kind.kind: kind for kind in (Compute, Free)}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps in the order in which they happen."""

    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def computed(self) -> list[int]:
        """The numbers of the ops that run, in order, as often as they run."""
        return [op for step in self.steps if (op := step.runs) is not None]


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
