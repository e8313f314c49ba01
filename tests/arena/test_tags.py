"""The lecture's planner: counters, tags and the box, turn by turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.arena.buffers import Birth, buffers_of
from lowtide.arena.in_place import take_overs
from lowtide.arena.tags import Box, Given, How, Sharing, Turn, share
from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Role
from lowtide.ir.schedule import Compute, Schedule, straight
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, steps
from tests.helpers.layouts import stepped

NEW, IN_PLACE, SHARED = How.NEW, How.IN_PLACE, How.SHARED


def exponential() -> Graph:
    """exp(a·b + 3). Values of 40 bytes: 0 a, 1 b, 2 product, 3 sum, 4 result."""
    drawing = Drawing()
    for name in ("a", "b"):
        drawing.value(name, 40, Role.BATCH)
    for name in ("product", "sum", "result"):
        drawing.value(name, 40)
    drawing.op("aten.mul.Tensor", [0, 1], [2])
    drawing.op("aten.add.Scalar", [2], [3], extra=(3,))
    drawing.op("aten.exp.default", [3], [4])
    return drawing.graph(outputs=[4])


def tags(found: Sharing) -> dict[int, int]:
    """The tag of every value, where all are computed once."""
    assert all(birth.time == 0 for birth in found.tags)
    return {birth.value: tag for birth, tag in found.tags.items()}


def hows(found: Sharing) -> list[How]:
    return [given.how for turn in found.walk for given in turn.given]


# The lecture ----------------------------------------------------------------------------------------


def test_without_anything_every_value_has_memory_of_its_own() -> None:
    graph = exponential()
    found = share(graph, straight(graph), in_place=False, sharing=False)
    assert (tags(found), found.total_bytes) == ({2: 0, 3: 1, 4: 2}, 120)
    assert hows(found) == [NEW, NEW, NEW]


def test_in_place_the_whole_of_exp_a_b_3_happens_in_one_tag() -> None:
    graph = exponential()
    found = share(graph, straight(graph))
    assert (tags(found), found.tag_bytes) == ({2: 0, 3: 0, 4: 0}, (40,))
    # steps: 0 1 f2 2 f3; nothing is freed, for each tag is handed on, and the result waits for its user
    assert found.walk == (
        Turn(0, 0, (Given(2, 0, NEW, 40),), ((2, 1),), ()),
        Turn(1, 1, (Given(3, 0, IN_PLACE, 40),), ((2, 0), (3, 1)), ()),
        Turn(3, 2, (Given(4, 0, IN_PLACE, 40),), ((3, 0), (4, 1)), ()),
    )


def test_sharing_takes_the_tag_of_the_product_for_the_result() -> None:
    graph = exponential()
    found = share(graph, straight(graph), in_place=False)
    assert (tags(found), found.total_bytes) == ({2: 0, 3: 1, 4: 0}, 80)
    assert hows(found) == [NEW, NEW, SHARED]
    assert [turn.freed for turn in found.walk] == [(), (0,), (1,)]
    assert [found.box_after(turn) for turn in range(3)] == [(), (0,), (1,)]
    assert [found.counters_after(turn) for turn in range(3)] == [{2: 1}, {3: 1}, {4: 1}]


def test_in_place_needs_the_only_pending_reader() -> None:
    drawing = Drawing()
    drawing.value("x", 8, Role.BATCH)
    for name in ("h", "s", "t"):
        drawing.value(name, 8)
    drawing.op("aten.neg.default", [0], [1])
    drawing.op("aten.sigmoid.default", [1], [2])
    drawing.op("aten.mul.Tensor", [1, 2], [3])
    graph = drawing.graph(outputs=[3])
    found = share(graph, straight(graph))
    assert tags(found) == {1: 0, 2: 1, 3: 0}
    assert found.walk[1].counters == ((1, 1), (2, 1))
    assert found.walk[2] == Turn(2, 2, (Given(3, 0, IN_PLACE, 8),), ((1, 0), (2, 0), (3, 1)), (1,))


def test_what_nobody_reads_goes_into_the_box_at_once_and_outputs_never() -> None:
    drawing = Drawing()
    drawing.value("x", 8, Role.BATCH)
    for name in ("unread", "output", "last"):
        drawing.value(name, 8)
    for made in (1, 2, 3):
        drawing.op("aten.mm.default", [0], [made])
    found = share(graph := drawing.graph(outputs=[2, 3]), straight(graph))
    assert tags(found) == {1: 0, 2: 0, 3: 1}
    assert [found.box_after(turn) for turn in range(3)] == [(0,), (), ()]


def test_counters_count_readers_and_do_not_wait_for_a_lazy_free() -> None:
    graph = exponential()
    found = share(graph, steps(0, 1, 2, "f2", "f3"), in_place=False)
    assert tags(found) == {2: 0, 3: 1, 4: 0}


def test_a_value_computed_again_is_given_a_tag_again() -> None:
    graph = exponential()
    found = share(graph, steps(0, 1, "f2", "f3", 0, 1, "f2", 2, "f3"), in_place=False)
    assert found.tags == {Birth(2, 0): 0, Birth(3, 0): 1, Birth(2, 1): 0, Birth(3, 1): 1, Birth(4, 0): 0}
    # The first sum has no reader: the second one has.
    assert [turn.freed for turn in found.walk] == [(), (0, 1), (), (0,), (1,)]


# nnvm's rule of sizes -------------------------------------------------------------------------------


def boxed(*sizes: int) -> Box:
    """A box with tags 0, 1, … of these sizes, put in in this order."""
    box = Box()
    for tag, size in enumerate(sizes):
        box.put(tag, size)
    return box


@pytest.mark.parametrize(
    ("sizes", "need", "tag"),
    [
        ((), 100, None),
        ((100,), 100, 0),
        ((500, 120, 90), 100, 1),  # the smallest that is large enough, not the nearest
        ((1600,), 100, 0),  # up to sixteen times as large
        ((1601,), 100, None),
        ((1601, 90, 50), 100, 1),  # else the largest that is smaller
        ((6,), 100, 0),  # down to a sixteenth, rounded down
        ((5,), 100, None),
        ((200, 200), 100, 0),  # of equals the one that was freed first
        ((0,), 0, 0),
        ((1,), 0, None),
    ],
)
def test_a_tag_is_taken_by_size(sizes: tuple[int, ...], need: int, tag: int | None) -> None:
    assert boxed(*sizes).take(need) == tag


def sized(*counts: int) -> Graph:
    """A chain of matmuls whose results have these sizes; x is resident."""
    drawing = Drawing()
    last = drawing.value("x", 1, Role.BATCH)
    for number, count in enumerate(counts):
        made = drawing.value(f"v{number + 1}", count)
        drawing.op("aten.mm.default", [last], [made])
        last = made
    return drawing.graph(outputs=[last])


def test_a_tag_that_is_taken_for_more_grows() -> None:
    graph = sized(100, 30, 160, 10)
    found = share(graph, straight(graph))
    assert (tags(found), found.tag_bytes) == ({1: 0, 2: 1, 3: 0, 4: 1}, (160, 30))
    assert [given.tag_bytes for turn in found.walk for given in turn.given] == [100, 30, 160, 30]
    narrow = share(graph, straight(graph), match_range=1)
    assert (tags(narrow), narrow.total_bytes) == ({1: 0, 2: 1, 3: 2, 4: 3}, 300)


def test_results_of_one_op_ask_for_the_largest_first() -> None:
    drawing = Drawing()
    x = drawing.value("x", 1, Role.BATCH)
    freed, small, large, last = (drawing.value(n, c) for n, c in (("f", 100), ("s", 40), ("l", 90), ("e", 1)))
    drawing.op("aten.mm.default", [x], [freed])
    drawing.op("aten.mm.default", [x], [small, large])
    drawing.op("aten.mm.default", [small, large], [last])
    graph = drawing.graph(outputs=[last])
    found = share(graph, straight(graph))
    assert tags(found)[large] == tags(found)[freed] == 0
    assert [given.value for given in found.walk[1].given] == [small, large]  # as the op lists them


def test_sizes_may_be_rounded_and_a_range_below_one_is_refused() -> None:
    graph = sized(100, 30)
    assert share(graph, straight(graph), alignment=64).tag_bytes == (128, 64)
    with pytest.raises(
        BadRequest, match="a match range of 0 matches nothing; give 1 or more, or do not share"
    ):
        share(graph, straight(graph), match_range=0)


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(stepped(), st.booleans(), st.booleans(), st.sampled_from([1, 2, 16]))
def test_no_tag_holds_two_values_that_are_both_waited_for(
    case: tuple[Graph, Schedule], in_place: bool, sharing: bool, match_range: int
) -> None:
    graph, schedule = case
    found = share(graph, schedule, in_place=in_place, sharing=sharing, match_range=match_range)
    born: dict[int, int] = {}
    for number, turn in enumerate(found.walk):
        for one in turn.given:
            born[one.value] = born.get(one.value, -1) + 1
            assert found.tags[Birth(one.value, born[one.value])] == one.tag
            assert graph.values[one.value].bytes <= one.tag_bytes <= found.tag_bytes[one.tag]
        waited = [found.tags[Birth(value, born[value])] for value in found.counters_after(number)]
        assert len(set(waited)) == len(waited)
        assert not set(waited) & set(found.box_after(number))
    assert [turn.op for turn in found.walk] == [s.op for s in schedule if isinstance(s, Compute)]
    if not sharing:
        assert SHARED not in hows(found)
    if not in_place:
        assert IN_PLACE not in hows(found)


@settings(max_examples=examples(200))
@given(stepped())
def test_in_place_alone_takes_what_the_buffers_sum_to_and_sharing_never_more_tags(
    case: tuple[Graph, Schedule],
) -> None:
    graph, schedule = case
    naive = share(graph, schedule, in_place=False, sharing=False)
    alone = share(graph, schedule, sharing=False)
    assert naive.total_bytes == sum(buffer.bytes for buffer in buffers_of(graph, schedule))
    overs = take_overs(graph, schedule)
    assert alone.total_bytes == sum(buffer.bytes for buffer in buffers_of(graph, schedule, overs))
    assert hows(alone).count(IN_PLACE) == len(overs)
    assert len(share(graph, schedule).tag_bytes) <= len(alone.tag_bytes)
