"""The margin that CUDA's allocator is left, and the search for a plan that leaves it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan
from lowtide.cost.measure import measure
from lowtide.errors import InfeasibleBudget
from lowtide.execute.apply import apply, remove
from lowtide.planner.layers import Rehearsal
from lowtide.planner.promise import numbers_bytes, promised_bytes, safe_peak_bytes, solved_within
from lowtide.solvers import solve
from lowtide.solvers.solution import Solution
from lowtide.text.budget import Budget

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


def test_each_time_so_much_less_is_asked_for_at_least_and_twice_that_the_next_time() -> None:
    """What is promised does not fall with the peak, until it does."""
    asked: list[int | None] = []

    def solved(aim: int | None) -> Solution:
        asked.append(aim)
        assert aim is not None, "it need not go as low as can be"
        return _Peak(aim)  # type: ignore[return-value]

    found = solved_within(1000, solved, lambda peak: 1001 if peak.peak_bytes > 900 else 900, refusal, 20)
    assert asked == [1000, 980, 940, 860]
    assert found.peak_bytes == 860


@dataclass(frozen=True)
class _Peak:
    peak_bytes: int


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


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 0.5
            x[:, 0] /= 3
        return x


def test_numbers_that_autograd_keeps_are_within_what_is_promised() -> None:
    """Nothing that sees ops sees them; eight bytes each were missing."""
    work = (Halves(), (torch.randn(64, 8),))
    rehearsal = Rehearsal(*work, loss_of_all, profile=False)
    chain = rehearsal.chain("fine")
    assert numbers_bytes(rehearsal.plain.graph) == 6 * 16
    assert rehearsal.bytes_of(Budget.parse("100%")) == rehearsal.plain.peak_bytes + 96
    for plan in (Plan(), Plan.at([2]), Plan.at([len(chain)])):
        solution = replace(solve(chain, "keep-all"), plan=plan)
        apply(work[0], solution)
        resident = rehearsal.plain.timeline.resident_bytes
        measured = resident + measure(lambda: loss_of_all(work[0](*work[1])).backward()).growth_bytes
        remove(work[0])
        work[0].zero_grad()
        assert measured <= rehearsal._promised(solution), str(plan)
        assert plan.segments or measured > rehearsal.confirm(solution).peak_bytes


def loss_of_all(output: torch.Tensor) -> torch.Tensor:
    return (output**2).sum()
