"""What recomputation adds, in floating-point operations."""

from __future__ import annotations

from lowtide.cost.flops import flops_of
from lowtide.solvers.solution import GraphSolution


def flops_ratio(solution: GraphSolution) -> float:
    """All that the schedule runs, over all that runs without recomputation."""
    graph = solution.graph
    again = sum(times * flops_of(graph, graph.ops[op]) for op, times in solution.recomputed.items())
    return 1 + again / sum(flops_of(graph, op) for op in graph.ops)
