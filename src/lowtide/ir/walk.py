"""What a schedule does to the values of a graph, step by step.

Whoever follows memory reads this, and so need not know which kinds of steps there are.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Event, Schedule


def walk(graph: Graph, schedule: Schedule) -> Iterator[Event]:
    """The event of every step, in order. Whether it is legal to take that step, only `simulate` knows.

    Raises:
        IllegalSchedule: a step runs an op that is not in the graph. The events before it have been given.
    """
    return (step.event(graph, position) for position, step in enumerate(schedule.steps))
