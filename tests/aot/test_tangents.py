"""Gradients that autograd holds on to while a captured backward runs."""

from __future__ import annotations

from dataclasses import replace

from lowtide.aot.tangents import RETURN, with_held_tangents
from lowtide.ir.graph import Graph, Phase
from lowtide.ir.recomputable import BETWEEN_GRAPHS
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.ir.validate import validate
from tests.helpers.handmade import Drawing


def step() -> Graph:
    """A captured graph and a loss outside of it: x 100 -> y 40 -> loss; back dy 40 -> dz 60 -> dw 30."""
    drawing = Drawing()
    x = drawing.value("x", 100)
    y, loss, dy, dz, dw = (
        drawing.value(*given) for given in (("y", 40), ("loss", 4), ("dy", 40), ("dz", 60), ("dw", 30))
    )
    drawing.op("forward", [x], [y])
    drawing.op("loss", [y], [loss])
    drawing.op("loss_backward", [loss], [dy], phase=Phase.BACKWARD)
    drawing.op("first", [dy], [dz], phase=Phase.BACKWARD)
    drawing.op("second", [dz], [dw], phase=Phase.BACKWARD)
    graph = drawing.graph(outputs=[loss, dw])
    outside = {1, 2}
    ops = [replace(op, section=BETWEEN_GRAPHS if op.id in outside else 0) for op in graph.ops]
    return replace(graph, ops=tuple(ops))


def test_what_is_held_lives_until_the_captured_backward_returns() -> None:
    graph = validate(with_held_tangents(step(), handed_over=False))
    assert [op.target for op in graph.ops][-1] == RETURN
    assert [op.id for op in graph.ops] == list(range(6))
    assert graph.ops[-1].reads == (3,)  # dy, and not dz, which the backward made itself
    assert graph.ops[-1].section == BETWEEN_GRAPHS
    # second: x and loss, dz and dw; and dy, which nothing reads any more
    assert simulate(graph, straight(graph)).peak_bytes == 100 + 4 + 40 + 60 + 30
    plain = step()
    assert simulate(plain, straight(plain)).peak_bytes == 100 + 4 + 40 + 60  # first


def test_where_it_is_handed_over_nothing_is_added() -> None:
    assert with_held_tangents(step(), handed_over=True) == step()


def test_the_backward_of_one_graph_is_given_what_that_of_the_next_has_made() -> None:
    graph = step()
    ops = [replace(op, section={0: 0, 1: 1, 2: 1, 3: 0, 4: 0}[op.id]) for op in graph.ops]
    held = with_held_tangents(replace(graph, ops=tuple(ops)), handed_over=False)
    assert [(op.target, op.reads) for op in held.ops if op.target == RETURN] == [(RETURN, (3,))]
