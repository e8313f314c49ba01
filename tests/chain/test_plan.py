"""Plans: how they are written, and what they add."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment
from lowtide.errors import BadRequest
from lowtide.solvers.chains.exhaustive import nested_plans

NESTED = Plan((Segment(0, 3), Segment(3, 11, (Segment(4, 7, (Segment(5, 6),)), Segment(7, 8)))))

# Drawn by hand --------------------------------------------------------------------------------------


def test_checkpoints_cut_everything_up_to_the_last_of_them() -> None:
    assert Plan.at([]) == Plan()
    assert Plan.at([3]) == Plan((Segment(0, 3),))
    assert Plan.at([5, 2, 5]) == Plan((Segment(0, 2), Segment(2, 5)))


def test_checkpoints_are_where_the_outermost_segments_end() -> None:
    assert Plan().checkpoints == ()
    assert Plan.at([2, 5]).checkpoints == (2, 5)
    assert NESTED.checkpoints == (3, 11)


def test_levels_count_how_often_the_most_recomputed_layer_is() -> None:
    assert [Plan().levels, Plan.at([2, 5]).levels, NESTED.levels] == [0, 1, 3]


def test_walking_meets_outer_segments_first() -> None:
    assert [(s.start, s.stop) for s in NESTED.walk()] == [(0, 3), (3, 11), (4, 7), (5, 6), (7, 8)]


def test_a_layer_is_recomputed_once_for_every_segment_around_it() -> None:
    assert NESTED.recomputed_layers() == 3 + 8 + 3 + 1 + 1


@pytest.mark.parametrize(
    ("layers", "left"),
    [
        ({9}, "[1-6 [1-3][5-6]][8-8]"),
        ({1}, "[2-6 [2-3][5-6]][8-8]"),
        ({2, 8}, "[1-1 [1-1]][3-6 [3-3][5-6]]"),
        ({4}, "[1-3 [1-3]][5-6 [5-6]][8-8]"),
        ({5, 6}, "[1-4 [1-3]][8-8]"),
        (set(range(1, 9)), "keep all"),
    ],
)
def test_a_plan_without_some_layers_recomputes_the_others_as_before(layers: set[int], left: str) -> None:
    assert str(Plan.read("[1-6 [1-3][5-6]][8-8]").without(layers)) == left


def test_extra_seconds_are_those_of_the_layers_in_segments() -> None:
    chain = Chain.from_sizes([1] * 5, forward_seconds=[1, 2, 4, 8])
    assert Plan().extra_seconds(chain) == 0
    assert Plan.at([1, 3]).extra_seconds(chain) == 1 + 2 + 4
    assert Plan((Segment(0, 3, (Segment(1, 2),)),)).extra_seconds(chain) == (1 + 2 + 4) + 2
    assert Plan((Segment(1, 2), Segment(3, 4))).extra_seconds(chain) == 2 + 8


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), "keep all"),
        (Plan.at([3]), "[1-3]"),
        (Plan.at([1, 3]), "[1-1][2-3]"),
        (NESTED, "[1-3][4-11 [5-7 [6-6]][8-8]]"),
    ],
)
def test_a_plan_is_written_with_brackets_around_what_is_recomputed(plan: Plan, text: str) -> None:
    assert str(plan) == text
    assert Plan.read(text) == plan


def test_spaces_do_not_matter() -> None:
    assert Plan.read("  [1-3]  [4-11[5-7] ] ") == Plan((Segment(0, 3), Segment(3, 11, (Segment(4, 7),))))


# Properties -----------------------------------------------------------------------------------------


@given(st.sampled_from(list(nested_plans(6))))
def test_what_is_written_can_be_read(plan: Plan) -> None:
    assert Plan.read(str(plan)) == plan


@given(st.sets(st.integers(1, 30)))
def test_a_plan_at_checkpoints_has_these_checkpoints(checkpoints: set[int]) -> None:
    plan = Plan.at(checkpoints)
    assert plan.checkpoints == tuple(sorted(checkpoints))
    assert plan.recomputed_layers() == max(checkpoints, default=0)


def test_nested_plans_are_all_different_and_as_many_as_there_are() -> None:
    counts = [len(set(nested_plans(n))) for n in range(1, 8)]
    assert counts == [1, 2, 6, 22, 90, 394, 1806]  # the large Schröder numbers
    assert [sum(1 for _ in nested_plans(n)) for n in range(1, 8)] == counts


def test_the_nested_plans_of_three_layers_are_these() -> None:
    assert {str(plan) for plan in nested_plans(3)} == {
        "keep all", "[1-1]", "[2-2]", "[1-1][2-2]", "[1-2]", "[1-2 [1-1]]",
    }  # fmt: skip


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (lambda: Plan((Segment(2, 2),)), "3 to 2"),
        (lambda: Plan((Segment(3, 2),)), "4 to 2"),
        (lambda: Plan((Segment(-1, 2),)), "0 to 2"),
        (lambda: Plan((Segment(0, 3), Segment(2, 5))), "3 to 5"),
        (lambda: Plan((Segment(3, 5), Segment(0, 3))), "1 to 3"),
        (lambda: Plan((Segment(0, 3, (Segment(1, 4),)),)), "2 to 4"),
        (lambda: Plan((Segment(1, 3, (Segment(0, 2),)),)), "1 to 2"),
        (lambda: Plan.at([-2, 3]), "1 to -2"),
    ],
)
def test_segments_that_cross_or_are_empty_are_refused(make: Callable[[], Plan], layers: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        make()
    assert str(refusal.value) == (
        f"layers {layers} cannot be a segment here: segments are not empty, in order, apart from each other "
        "and within the one around them."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep some", "'keep some' is not a plan. A plan looks like [1-3][4-11 [5-7]]."),
        ("[1,3]", "'[1,3]' is not a plan. A plan looks like [1-3][4-11 [5-7]]."),
        ("[1-3]]", "'[1-3]]' is not a plan: a bracket closes that was not opened."),
        ("[1-3 [1-2]", "'[1-3 [1-2]' is not a plan: a bracket is not closed."),
    ],
)
def test_text_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        Plan.read(text)
    assert str(refusal.value) == message
