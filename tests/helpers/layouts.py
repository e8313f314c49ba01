"""Graphs and schedules drawn at random for layouts: few sizes, ops that may work in place, recomputation."""

from __future__ import annotations

from hypothesis import strategies as st

from lowtide.ir.graph import Graph, Role
from lowtide.ir.schedule import Schedule, in_order
from tests.helpers.handmade import Drawing

TARGETS = ("aten.add.Tensor", "aten.relu.default", "aten.sigmoid_backward.default", "aten.mm.default")


@st.composite
def stepped(draw: st.DrawFn, max_ops: int = 12, max_again: int = 6) -> tuple[Graph, Schedule]:
    """A graph of ops that read up to three values and make one or two; a schedule that runs some again."""
    drawing = Drawing(draw(st.sampled_from(["cpu", "cuda:0"])))
    sizes = st.sampled_from([0, 64, 64, 100, 512, 1000])
    drawing.value("x", draw(sizes), Role.BATCH)
    for _ in range(draw(st.integers(1, max_ops))):
        known = st.sampled_from(range(len(drawing.values)))
        reads = draw(st.lists(known, min_size=1, max_size=3, unique=True))
        first = len(drawing.values)
        for number in range(first, first + draw(st.sampled_from([1, 1, 1, 2]))):
            size = drawing.values[reads[0]].bytes if draw(st.booleans()) else draw(sizes)
            device = draw(st.sampled_from([drawing.device] * 5 + ["elsewhere"]))
            drawing.value(f"v{number}", size, device=device)
        drawing.op(draw(st.sampled_from(TARGETS)), reads, range(first, len(drawing.values)))
    outputs = draw(st.lists(st.sampled_from(range(len(drawing.values))), max_size=2))
    graph = drawing.graph(outputs)
    order = list(range(len(graph.ops)))
    for _ in range(draw(st.integers(0, max_again))):
        op = draw(st.sampled_from(range(len(graph.ops))))
        order.insert(draw(st.integers(order.index(op) + 1, len(order))), op)
    return graph, in_order(graph, order)
