"""The compiled count of a chain's worst moment is the referee's, whatever the plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain import unroll
from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment
from lowtide.chain.unroll import replay
from lowtide.errors import BadRequest
from lowtide.solvers import solve
from lowtide.solvers.chains import worst
from lowtide.solvers.chains.worst import Worst, worst_moment
from tests.helpers.chains import chains
from tests.helpers.effort import examples

FIVE = Chain.from_sizes([1] * 6, names=("stem", "one", "two", "neck", "head"))


@st.composite
def segments(draw: st.DrawFn, start: int, stop: int, levels: int) -> tuple[Segment, ...]:
    """Any segments of layers start + 1 … stop, nested up to so many levels."""
    found = []
    while levels and (start := draw(st.integers(start, stop))) < stop:
        end = draw(st.integers(start + 1, stop))
        found.append(Segment(start, end, draw(segments(start, end, levels - 1))))
        start = end
    return tuple(found)


@st.composite
def planned(draw: st.DrawFn) -> tuple[Chain, Plan]:
    chain = draw(chains())
    return chain, Plan(draw(segments(0, len(chain), 3)))


def test_five_layers_by_hand() -> None:
    assert worst_moment(FIVE, Plan()) == Worst(8, "head")
    assert worst_moment(FIVE, Plan.at([2, 4])) == Worst(6, "head")
    assert worst_moment(FIVE, Plan((Segment(0, 4, (Segment(0, 2),)),))) == Worst(6, "neck")


@given(planned())
@settings(max_examples=examples(300), deadline=None)
def test_any_plan_peaks_where_the_replay_does(problem: tuple[Chain, Plan]) -> None:
    timeline, counted = replay(*problem), worst_moment(*problem)
    assert timeline.peak_op is not None
    assert counted == Worst(timeline.peak_bytes, timeline.peak_op.module or "the loss")


def test_a_plan_for_another_chain_is_refused() -> None:
    with pytest.raises(BadRequest, match="recomputes layer 9, but chain has only 5 layers"):
        worst_moment(FIVE, Plan.at([2, 9]))


def test_what_is_freed_twice_or_read_when_it_is_gone_is_noticed() -> None:
    for value, alive in ((0, 0), (1, 1)):  # the input is gone; the first output is there before it is made
        step = worst._Following.of(FIVE, Plan.at([2, 4]))
        step.alive[value] = alive
        worst._follow(step, len(FIVE))
        assert step.count[worst._ILLEGAL]


def test_solving_writes_no_step_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll, "unrolled_graph", None)
    assert solve(Chain.from_sizes([1] * 20_001), "hong-linear").peak_bytes == 203
