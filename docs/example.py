"""The one chain that every page on a method shows, and what each method makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import lowtide
from lowtide.chain.chain import Kind
from lowtide.chain.unroll import unrolled_graph, unrolled_schedule
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule

SIZES = (4, 16, 16, 4, 24, 24, 6, 24, 24, 6, 16, 16, 1)  # MiB: the input, then the output of each layer
BUDGET = "50%"
WITHIN_A_BUDGET = ("rotor", "evict", "exact", "auto")  # what these are for; the others show their least peak


def twelve_layers() -> lowtide.Chain:
    """Four times a heavy layer of three seconds and two light ones of one second each."""
    chain = lowtide.Chain.from_sizes(
        [size << 20 for size in SIZES],
        forward_seconds=[3, 1, 1] * 4,
        backward_seconds=[6, 2, 2] * 4,
        name="twelve layers",
    )
    return replace(chain, kinds=(Kind.HEAVY, Kind.LIGHT, Kind.LIGHT) * 4)


@dataclass(frozen=True)
class Shown:
    """What a method plans for the twelve layers; `again` is how often each layer is run again."""

    solution: lowtide.Solution | lowtide.GraphSolution
    graph: Graph
    schedule: Schedule
    again: tuple[int, ...]

    @property
    def words(self) -> str:
        """The plan in a line: its segments, or the layers that run again."""
        if isinstance(self.solution, lowtide.Solution):
            return str(self.solution.plan)
        layers = [(layer, count) for layer, count in enumerate(self.again, 1) if count]
        words = (f"{layer} ({count} times)" if count > 1 else f"{layer}" for layer, count in layers)
        return f"layers {', '.join(words)} again"


@cache
def shown(method: str) -> Shown:
    """The answer of a method: within half of the plain peak if it is for budgets, else its own best."""
    chain = twelve_layers()
    graph = unrolled_graph(chain)
    budget = BUDGET if method in WITHIN_A_BUDGET else None
    if method in lowtide.schedulers():
        scheduled = lowtide.solve(graph, method, budget)
        return _shown(scheduled, graph, scheduled.schedule)
    planned = lowtide.solve(chain, method, budget)
    return _shown(planned, graph, unrolled_schedule(chain, planned.plan))


def _shown(solution: lowtide.Solution | lowtide.GraphSolution, graph: Graph, schedule: Schedule) -> Shown:
    runs = Counter(step.op for step in schedule if isinstance(step, lowtide.Compute))
    return Shown(solution, graph, schedule, tuple(runs[op] - 1 for op in range(len(twelve_layers()))))
