"""Who is alive when: every making of a value, the steps it lives through, its bytes and what holds them.

At any step the bytes of the lives there, and the workspace of the op that runs, are what `simulate` counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import CATEGORIES, Allocator, Category, allocator_of, categorise, column_of
from lowtide.ir.walk import walk


@dataclass(frozen=True, slots=True)
class Life:
    """A value as it was made for the `time`-th time, counted from 0: alive from step `first` up to `stop`.

    What is resident is alive from step 0 on, what is never freed up to the end of the schedule.
    """

    value: int
    time: int
    first: int
    stop: int
    bytes: int
    category: Category


def lives(graph: Graph, schedule: Schedule, allocator: Allocator | None = None) -> tuple[Life, ...]:
    """Every life in the order in which they begin, resident ones first; sizes as `allocator` rounds them.

    What lies on another device weighs nothing, and is listed. The schedule has to be one that `simulate`
    accepts.
    """
    allocator = allocator or allocator_of(graph.device)
    events = list(walk(graph, schedule))
    times: dict[int, int] = {}
    alive: dict[int, tuple[int, int]] = {}  # by value: its number among the lives, and the step it began
    found: list[Life | None] = []

    def close(value: int, stop: int, column: int) -> None:
        number, first = alive.pop(value)
        held = allocator.held(graph.counted_bytes(value))
        found[number] = Life(value, times.get(value, 1) - 1, first, stop, held, CATEGORIES[column])

    for value in graph.resident:
        alive[value] = (len(found), 0)
        found.append(None)
    made_as = {value: column_of(graph, value, spans_backward=False) for value in graph.resident}
    for (position, _, _, born, died), born_as, died_as in zip(
        events, *categorise(graph, events), strict=True
    ):
        for value, column in zip(born, born_as, strict=True):
            times[value] = times.get(value, 0) + 1
            alive[value] = (len(found), position)
            made_as[value] = column
            found.append(None)
        for value, column in zip(died, died_as, strict=True):
            close(value, position, column)
    for value in tuple(alive):
        close(value, len(schedule), made_as[value])
    return tuple(life for life in found if life is not None)
