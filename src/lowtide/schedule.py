"""A schedule: the order of computes and frees. It says nothing about bytes; `simulate` does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from lowtide.graph import Graph


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
    last_touch: dict[int, int] = dict(graph.creator)
    for value, readers in graph.readers.items():
        last_touch[value] = max(readers[-1], last_touch.get(value, 0))
    dying: dict[int, list[int]] = {}
    for value in sorted(graph.creator):
        if value not in graph.outputs:
            dying.setdefault(last_touch[value], []).append(value)
    steps: list[Step] = []
    for op in graph.ops:
        steps.append(Compute(op.id))
        steps.extend(Free(value) for value in dying.get(op.id, ()))
    return Schedule(tuple(steps))
