"""Small graphs with regions in slices, as the pass makes them."""

from __future__ import annotations

from dataclasses import replace

from lowtide.autodiff.reverse import gradient
from lowtide.expressions import exp, graph_of, matmul, sum, var
from lowtide.ir.graph import Graph
from lowtide.tiles.early import early
from lowtide.tiles.region import Region, grown
from lowtide.tiles.sliced import Cut
from lowtide.tiles.tile import cut

ROWS, NARROW, WIDE = 8, 2, 64


def two_layers() -> Graph:
    """Two wide layers with a sum behind each, and their backward; every op takes a second.

    ops of layers.0   0 mm, 2 exp, 4 sum     9 mul, 11 mm
    ops of layers.1   1 mm, 3 exp, 5 sum     8 mul, 10 mm
    """
    x, first, second = var("x", (ROWS, NARROW)), var("first", (NARROW, WIDE)), var("second", (NARROW, WIDE))
    forward = graph_of(sum(exp(matmul(x, first))) + sum(exp(matmul(x, second))), name="two layers")
    graph = gradient(forward, forward.results[0][0], ["first", "second"]).graph
    modules = {0: "layers.0", 2: "layers.0", 4: "layers.0", 9: "layers.0", 11: "layers.0"}
    modules |= {1: "layers.1", 3: "layers.1", 5: "layers.1", 8: "layers.1", 10: "layers.1"}
    ops = (replace(op, module=modules.get(op.id, ""), seconds=1.0) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def in_slices(graph: Graph, count: int = 4, ahead: bool = False) -> Graph:
    """Both of `two_layers` in slices along the rows of what is wide; `ahead`: backward with forward."""
    regions = [grown(graph, seed, (0,)) for seed in (2, 3)]
    assert all(isinstance(region, Region) for region in regions), regions
    cuts = [
        Cut(region, count, early(graph, region) if ahead else None)
        for region in regions
        if isinstance(region, Region)
    ]
    return cut(graph, cuts)
