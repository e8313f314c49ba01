"""Plans with slices from a model to its training: saved, loaded, applied; what is told, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import BadRequest, InfeasibleBudget, PlanDisagrees
from lowtide.planner.ladder import Ladder
from lowtide.planner.ops import StepBudget
from lowtide.planner.real_step import RealStep
from lowtide.planner.verify import _numbers_of_plain, tried
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.solvers.tiled_summary import families
from lowtide.text.budget import Budget
from lowtide.text.units import format_bytes
from lowtide.trace.spec import StepSpec
from tests.helpers.heads import LOGITS_BYTES, Head, batch


def planned(**wishes: object) -> GraphSolution:
    solution = lowtide.plan(Head(), batch(), profile=False, effort="quick", **wishes)  # type: ignore[arg-type]
    assert isinstance(solution, GraphSolution)
    return solution


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Those of one step."""
    model.zero_grad()
    model(*batch()).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# By hand ---------------------------------------------------------------------------------------------


def test_a_head_in_slices_needs_less_than_its_logits() -> None:
    plain, sliced = planned(budget="min"), planned(budget="min", tiles=True)
    assert plain.graph.tiled is None
    assert plain.peak_bytes > 2 * LOGITS_BYTES
    assert sliced.peak_bytes < LOGITS_BYTES
    assert [family.spared_bytes for family in families(sliced.graph)][:1] == [LOGITS_BYTES]
    assert "head" in str(sliced)


