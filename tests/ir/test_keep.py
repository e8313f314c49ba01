"""Keeping some values and recomputing the rest: event by event, and always legal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Phase, Ref, Role
from lowtide.ir.keep import droppable, forward_values, keep_only, segments
from lowtide.ir.schedule import Compute, Free, Schedule, straight
from lowtide.ir.simulate import simulate
from tests.helpers.effort import examples
from tests.helpers.forwards import row, shaped, strange, there_and_back
from tests.helpers.handmade import Drawing, chain, statistics, steps

# The referee ----------------------------------------------------------------------------------------


def computes(schedule: Schedule) -> Counter[int]:
    """How often each op runs."""
    return Counter(step.op for step in schedule if isinstance(step, Compute))


def assert_legal(graph: Graph, kept: frozenset[int]) -> None:
    """The referee accepts the schedule, and nothing runs twice that may not, or three times."""
    schedule = keep_only(graph, kept)
    simulate(graph, schedule)
    twice = {op for op, times in computes(schedule).items() if times > 1}
    assert max(computes(schedule).values(), default=1) <= 2
    assert twice <= droppable(graph)
    for op in twice:
        assert kept.isdisjoint(graph.ops[op].creates)


# Drawn by hand --------------------------------------------------------------------------------------


def test_a_row_is_recomputed_from_what_is_kept() -> None:
    graph = row([10, 10, 10, 10])
    # The forward ends in x3 and x4, so these stay. x1 is gone after x2 and made again for its backward.
    assert keep_only(graph, {2}) == steps(
        0, 1, "f1", 2, 3, "f4", 4, "f3", 5, "f2", "f5", 0, 6, "f1", "f6", 7, "f7"
    )  # fmt: skip
    assert segments(graph, {2}) == ((0,), (2, 3))
    assert simulate(graph, keep_only(graph, {2})).growth_bytes == 30  # x2, x3, x4
    assert simulate(graph, straight(graph)).growth_bytes == 40


def test_a_segment_is_recomputed_whole_and_only_once() -> None:
    graph = row([10] * 6)
    schedule = keep_only(graph, {4})
    assert computes(schedule) == Counter({0: 2, 1: 2, 2: 2} | dict.fromkeys(range(3, 12), 1))
    # What nobody needs again is not made again: of x1, x2, x3 all are read by a backward, x4 is kept.
    text = [step.op for step in schedule if isinstance(step, Compute)]
    assert text == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 8, 9, 10, 11]


def test_ops_that_no_backward_depends_on_are_not_recomputed() -> None:
    drawing = Drawing()
    x = drawing.value("x", 1, Role.BATCH)
    a, b, c, d, e = (drawing.value(name, 10) for name in "abcde")
    gradient = drawing.value("gradient", 1)
    drawing.op("aten.relu.default", [x], [a])
    drawing.op("aten.relu.default", [a], [b])
    drawing.op("aten.relu.default", [b], [c])
    drawing.op("aten.relu.default", [c], [d])
    drawing.op("aten.relu.default", [d], [e])
    drawing.op("aten.mul.Tensor", [e], [gradient], phase=Phase.BACKWARD)
    drawing.op("aten.mul.Tensor", [a, gradient], mutates=[gradient], phase=Phase.BACKWARD)
    graph = drawing.graph(outputs=[gradient])
    assert computes(keep_only(graph, {d})) == Counter([0, 1, 2, 3, 4, 5, 0, 6])


def test_the_last_segment_is_recomputed_if_another_begins_inside_it() -> None:
    # x1 and x3 hang together; x2, between them in order, does not
    graph = there_and_back([(0,), (0,), (1,), (2, 3)], [10, 10, 10, 10])
    assert segments(graph, {4}) == ((0, 2), (1,))
    assert [computes(keep_only(graph, {4}))[op] for op in range(4)] == [2, 2, 2, 1]


def test_values_made_together_are_kept_together() -> None:
    drawing = Drawing()
    x = drawing.value("x", 1, Role.BATCH)
    out, mean, last, gradient = (drawing.value(name, 10) for name in ("out", "mean", "last", "gradient"))
    drawing.op("aten.native_layer_norm.default", [x], [out, mean])
    drawing.op("aten.relu.default", [out], [last])
    drawing.op("aten.mul.Tensor", [last, mean, out], [gradient], phase=Phase.BACKWARD)
    graph = drawing.graph(outputs=[gradient])
    assert segments(graph, {out}) == segments(graph, {mean}) == ((1,),)
    assert_legal(graph, frozenset({out}))


def test_what_is_random_changed_or_an_output_is_kept_unasked() -> None:
    assert droppable(there_and_back([(0,), (1,), (2,)], [1, 1, 1], random={2})) == {0, 2}
    assert droppable(statistics()) == frozenset()  # changes a buffer; makes the output
    graph = chain()  # conv, relu_ in place, loss
    assert droppable(graph) == frozenset()
    assert keep_only(graph, frozenset()) == straight(graph)


def test_what_passes_between_captured_graphs_is_kept() -> None:
    graph = row([1, 1, 1, 1])
    ops = tuple(replace(op, section=0 if op.id in (0, 1, 6, 7) else 1) for op in graph.ops)
    assert droppable(replace(graph, ops=ops)) == {0, 2, 3}  # x2 enters the second
    eager = tuple(replace(op, section=-1 if op.id == 1 else 0) for op in graph.ops)
    assert 1 not in droppable(replace(graph, ops=eager))


def normalised() -> Graph:
    """Three layers, the first with running statistics that it updates.

    values   0 running mean 8   1 batch 4   2 normed 100   3 h 100   4 last 100   5, 6 gradients 100
    ops      0 norm (batch) → normed, updates the mean      1 h (normed)      2 last (h)
             3 (last, h) → gradient      4 (gradient, normed) → gradient
    """
    drawing = Drawing()
    mean = drawing.value("running mean", 8, Role.BUFFER)
    batch = drawing.value("batch", 4, Role.BATCH)
    normed, h, last, first, second = (
        drawing.value(name, 100) for name in ("normed", "h", "last", "first", "second")
    )
    drawing.op("aten.native_batch_norm.default", [batch], [normed], updates=[mean])
    drawing.op("aten.relu.default", [normed], [h])
    drawing.op("aten.relu.default", [h], [last])
    drawing.op("aten.mul.Tensor", [last, h], [first], phase=Phase.BACKWARD)
    drawing.op("aten.mul.Tensor", [first, normed], [second], phase=Phase.BACKWARD)
    return drawing.graph(outputs=[mean, second])


def test_what_updates_running_statistics_can_be_recomputed() -> None:
    graph = normalised()
    assert droppable(graph) == {0, 1, 2}
    assert keep_only(graph, {3}) == steps(0, 1, "f2", 2, 3, "f3", "f4", 0, 4, "f2", "f5")


def test_what_reads_statistics_before_they_are_updated_cannot() -> None:
    graph = normalised()
    reads = replace(graph.ops[1], args=(*graph.ops[1].args, Ref(0)), reads=(2, 0))
    updates = replace(graph.ops[2], args=(*graph.ops[2].args, Ref(0)), updates=(0,))
    first = replace(graph.ops[0], updates=())
    assert droppable(replace(graph, ops=(first, reads, updates, *graph.ops[3:]))) == {0, 2}


# Properties -----------------------------------------------------------------------------------------


def some_values(graph: Graph) -> st.SearchStrategy[frozenset[int]]:
    found = sorted(forward_values(graph))
    return st.frozensets(st.sampled_from(found)) if found else st.just(frozenset())


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), strange())
def test_every_choice_is_legal_and_loses_no_output(data: st.DataObject, graph: Graph) -> None:
    assert_legal(graph, data.draw(some_values(graph)))


@settings(max_examples=examples(100), deadline=None)
@given(st.data(), shaped())
def test_what_is_not_kept_is_gone_when_the_backward_begins_or_in_its_first_segment(
    data: st.DataObject, graph: Graph
) -> None:
    kept = data.draw(some_values(graph))
    assert_legal(graph, kept)
    schedule = keep_only(graph, kept)
    turn = next(op.id for op in graph.ops if op.phase is Phase.BACKWARD)
    alive: set[int] = set()
    for step in schedule:
        if step == Compute(turn):
            break
        if isinstance(step, Compute):
            alive.update(graph.ops[step.op].creates)
        else:
            assert isinstance(step, Free)
            alive.remove(step.value)
    held = [part for part in segments(graph, kept) if any(alive & {*graph.ops[op].creates} for op in part)]
    reads = {graph.creator.get(value) for value in graph.ops[turn].reads}
    assert sum(reads.isdisjoint(part) for part in held) <= 1


@settings(max_examples=examples(100), deadline=None)
@given(strange())
def test_keeping_everything_is_the_straight_schedule(graph: Graph) -> None:
    assert keep_only(graph, forward_values(graph)) == straight(graph)


# Refusals -------------------------------------------------------------------------------------------


def test_only_what_the_forward_creates_can_be_kept() -> None:
    with pytest.raises(BadRequest, match=r"cannot keep value 0: the forward of handmade does not create it"):
        keep_only(row([1, 1]), {0, 1})
    with pytest.raises(BadRequest, match=r"cannot keep value 4"):
        keep_only(row([1, 1]), {1, 4})
