"""Schedules of the kernels that a graph is compiled to."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.fusion.fuse import Treatment, fused
from lowtide.fusion.in_place import kept_too_long
from lowtide.ir.graph import Graph, Op
from lowtide.solvers.solution import GraphSolution


def in_kernels(
    graph: Graph, kind_of: Callable[[Graph, Op], Treatment], solve: Callable[[Graph], GraphSolution]
) -> GraphSolution:
    """What `solve` makes of the kernels of `graph`, each of which writes over what was counted on."""
    apart = frozenset[int]()
    while True:
        found = solve(fused(graph, kind_of, apart))
        late = kept_too_long(found.graph, found.schedule)
        if not late:
            return found
        apart |= late
