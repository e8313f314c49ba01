"""The margin that CUDA's allocator is left, and the search for a plan that leaves it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.chain.chain import Chain
from lowtide.errors import InfeasibleBudget
from lowtide.planner.promise import promised_bytes, safe_peak_bytes, solved_within
from lowtide.solvers import solve
from lowtide.solvers.solution import Solution

CHAIN = Chain.from_sizes([100] * 9)


def test_on_cuda_a_hundredth_of_what_is_not_resident_is_left_to_the_allocator() -> None:
    assert promised_bytes(1_000_000, 200_000, "cuda:0") == 1_008_000
    assert promised_bytes(1_000_000, 200_000, "cpu") == 1_000_000
    assert safe_peak_bytes(1_008_000, 200_000, "cuda") == 1_000_000
    assert safe_peak_bytes(1_008_000, 200_000, "cpu") == 1_008_000


@given(budget=st.integers(1, 1 << 40), part=st.floats(0, 1), device=st.sampled_from(["cpu", "cuda"]))
def test_a_safe_peak_promises_what_the_budget_holds_and_hardly_less(
    budget: int, part: float, device: str
) -> None:
    resident = int(part * budget)
    peak = safe_peak_bytes(budget, resident, device)
    assert budget - 2 <= promised_bytes(peak, resident, device) <= budget


def refusal(least: Solution) -> InfeasibleBudget:
    return InfeasibleBudget(least.method, 0, least.peak_bytes, "what is always there")


def test_less_is_asked_for_where_an_answer_promises_too_much() -> None:
    asked: list[int | None] = []

    def solved(aim: int | None) -> Solution:
        asked.append(aim)
        return solve(CHAIN, "rotor", aim)

    lowest = solve(CHAIN, "rotor").peak_bytes
    wanted = lowest + 400
    found = solved_within(wanted, solved, lambda solution: solution.peak_bytes + 100, refusal)
    assert found.peak_bytes + 100 <= wanted
    assert asked[0] == wanted
    assert len(asked) > 1
    assert None not in asked


def test_the_lowest_peak_is_tried_last_and_refused_if_it_promises_too_much() -> None:
    lowest = solve(CHAIN, "rotor")

    def solved(aim: int | None) -> Solution:
        return solve(CHAIN, "rotor", aim)

    def half(solution: Solution) -> int:
        return solution.peak_bytes // 2

    below = lowest.peak_bytes - 1
    assert replace(solved_within(below, solved, half, refusal), planning_seconds=0.0) == replace(
        lowest, planning_seconds=0.0
    )
    with pytest.raises(InfeasibleBudget, match="no plan of rotor"):
        solved_within(below, solved, lambda solution: solution.peak_bytes, refusal)


def test_no_less_than_nothing_is_asked_for() -> None:
    def solved(aim: int | None) -> Solution:
        return solve(CHAIN, "rotor", aim)

    with pytest.raises(InfeasibleBudget, match="no plan of rotor"):
        solved_within(CHAIN.base_bytes + 10**6, solved, lambda solution: 10**9, refusal)
