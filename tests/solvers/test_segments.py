"""Schedules as papers draw them: event by event on a row, always legal on anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Op, Phase, Role
from lowtide.ir.keep import droppable
from lowtide.ir.schedule import Compute, Schedule, straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.ops.segments import even_cuts, recursive, segmented, without
from tests.helpers.effort import examples
from tests.helpers.forwards import row, shaped, strange, there_and_back
from tests.helpers.handmade import Drawing, steps

# The referee ----------------------------------------------------------------------------------------


def computes(schedule: Schedule) -> list[int]:
    """The ops in the order in which they run."""
    return [step.op for step in schedule if isinstance(step, Compute)]


def assert_legal(graph: Graph, schedule: Schedule) -> None:
    """The referee accepts it, first runs are in order, and nothing runs twice that may not."""
    simulate(graph, schedule)
    order = computes(schedule)
    assert list(dict.fromkeys(order)) == list(range(len(graph.ops)))
    assert {op for op, times in Counter(order).items() if times > 1} <= droppable(graph)


def growth(graph: Graph, schedule: Schedule) -> int:
    return simulate(graph, schedule).growth_bytes


# Segments -------------------------------------------------------------------------------------------


def test_what_crosses_a_cut_is_kept_and_each_segment_is_computed_again_before_its_backward() -> None:
    graph = row([10] * 6)  # x1 … x6 by ops 0 … 5; the backward of x6 is op 6, of x1 op 11
    # x2 and x4 cross. The last segment makes x5 and x6, and is still there when the backward begins.
    assert segmented(graph, [2, 4]) == steps(
        0, 1, "f1", 2, 3, "f3", 4, 5, "f6", 6, "f5", 7, "f4", "f7",
        2, 8, "f3", "f8", 9, "f2", "f9", 0, 10, "f1", "f10", 11, "f11",
    )  # fmt: skip


def test_the_peak_is_one_crossing_a_segment_and_the_values_of_one_segment() -> None:
    graph = row([10] * 16)
    # At the start of the backward: x4, x8 and x12 cross; x13 to x15 are held, and x16 or its gradient.
    assert growth(graph, segmented(graph, [4, 8, 12])) == 30 + 40
    assert growth(graph, straight(graph)) == 160


def test_of_a_row_alike_the_square_root_of_its_length_in_segments_peaks_lowest() -> None:
    graph = row([10] * 101)  # the backward reads 100 of them
    peaks = {count: growth(graph, segmented(graph, count)) for count in range(1, 51)}
    shown = {count: peaks[count] for count in (1, 2, 5, 10, 20, 50)}
    assert shown == {1: 1010, 2: 520, 5: 250, 10: 200, 20: 250, 50: 520}
    assert min(peaks.values()) == peaks[10]


# Where to cut ---------------------------------------------------------------------------------------


def test_cuts_share_out_what_the_backward_reads() -> None:
    assert even_cuts(row([10] * 13), 3) == (4, 8)  # nobody reads x13 again
    assert even_cuts(row([10, 60, 10, 10, 10, 10, 10, 10, 10]), 2) == (3,)  # x2 counts as much as six others


def test_a_cut_moves_to_where_less_crosses_but_not_far() -> None:
    thin = [10] * 12
    thin[4] = 1  # x5, made by op 4
    assert even_cuts(row(thin), 2) == (5,)
    thin[4], thin[1] = 10, 1
    assert even_cuts(row(thin), 2) == (6,)  # x2 is more than a third of a segment away


def test_what_crosses_was_made_before_the_cut() -> None:
    assert even_cuts(row([10, 10, 10, 10, 5, 12, 6, 10, 10, 10, 10, 10]), 2) == (5,)


def test_of_places_that_as_much_crosses_the_nearest_is_taken() -> None:
    narrow = [10, 1, 10, 10, 1, 10, 10, 1, 10, 10, 1, 10]
    assert even_cuts(row(narrow), 2) == (5,)


def test_cuts_that_fall_together_are_one() -> None:
    assert even_cuts(row([1, 100, 1, 1]), 4) == (2,)


# Halves ---------------------------------------------------------------------------------------------


def test_halving_runs_the_first_half_of_each_half_again() -> None:
    graph = row([10] * 8)  # the backward of op k is op 15 − k
    # ops       the forward      x8, x7   x5      x6 x5 x1 … x3        x2      x1
    order = [*range(8), 8, 9, 4, 10, 11, 0, 1, 2, 12, 13, 0, 14, 15]
    assert computes(recursive(graph, range(2, 8, 2))) == order
    assert_legal(graph, recursive(graph, range(2, 8, 2)))


def test_every_level_of_halving_runs_half_of_the_row_again_and_holds_one_value_more() -> None:
    for levels in range(1, 7):
        length = 2**levels
        graph = row([10] * length)
        schedule = recursive(graph, range(1, length))
        assert growth(graph, schedule) == 10 * (levels + 1)
        # All but the last of each first half: that one crosses into the second, and is held.
        assert len(computes(schedule)) - len(graph.ops) == levels * length // 2 - (length - 1)


def test_of_an_odd_number_of_pieces_the_smaller_half_comes_first() -> None:
    # The middle of 0 … 4 is 2: ops 0 and 1 are the first half. Op 1 makes what crosses, and is not run again.
    assert computes(recursive(row([10] * 5), range(1, 5))) == [*range(5), 5, 6, 7, 0, 8, 9]


def gated(length: int, read: int) -> Graph:
    """A row in which the backward of op k reads what it read and made, if k is a multiple of `read`."""
    drawing = Drawing()
    made = [drawing.value("batch", 1, Role.BATCH)]
    for _ in range(length):
        made.append(drawing.value("x", 10))
        drawing.op("aten.sigmoid.default", made[-2:-1], made[-1:])
    gradient = drawing.value("gradient", 10)
    drawing.op("aten.ones_like.default", [], [gradient], phase=Phase.BACKWARD)
    for k in reversed(range(length)):
        reads = made[k : k + 2] if k % read == 0 else []
        drawing.op("aten.sigmoid_backward.default", reads, mutates=[gradient], phase=Phase.BACKWARD)
    return drawing.graph(outputs=[gradient])


def test_what_crosses_is_held_for_its_own_backward_too() -> None:
    # x2 crosses from ops 0 and 1 to 2 and 3, and the backward of op 1, which is op 7, reads it.
    assert computes(recursive(gated(4, read=1), [2])) == [*range(7), 0, 7, 8]
    assert computes(segmented(gated(4, read=1), [2])) == [*range(7), 0, 7, 8]


def test_what_only_recomputing_needs_is_recomputed_as_well() -> None:
    # Of what ops 0 to 5 make the backward reads x4 and x3, in op 21, and x1; op 1 runs again for x2 alone.
    graph = gated(12, read=3)
    assert computes(recursive(graph, [6])) == [*range(21), 0, 1, 2, 3, *range(21, 25)]


def test_a_value_that_crosses_several_cuts_is_made_once() -> None:
    # x1 is read by everything
    graph = there_and_back([(0,), (1,), (1, 2), (1, 3), (1, 4), (1, 5)], [10] * 6)
    schedule = recursive(graph, range(1, 6))
    assert_legal(graph, schedule)
    assert Counter(computes(schedule))[0] == 1
    assert max(Counter(computes(schedule)).values()) > 1


def test_what_is_random_is_drawn_once_and_held() -> None:
    graph = there_and_back([(k,) for k in range(8)], [10] * 8, random={2})
    for schedule in (segmented(graph, [4]), recursive(graph, range(1, 8))):
        assert_legal(graph, schedule)
        assert Counter(computes(schedule))[1] == 1


# Without --------------------------------------------------------------------------------------------


def normalised() -> Graph:
    """Two rounds of conv, bn (which makes its statistics too) and relu, and their backward.

    Forward, 100 bytes a result and 4 for the statistics: 0 conv → 1 bn → 2 relu → 3 conv → 4 bn → 5 relu.
    Backward, in reverse: relu's and the next conv's read relu's result, bn's the conv's and the statistics.
    """
    drawing = Drawing()
    batch = drawing.value("batch", 1, Role.BATCH)
    rounds: list[tuple[int, ...]] = []
    for _ in range(2):
        conv, normed, statistic, active = (
            drawing.value(name, size)
            for name, size in (("conv", 100), ("normed", 100), ("mean", 4), ("active", 100))
        )
        drawing.op("aten.convolution.default", [rounds[-1][3] if rounds else batch], [conv])
        drawing.op("aten.native_batch_norm.default", [conv], [normed, statistic])
        drawing.op("aten.relu.default", [normed], [active])
        rounds.append((conv, normed, statistic, active))
    gradient = drawing.value("gradient", 100)
    back = Phase.BACKWARD
    drawing.op("aten.mul.Tensor", [rounds[1][3]], [gradient], phase=back)
    for number in (1, 0):
        conv, _, statistic, _ = rounds[number]
        before = rounds[0][3] if number else batch
        drawing.op("aten.native_batch_norm_backward.default", [conv, statistic], [], [gradient], phase=back)
        drawing.op("aten.convolution_backward.default", [before], [], [gradient], phase=back)
        if number:
            drawing.op("aten.threshold_backward.default", [before], [], [gradient], phase=back)
    return drawing.graph(outputs=[gradient])


def cheap(op: Op) -> bool:
    return op.target in ("aten.native_batch_norm.default", "aten.relu.default")


def test_what_is_dropped_is_computed_again_from_what_is_kept() -> None:
    graph = normalised()
    schedule = without(graph, cheap)
    # The second relu is not dropped: the backward begins with it.
    assert computes(schedule) == [0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 8, 9, 10, 11]
    assert_legal(graph, schedule)
    # When the second relu runs: all of its round, and of the first conv, relu and statistics, or conv alone.
    assert growth(graph, straight(graph)) == 304 + 204
    assert growth(graph, schedule) == 304 + 100


def test_nothing_dropped_is_the_straight_schedule() -> None:
    assert without(normalised(), lambda op: False) == straight(normalised())


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(st.data(), st.one_of(strange(), shaped(12)))
def test_every_schedule_is_legal_wherever_it_is_cut(data: st.DataObject, graph: Graph) -> None:
    turn = next((op.id for op in graph.ops if op.phase is not Phase.FORWARD), len(graph.ops))
    cuts = data.draw(st.sets(st.integers(1, turn - 1))) if turn > 1 else set[int]()
    dropped = data.draw(st.sets(st.integers(0, turn)))
    assert_legal(graph, segmented(graph, sorted(cuts)))
    assert_legal(graph, recursive(graph, sorted(cuts)))
    assert_legal(graph, without(graph, lambda op: op.id in dropped))
    assert max(Counter(computes(segmented(graph, sorted(cuts)))).values(), default=1) <= 2


@settings(max_examples=examples(100), deadline=None)
@given(st.one_of(strange(), shaped(12)))
def test_whatever_is_not_cut_is_trained_straight(graph: Graph) -> None:
    assert segmented(graph, []) == recursive(graph, []) == straight(graph)


@settings(max_examples=examples(100), deadline=None)
@given(st.data(), st.one_of(strange(), shaped(12)))
def test_cuts_are_inside_the_forward_and_never_too_many(data: st.DataObject, graph: Graph) -> None:
    turn = next((op.id for op in graph.ops if op.phase is not Phase.FORWARD), len(graph.ops))
    segments = data.draw(st.integers(1, max(1, turn)))
    cuts = even_cuts(graph, segments)
    assert len(cuts) < segments
    assert list(cuts) == sorted(set(cuts))
    assert all(0 < cut < turn for cut in cuts)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=24))
def test_halving_a_row_holds_no_more_than_its_largest_values_one_for_each_level(sizes: list[int]) -> None:
    graph = row(sizes)
    levels = math.ceil(math.log2(len(sizes)))
    assert growth(graph, recursive(graph, range(1, len(sizes)))) <= max(sizes) * (levels + 2)


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule_of", [segmented, recursive])
def test_a_number_of_segments_that_cannot_be_is_refused(
    schedule_of: Callable[[Graph, int], Schedule],
) -> None:
    with pytest.raises(BadRequest, match=r"of handmade into 0 segments: it has 3 ops\. Ask for 1 to 3\."):
        schedule_of(row([1, 1, 1]), 0)
    with pytest.raises(BadRequest, match="into 4 segments"):
        schedule_of(row([1, 1, 1]), 4)


@pytest.mark.parametrize("cut", [0, 3, 5, -1])
def test_a_cut_that_is_not_inside_the_forward_is_refused(cut: int) -> None:
    with pytest.raises(BadRequest, match=rf"cut handmade before op {cut}: .* Name ops from 1 to 2\."):
        segmented(row([1, 1, 1]), [1, cut])
