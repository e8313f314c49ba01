"""evict: give up at the peak what is cheapest to make again, op by op, and improve on that."""

from __future__ import annotations

from typing import ClassVar

from lowtide.ir.graph import Graph
from lowtide.ir.simulate import allocator_of
from lowtide.solvers.method import Effort, Searcher
from lowtide.solvers.ops.search.encode import costs, pairs_of, schedule_of, work_of
from lowtide.solvers.ops.search.explore import explore
from lowtide.solvers.ops.search.lower_bound import least_seconds
from lowtide.solvers.ops.search.pareto import Front, Seen, once_per_graph
from lowtide.solvers.solution import ScheduleAnswer, Status


class Evict(Searcher):
    """The least time within a budget that a search of fixed length finds, beginning with everything held.

    The search does not know the budget. It comes upon schedules of many peaks, and the answer is the fastest
    of those that fit: so more budget never costs more time, and never fits where less does not. `effort` is
    how long it searches: "full" or "quick".
    """

    name: ClassVar[str] = "evict"
    minimises: ClassVar[str] = "time within the budget, or the peak"
    complexity: ClassVar[str] = "O(n²) and a search of fixed length"
    reference: ClassVar[str] = "lowtide; compare Kirisame et al., arXiv 2006.09616 (DTR)"
    proves: ClassVar[str] = "if nothing need be recomputed"

    def within(self, graph: Graph, budget_bytes: int) -> ScheduleAnswer | None:
        """The fastest schedule found that peaks at `budget_bytes` or less; None if none was found."""
        return answer_within(graph, budget_bytes, _explored(graph, self.effort))

    def lowest(self, graph: Graph) -> ScheduleAnswer:
        """The schedule with the lowest peak that was found."""
        return answer(graph, _explored(graph, self.effort).seen[0])


def answer_within(graph: Graph, budget_bytes: int, front: Front) -> ScheduleAnswer | None:
    """The fastest schedule of `front` that peaks at `budget_bytes` or less; None if there is none."""
    held = allocator_of(graph.device).held
    growth_bytes = budget_bytes - sum(held(graph.counted_bytes(value)) for value in graph.resident)
    seen = front.best(growth_bytes)
    return None if seen is None else answer(graph, seen, growth_bytes)


def answer(graph: Graph, seen: Seen, growth_bytes: int | None = None) -> ScheduleAnswer:
    """`seen` as a schedule, and what any has to add that grows by no more than that, or `growth_bytes`."""
    pairs = pairs_of(seen.codes, len(graph.ops))
    seconds = [op.seconds for op in graph.ops]
    bound = least_seconds(work_of(graph), seconds, seen.peak_bytes if growth_bytes is None else growth_bytes)
    return ScheduleAnswer(
        schedule_of(graph, pairs),
        Status.FEASIBLE if pairs else Status.OPTIMAL,
        min(bound, sum(seconds[op] for op, _ in pairs)),
    )


@once_per_graph
def _explored(graph: Graph, effort: Effort) -> Front:
    return explore(work_of(graph), costs(graph), effort=effort)