def test_a_plan_with_slices_that_was_saved_trains_as_before(tmp_path: Path) -> None:
    lowtide.save_solution(planned(budget="min", tiles=True), tmp_path / "plan.json")
    solution = lowtide.load_solution(tmp_path / "plan.json")
    assert isinstance(solution, GraphSolution)
    assert solution.graph.tiled is not None
    model = Head()
    expected = gradients(Head())
    found = gradients(lowtide.apply(model, solution, on_new_inputs="error"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert lowtide.plans_of(model) == (solution,)


def test_a_plan_with_slices_is_verified_but_for_the_order_of_its_sums() -> None:
    spec = StepSpec(Head(), batch(), tiles=True, profile=False)
    step = StepBudget(spec)
    found = tried(spec, step.solve("auto", "min"), step.plain)
    assert not found.to_the_bit
    assert found.peak_bytes <= found.allowed_bytes
    whole = tried(spec, StepBudget(replace(spec, tiles=False)).solve("auto", "min"), step.plain)
    assert whole.to_the_bit
    plain = RealStep(spec, warm_up=1)
    allowed = [_numbers_of_plain(plain, another_order) for another_order in (False, True)]
    assert [alike.part for alike in allowed if alike is not None] == [0.0, 1e-4]


def test_a_plan_whose_slices_add_up_to_something_else_is_found_out() -> None:
    spec = StepSpec(Head(), batch(), tiles=True, profile=False)
    step = StepBudget(spec)
    solution = step.solve("auto", "min")
    ops = [
        replace(op, args=op.args[::-1]) if op.target == "aten.div.Tensor" and op.args[0] != 1.0 else op
        for op in solution.graph.ops
    ]
    assert tuple(ops) != solution.graph.ops
    wrong = replace(solution, graph=replace(solution.graph, ops=tuple(ops)))
    with pytest.raises(PlanDisagrees, match="the loss is off by"):
        tried(spec, wrong, step.plain)


def test_optimize_takes_slices_too_and_plans_other_lengths_with_them() -> None:
    model = lowtide.optimize(Head(), batch(), budget="min", tiles=True, profile=False, effort="quick")
    with pytest.warns(UserWarning, match="planned"):
        model(*batch(96)).backward()
    first, second = lowtide.plans_of(model)
    for solution in (first, second):
        assert isinstance(solution, GraphSolution)
        assert solution.graph.tiled is not None


def test_where_scaling_what_was_made_ahead_needs_most_the_search_ends() -> None:
    """The gradient of a head that is as large as its logits is scaled as a whole."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(500, 32), nn.Linear(32, 500, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(self.embed(ids)), ids)

    solution = lowtide.plan(Bare(), torch.arange(64), budget="min", tiles=True, profile=False, effort="quick")
    assert isinstance(solution, GraphSolution)
    assert [family.regions for family in families(solution.graph)] == [("head",)]


def test_that_nothing_can_be_sliced_is_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="tiles were asked for, and nothing of the step runs in slices"):
        solution = lowtide.plan(
            model, torch.ones(1, 4), loss=torch.sum, budget="min", tiles=True, profile=False
        )
    assert solution.remark.endswith("nothing that can be cut makes it peak lower")
    assert solution.remark in str(solution)


def test_that_slices_do_not_pay_within_a_budget_is_said() -> None:
    class Sums(nn.Module):
        """Every one is as large as the others, and none is one that can be cut."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = torch.exp(torch.cumsum(torch.cumsum(x * self.weight, 0), 1) / 4096)
            return x.sum()

    with pytest.warns(UserWarning, match="nothing that can be cut makes it take less time within the budget"):
        lowtide.plan(Sums(), torch.ones(64, 64), budget="75%", tiles=True, profile=False)


def test_a_budget_that_needs_nothing_is_no_reason_for_a_remark() -> None:
    assert planned(budget="1GiB", tiles=True).remark == ""


def test_a_plan_by_layers_says_that_nothing_of_it_runs_in_slices() -> None:
    class Stubborn(nn.Module):
        """No graph of it can be captured whole."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sum(self.layers(x))

    spec = StepSpec(Stubborn(), torch.ones(8, 64), tiles=True, profile=False)
    ladder = Ladder(spec, "auto")

    def refuse(*_: object) -> GraphSolution:
        raise lowtide.CannotCapture("nobody can")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepBudget, "within", refuse)
        found = ladder.within(Budget.parse("min"))
    assert isinstance(found, Solution)
    assert found.remark.endswith("nobody can; nothing of it runs in slices, which are for plans op by op")


def test_a_step_in_slices_runs_in_an_arena() -> None:
    plain, model = Head(), Head()
    step = lowtide.in_arena(model, batch(), solution=planned(budget="min", tiles=True))
    assert step.report.arena_bytes < LOGITS_BYTES
    plain(*batch()).backward()
    step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_frontier_of_a_graph_in_slices_keeps_them() -> None:
    found = lowtide.frontier(planned(budget="min", tiles=True).graph, 3)
    assert len(found) > 1
    assert all(solution.graph.tiled is not None for solution in found)
    assert max(solution.peak_bytes for solution in found) < LOGITS_BYTES


# Refusals --------------------------------------------------------------------------------------------


def test_a_budget_that_slices_would_keep_is_refused_with_what_they_reach() -> None:
    least = planned(budget="min", tiles=True).peak_bytes
    with pytest.raises(InfeasibleBudget) as refusal:
        planned(budget=LOGITS_BYTES)
    assert "With tiles=True (--tiles) the least is " in str(refusal.value)
    assert refusal.value.least_bytes > 2 * LOGITS_BYTES
    hinted = StepBudget(StepSpec(Head(), batch(), profile=False)).least_bytes_in_slices("auto", 60.0)
    assert hinted is not None
    assert format_bytes(hinted) in str(refusal.value)
    assert least <= hinted < LOGITS_BYTES
    assert planned(budget=hinted, tiles=True).peak_bytes <= hinted


def test_with_slices_a_refusal_has_no_such_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBudget, "least_bytes_in_slices", None)  # which nobody calls
    with pytest.raises(InfeasibleBudget) as refusal:
        planned(budget=1000, tiles=True)
    assert "tiles=True" not in str(refusal.value)
    assert refusal.value.least_bytes < LOGITS_BYTES


def test_a_budget_that_slices_do_not_help_is_refused_without_a_word_of_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(InfeasibleBudget) as refusal:
        lowtide.plan(model, torch.ones(1, 4), loss=torch.sum, budget=10, profile=False)
    assert "tiles" not in str(refusal.value)


def test_a_search_that_takes_too_long_is_given_up() -> None:
    assert StepBudget(StepSpec(Head(), batch(), profile=False)).least_bytes_in_slices("auto", -1.0) is None


@pytest.mark.parametrize("function", [lowtide.plan, lowtide.optimize])
def test_slices_and_a_method_for_chains_are_refused(function: object) -> None:
    with pytest.raises(BadRequest, match="tiles are for methods that plan op by op"):
        function(Head(), batch(), budget="90%", method="rotor", tiles=True)  # type: ignore[operator]
