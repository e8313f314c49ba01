"""Graphs as pictures: where nodes go, what is written, and what is left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings

from lowtide.autodiff.expression import graph_of
from lowtide.autodiff.parse import parse
from lowtide.errors import MissingExtra
from lowtide.ir.graph import Graph, Phase, Role
from lowtide.lesson.excerpts import differentiable, extended
from lowtide.lesson.lesson import Lesson, lesson_of, with_numbers
from lowtide.report.picture.drawing import draw_lesson
from lowtide.report.picture.layering import Arrow, GraphDrawing, Node, NodeKind, Position, planned
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, graphs

MOST = 240


def lesson(text: str, backward: bool = True, **shapes: tuple[int, ...]) -> Lesson:
    graph = graph_of(*parse(text, shapes), name=text)
    outputs = [tensor for _, tensor in graph.results]
    return lesson_of(extended(graph, outputs, differentiable(graph)) if backward else graph)


def long_chain(ops: int) -> Graph:
    """As many ops in a row, half of them in the backward, and one that only changes what is given."""
    drawing = Drawing()
    state = drawing.value("state", 4, Role.BUFFER)
    before = drawing.value("x", 4, Role.BATCH)
    for number in range(ops):
        made = drawing.value(f"v{number}", 4)
        phase = Phase.FORWARD if number < ops // 2 else Phase.BACKWARD
        drawing.op("aten.exp.default", [before], [made], phase=phase)
        before = made
    drawing.op("aten.add_.Tensor", [], mutates=[state], phase=Phase.BACKWARD)
    return drawing.graph(outputs=[before])


def names(plan: GraphDrawing, found: Lesson) -> dict[str, Position]:
    """The places of nodes, by the names of what they make or are."""
    graph = found.graph
    return {
        graph.values[
            node.number if node.kind is NodeKind.GIVEN else graph.ops[node.number].creates[0]
        ].name: spot
        for node, spot in plan.spots.items()
    }


# The referee: rules that every plan obeys ------------------------------------------------------------


def broken(found: Lesson, plan: GraphDrawing) -> Iterator[str]:
    """What is wrong with a plan."""
    spots = list(plan.spots.values())
    if len(set(spots)) != len(spots):
        yield "two nodes are at the same place"
    levels: dict[float, list[float]] = {}
    for spot in spots:
        levels.setdefault(spot.y, []).append(spot.x)
    if any(b - a < 1 - 1e-9 for row in levels.values() for a, b in pairwise(sorted(row))):
        yield "two nodes overlap"
    if any(not (0 <= spot.x <= plan.columns and 0 <= spot.y <= plan.levels) for spot in spots):
        yield "a node is outside of the frame"
    forward = {op.id for op in found.forward}
    for arrow in plan.arrows:
        rising = plan.spots[arrow.target].y - plan.spots[arrow.source].y
        if not arrow.crosses and (rising > 0) != (arrow.target.number in forward):
            yield f"{arrow} does not go its side's way"


@settings(max_examples=examples(80))
@given(graphs(max_ops=9))
def test_nodes_do_not_overlap_and_arrows_go_up_in_the_forward_and_down_in_the_backward(graph: Graph) -> None:
    found = lesson_of(graph)
    for detailed in (True, False):
        plan = planned(found, most_ops=MOST, detailed=detailed)
        assert list(broken(found, plan)) == []
        assert {node.number for node in plan.spots if node.kind is NodeKind.OP} == {
            op.id for op in graph.ops if op.creates
        }


# By hand ---------------------------------------------------------------------------------------------


def test_exp_goes_up_in_one_column_and_comes_down_in_another() -> None:
    found = lesson("exp(a*b+3)")
    plan = planned(found, most_ops=MOST, detailed=True)
    assert names(plan, found) == {
        "a": Position(0.5, 0),
        "b": Position(1.5, 0),
        "v1": Position(1.0, 1),
        "v2": Position(1.0, 2),
        "v3": Position(1.0, 3),
        "v3.grad": Position(3.8, 3.0),
        "v2.grad": Position(3.8, 1.5),
        "a.grad": Position(3.3, 0.0),
        "b.grad": Position(4.3, 0.0),
    }
    assert (plan.columns, plan.levels, plan.left_out) == (4.8, 3, "")
    crossing = {(arrow.source, arrow.target) for arrow in plan.arrows if arrow.crosses}
    a, b = Node(0, NodeKind.GIVEN), Node(1, NodeKind.GIVEN)
    assert crossing == {(Node(2), Node(4)), (b, Node(5)), (a, Node(6))}


def test_what_is_given_stands_right_before_its_first_reader() -> None:
    found = lesson("exp(a) * b", backward=False)
    places = names(planned(found, most_ops=MOST, detailed=True), found)
    assert places == {
        "a": Position(1.5, 0),
        "b": Position(0.5, 1),
        "v1": Position(1.5, 1),
        "v2": Position(1.5, 2),
    }


def test_an_arrow_over_levels_has_a_bend_in_each_and_nothing_stands_there() -> None:
    found = lesson("exp(ln(a)) * a", backward=False)
    plan = planned(found, most_ops=MOST, detailed=True)
    long = [arrow for arrow in plan.arrows if arrow.bends]
    assert [(arrow.source, arrow.target) for arrow in long] == [(Node(0, NodeKind.GIVEN), Node(2))]
    assert [bend.y for bend in long[0].bends] == [1, 2]
    assert not set(long[0].bends) & set(plan.spots.values())
    plain = planned(found, most_ops=MOST, detailed=False)
    assert not any(arrow.bends for arrow in plain.arrows)


def test_of_too_many_ops_the_first_and_the_last_are_shown() -> None:
    found = lesson_of(long_chain(40))
    plan = planned(found, most_ops=10, detailed=False)
    assert sorted(node.number for node in plan.spots) == [0, 1, 2, 3, 4, 35, 36, 37, 38, 39]
    assert plan.left_out == (
        "not shown: 1 ops that make nothing new, shown: the first 5 of 20 ops of the forward, "
        "the last 5 of 20 of the backward"
    )


def test_what_only_the_backward_is_given_stands_on_its_side() -> None:
    drawing = Drawing()
    x, seed = drawing.value("x", 4, Role.BATCH), drawing.value("seed", 4, Role.BATCH)
    y, back = drawing.value("y", 4), drawing.value("back", 4)
    drawing.op("aten.exp.default", [x], [y])
    drawing.op("aten.mul.Tensor", [seed, y], [back], phase=Phase.BACKWARD)
    found = lesson_of(drawing.graph(outputs=[back]))
    plan = planned(found, most_ops=MOST, detailed=True)
    places = names(plan, found)
    assert places["seed"].x > places["y"].x
    assert Arrow(Node(seed, NodeKind.GIVEN), Node(1), seed, False) in plan.arrows


# The picture -----------------------------------------------------------------------------------------


def svg(found: Lesson, title: str = "a title") -> str:
    return draw_lesson(found, "svg", title=title).decode()


def test_the_picture_names_values_ops_tags_and_totals() -> None:
    text = svg(lesson("exp(a*b+3)"), "exp(a*b+3)")
    for words in (
        ">exp(a*b+3)<",
        ">v2.grad<",
        ">full<",
        ">v1 → v2 → v3<",
        ">memory: tag, bytes, what is in it<",
        ">28 B<",
        ">2.33× less<",
        ">lower bound<",
        ">written over an input (thick arrow)<",
        ">forward ↑<",
        ">backward ↓<",
    ):
        assert words in text, words


def test_what_is_overwritten_is_told_by_thick_arrows_and_what_is_waited_for_by_counters() -> None:
    assert svg(lesson("exp(a*b+3)")).count("stroke-width: 2.4;") == 4 * 2  # the line and its head
    assert "stroke-width: 2.4;" not in svg(lesson("exp(a)", backward=False))
    drawing = Drawing()
    x, y = drawing.value("x", 4, Role.BATCH), drawing.value("y", 4)
    drawing.op("aten.exp.default", [x], [y])
    for number in range(7):
        drawing.op("aten.mm.default", [y], [drawing.value(f"z{number}", 4)])
    text = svg(lesson_of(drawing.graph()))
    assert ">7<" in text


def test_numbers_that_came_out_are_written_in_the_nodes() -> None:
    found = lesson("ln(x)")
    told = with_numbers(found, {value.id: (0.1 * value.id,) for value in found.graph.values})
    assert ">0.1<" in svg(told)
    assert ">0.1<" not in svg(found)


def test_a_graph_without_a_backward_has_one_side() -> None:
    text = svg(lesson("exp(a)", backward=False))
    assert ">forward ↑<" in text
    assert ">backward ↓<" not in text


def test_a_large_graph_is_drawn_small_and_says_what_is_not_shown() -> None:
    text = svg(lesson_of(long_chain(170)))
    assert ">v0<" not in text
    told = " ".join(text.split("<"))  # the note is broken into lines
    assert "not shown: 1 ops that make nothing new" in told
    assert "counters and what is given" in told


def test_a_picture_is_of_the_kind_asked_for_and_always_the_same() -> None:
    found = lesson("exp(a)")
    for kind, beginning in (("png", b"\x89PNG\r\n\x1a\n"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        assert draw_lesson(found, kind, title="t").startswith(beginning)
    assert svg(found) == svg(found)


@settings(max_examples=examples(5), deadline=None)
@given(graphs())
def test_any_graph_can_be_drawn(graph: Graph) -> None:
    assert "<svg" in svg(lesson_of(graph))


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        MissingExtra, match=r"drawing a graph needs matplotlib: pip install 'lowtide\[plot\]'"
    ):
        svg(lesson("exp(a)"))
