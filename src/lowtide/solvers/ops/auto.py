"""auto: the best of several ways to begin, each improved op by op."""

from __future__ import annotations

from typing import ClassVar

from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.method import Effort, Searcher
from lowtide.solvers.ops.evict import answer, answer_within
from lowtide.solvers.ops.search.encode import costs, work_of
from lowtide.solvers.ops.search.explore import explore
from lowtide.solvers.ops.search.pareto import Front, once_per_graph
from lowtide.solvers.ops.starts import starts
from lowtide.solvers.solution import ScheduleAnswer, Status


class Auto(Searcher):
    """Nothing is recomputed if everything fits; else the search of `evict`, which here begins in many places.

    With everything held, with only the results of convolutions and matrix products held, and with the
    forward cut into few or many segments of which only the ends are held. As with `evict`, more budget
    never costs more time, and never fits where less does not. `effort` is how long it searches: "full" or
    "quick".
    """

    name: ClassVar[str] = "auto"
    minimises: ClassVar[str] = "time within the budget, or the peak"
    complexity: ClassVar[str] = "O(n²) and a search of fixed length"
    reference: ClassVar[str] = "lowtide; begins with Chen et al., arXiv 1604.06174, among others"
    proves: ClassVar[str] = "if nothing need be recomputed"

    def within(self, graph: Graph, budget_bytes: int) -> ScheduleAnswer | None:
        """The fastest schedule found that peaks at `budget_bytes` or less; None if none was found."""
        plain = straight(graph)
        if simulate(graph, plain).peak_bytes <= budget_bytes:
            return ScheduleAnswer(plain, Status.OPTIMAL)
        return answer_within(graph, budget_bytes, _explored(graph, self.effort))

    def lowest(self, graph: Graph) -> ScheduleAnswer:
        """The schedule with the lowest peak that was found."""
        return answer(graph, _explored(graph, self.effort).seen[0])


@once_per_graph
def _explored(graph: Graph, effort: Effort) -> Front:
    work = work_of(graph)
    return explore(work, costs(graph), starts(graph, work), effort)
