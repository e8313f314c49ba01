"""auto, and the frontier that it draws."""

from __future__ import annotations

from itertools import pairwise

import pytest
from benchmarks.planner.training_graphs import Layer, joined
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.frontier import frontier
from lowtide.solvers.ops import auto
from lowtide.solvers.ops.auto import Auto
from lowtide.solvers.ops.search.encode import pairs_of, schedule_of, work_of
from lowtide.solvers.ops.segments import recursive
from lowtide.solvers.ops.starts import starts
from lowtide.solvers.refereed import extra_seconds
from lowtide.solvers.registry import schedulers, solve
from lowtide.solvers.solution import Status
from tests.helpers.effort import examples
from tests.helpers.handmade import graphs
from tests.solvers.test_evict import SECONDS, ladder, peak

# The referee ----------------------------------------------------------------------------------------


@settings(max_examples=examples(30))
@given(graph=graphs(max_ops=10, seconds=SECONDS), part=st.floats(0.0, 1.0))
def test_a_schedule_passes_the_referee_and_holds_its_budget(graph: Graph, part: float) -> None:
    plain = simulate(graph, straight(graph))
    budget = plain.resident_bytes + int(part * plain.growth_bytes)
    answer = Auto().within(graph, budget)
    if answer is not None:
        assert peak(graph, answer.schedule) <= budget


# By hand --------------------------------------------------------------------------------------------


def test_it_is_the_method_unless_told_otherwise() -> None:
    assert solve(ladder(), budget=320).method == "auto"
    assert [name for name in schedulers() if name in ("evict", "auto")] == ["evict", "auto"]


def test_no_search_is_made_where_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "explore", lambda *_: pytest.fail("searched"))
    answer = Auto().within(ladder(), 380)
    assert answer is not None
    assert (answer.schedule, answer.status) == (straight(ladder()), Status.OPTIMAL)


@pytest.mark.parametrize(
    ("budget", "seconds"), [(380, 0.0), (379, 11.0), (320, 11.0), (319, 33.0), (270, 33.0)]
)
def test_it_is_as_good_as_evict_on_the_ladder(budget: int, seconds: float) -> None:
    assert solve(ladder(), "auto", budget).extra_seconds == seconds


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(25))
@given(graph=graphs(max_ops=12, seconds=SECONDS))
def test_more_budget_never_costs_more_time_and_never_fits_less(graph: Graph) -> None:
    plain = simulate(graph, straight(graph))
    before: float | None = None
    for step in range(11):
        answer = Auto().within(graph, plain.resident_bytes + plain.growth_bytes * step // 10)
        assert answer is not None or before is None
        if answer is not None:
            seconds = extra_seconds(graph, answer.schedule)
            assert before is None or seconds <= before
            before = seconds
    assert before == 0.0


# The frontier ---------------------------------------------------------------------------------------


def test_the_frontier_of_the_ladder_has_a_point_for_each_schedule_worth_having() -> None:
    found = frontier(ladder(), points=12)
    assert [(point.peak_bytes, point.extra_seconds) for point in found] == [
        (380, 0.0),
        (320, 11.0),
        (270, 33.0),
    ]


@settings(max_examples=examples(20))
@given(graph=graphs(max_ops=10, seconds=SECONDS))
def test_along_a_frontier_peaks_fall_and_time_rises(graph: Graph) -> None:
    found = frontier(graph, points=5, method="evict")
    assert found[0].peak_bytes <= peak(graph, straight(graph))
    assert found[-1].peak_bytes == solve(graph, "evict", "min").peak_bytes
    for higher, lower in pairwise(found):
        assert higher.peak_bytes > lower.peak_bytes
        assert higher.extra_seconds <= lower.extra_seconds


def test_a_frontier_of_one_point_is_refused() -> None:
    with pytest.raises(BadRequest, match="at least 2 points"):
        frontier(ladder(), points=1)


def test_a_search_also_begins_with_halvings_as_they_are_drawn() -> None:
    layers = [Layer((number - 1,), 1000, 1.0, saves_inputs=True) for number in range(300)]
    graph = joined("a long chain", layers, 1000)
    begun = {
        simulate(graph, schedule_of(graph, pairs_of(codes, len(graph.ops)))).peak_bytes
        for codes in starts(graph, work_of(graph))
    }
    assert {simulate(graph, recursive(graph, pieces)).peak_bytes for pieces in (8, 32)} <= begun
