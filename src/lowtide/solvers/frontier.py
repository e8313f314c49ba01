"""Peak against time: what less memory costs, from holding everything to the lowest peak there is."""

from __future__ import annotations

from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.method import Scheduler
from lowtide.solvers.registry import solve
from lowtide.solvers.solution import GraphSolution
from lowtide.text.budget import LOWEST


def frontier(graph: Graph, points: int = 12, method: str | Scheduler = "auto") -> tuple[GraphSolution, ...]:
    """At most `points` schedules, from the plain one to the lowest: each lower and slower than the last.

    Their budgets are as far apart from each other; where two get the same schedule, or one as slow that is
    higher, there are fewer. All of them have been replayed by the referee. In a graph without times nothing
    is slower: there the order is by how much runs again.

    Raises:
        BadRequest: fewer than two points are asked for, or the method takes no budget.
    """
    if points < 2:
        raise BadRequest(f"a frontier has at least 2 points, the plain step and the lowest; not {points}.")
    lowest = solve(graph, method, LOWEST)
    found = [lowest]
    if lowest.recomputed:
        span_bytes = simulate(graph, straight(graph)).peak_bytes - lowest.peak_bytes
        for step in range(1, points):
            solution = solve(graph, method, lowest.peak_bytes + span_bytes * step // (points - 1))
            if solution.peak_bytes > found[-1].peak_bytes and _cost(solution) < _cost(found[-1]):
                found.append(solution)
    return tuple(reversed(found))


def _cost(solution: GraphSolution) -> tuple[float, int]:
    return solution.extra_seconds, sum(solution.recomputed.values())
