"""Plans tried on a real step: what is right passes, what is wrong is found out, nothing is used up."""

from __future__ import annotations

import pickle
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.aot import codegen
from lowtide.errors import Difference, PlanDisagrees
from lowtide.execute.unit_state import UnitState
from lowtide.planner import layers, verify
from lowtide.planner.ladder import AnySolution, Ladder
from lowtide.planner.real_step import RealStep
from lowtide.text.budget import Budget
from lowtide.trace.spec import StepSpec
from tests.helpers.eager import mean_square

aten = torch.ops.aten
_QUICKER: Any = codegen._QUICKER


class Lively(nn.Module):
    """Dropout, a buffer and an attribute that change, and a batch that is written to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 32))
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros(()))
        self.names = ["untouched"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x.mul_(0.5)
        y: torch.Tensor = self.parts(x)
        return y


def normal(rows: int = 2) -> nn.Module:
    """BatchNorms between layers."""
    torch.manual_seed(0)
    parts = [part for _ in range(rows) for part in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())]
    return nn.Sequential(*parts, nn.Linear(32, 32))


def batch() -> torch.Tensor:
    return torch.randn(128, 32, generator=torch.Generator().manual_seed(1))


def of_python_and_numpy() -> object:
    """The states of random streams that are not torch's."""
    return random.getstate(), pickle.dumps(np.random.get_state())


def state_of(model: nn.Module) -> list[torch.Tensor]:
    gradients = [tensor.grad for tensor in model.parameters() if tensor.grad is not None]
    return [tensor.clone() for tensor in (*model.parameters(), *model.buffers(), *gradients)]


@dataclass(frozen=True)
class Planned:
    """A step that is planned once for many tests."""

    ladder: Ladder
    solution: AnySolution

    def tried(self, **doctored: Any) -> verify.Verification:
        """The plan, with other fields, tried on the model, which is then as it was."""
        model = self.ladder.spec.model
        before = state_of(model)
        try:
            solution = replace(self.solution, **doctored)
            return verify.tried(self.ladder.spec, solution, self.ladder.step.plain)
        finally:
            assert not lowtide.plans_of(model)
            assert all(map(torch.equal, before, state_of(model)))
            assert all(parameter.grad is None for parameter in model.parameters())

    def found_out(self, **doctored: Any) -> tuple[Difference, ...]:
        """What is found to be different."""
        with pytest.raises(PlanDisagrees) as refusal:
            self.tried(**doctored)
        return refusal.value.differences


@pytest.fixture(scope="module")
def planned() -> Planned:
    ladder = Ladder(StepSpec(normal(), (batch(),), mean_square), "auto")
    return Planned(ladder, ladder.within(Budget.parse("min")))


def test_a_right_plan_passes_and_everything_is_as_it_was() -> None:
    model, x = Lively(), batch()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    optimizer = torch.optim.Adam(model.parameters())
    before, others = [*state_of(model), x.clone(), torch.get_rng_state()], of_python_and_numpy()
    lowtide.optimize(
        model, (x,), budget="min", loss=mean_square, optimizer=optimizer, effort="quick", verify=True
    )
    after = [*state_of(model), x, torch.get_rng_state()]
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))
    assert others == of_python_and_numpy()
    assert not optimizer.state
    assert lowtide.plans_of(model)


def test_a_right_plan_is_said_to_be_right_to_the_last_bit(planned: Planned) -> None:
    found = planned.tried(budget_bytes=None)
    assert found.to_the_bit
    assert found.peak_bytes == planned.solution.peak_bytes
    assert str(found) == (
        "verified on a real step: its numbers are those of plain training, its peak as promised"
    )


def test_gradients_of_earlier_micro_batches_are_there_when_it_is_tried(planned: Planned) -> None:
    spec = replace(planned.ladder.spec, accumulate=4)
    step = Ladder(spec, "evict")
    solution = step.step.within("evict", Budget.parse("100%"))
    assert verify.tried(spec, solution, step.step.plain).peak_bytes <= solution.peak_bytes


def test_a_kernel_that_makes_something_else_is_found_out(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_QUICKER, aten.tanh.default, lambda x: torch.tanh(x) * (1 + 1e-6))
    found = planned.found_out()
    assert {"loss", "gradient"} <= {each.what for each in found}
    assert all(each.by > 0 and each.allowed == 0 for each in found)


def test_statistics_that_are_updated_twice_are_found_out(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codegen, "without_updates", lambda node: node.args)
    found = planned.found_out()
    assert {each.what for each in found} == {"buffer"}
    assert {each.name for each in found} <= {f"{at}.running_{of}" for at in "14" for of in ("mean", "var")}


def test_a_value_that_was_saved_wrong_is_found_out(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    def negated(half: Any, node: Any) -> Any:
        taken = own(half, node)
        is_saved = taken.target != node.name and "saved" in str(taken.target)
        number = node.meta["val"].is_floating_point() and node.op == "call_function"
        return half.graph.call_function(aten.mul.Tensor, (taken, -1.0)) if is_saved and number else taken

    own = codegen._Half._take
    monkeypatch.setattr(codegen._Half, "_take", negated)
    assert "gradient" in {each.what for each in planned.found_out()}


def test_a_peak_above_the_promise_is_found_out(planned: Planned) -> None:
    below = planned.solution.peak_bytes - 1
    assert planned.found_out(budget_bytes=below) == (Difference("peak", "", 1, 0),)


def test_the_error_says_what_differs_and_what_to_do() -> None:
    differences = [Difference("gradient", f"{k}.weight", 0.5, 0.0) for k in range(4)]
    error = PlanDisagrees("auto", [Difference("peak", "", 2048, 0), *differences])
    assert str(error) == (
        "the plan of auto was tried on a real step, and was not put to use: the peak is 2.0 KiB (2048 bytes) "
        "higher than promised; the gradient of '0.weight' is off by 0.5, and by 0 it may be; the gradient of "
        "'1.weight' is off by 0.5, and by 0 it may be; and 2 more. Plan by another method, or within a lower "
        "budget if only the peak differs, or train without a plan; and please report it."
    )


def test_a_plain_step_without_room_leaves_the_peak_to_be_verified(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = verify._numbers, iter([True, False, False])

    def numbers(step: Any) -> Any:
        if next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(step)

    monkeypatch.setattr(verify, "_numbers", numbers)
    with pytest.warns(UserWarning, match="the plain step does not fit in memory"):
        found = planned.tried()
    assert not found.plain_fits
    assert "the plain one, too large, was not run" in str(found)


def test_a_right_plan_of_layers_passes_and_statistics_that_it_updates_twice_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = StepSpec(normal(6), (batch(),), mean_square, profile=False)
    ladder = Ladder(spec, "auto")
    layers = Planned(ladder, ladder.rehearsal.solve(ladder.rehearsal.chain(), "chen-sqrt"))
    assert layers.tried().to_the_bit
    monkeypatch.setattr(UnitState, "run_again", lambda self, unit, kept, *args, **more: unit(*args, **more))
    assert {each.what for each in layers.found_out()} == {"buffer"}


def test_a_plan_that_is_wrong_is_taken_off_the_first_batch_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnitState, "run_again", lambda self, unit, kept, *args, **more: unit(*args, **more))
    monkeypatch.setattr(layers, "_refuse_changes_made_twice", lambda *_: None)
    model = normal(6)
    lowtide.optimize(model, loss=mean_square, method="chen-sqrt", profile=False, verify=True)
    with pytest.raises(PlanDisagrees, match=r"the buffer of '1.running_mean' is off by"):
        model(batch())
    assert not lowtide.plans_of(model)
    assert model(batch()).shape == (128, 32)


def test_a_wrong_plan_of_ops_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_QUICKER, aten.tanh.default, torch.sin)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    with pytest.raises(PlanDisagrees):
        lowtide.optimize(model, (batch(),), budget="100%", loss=mean_square, profile=False, verify=True)
    assert not lowtide.plans_of(model)


@pytest.mark.parametrize(("part", "passes"), [(0.01, True), pytest.param(0.5, False, marks=pytest.mark.long)])
def test_under_autocast_rounding_is_no_difference(
    part: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_QUICKER, aten.tanh.default, lambda x: torch.tanh(x) * (1 + part))
    # the gradient of the second bias is nothing but rounding
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())
    with torch.autocast("cpu", torch.bfloat16), nullcontext() if passes else pytest.raises(PlanDisagrees):
        lowtide.plan(model, (batch(),), budget="100%", loss=mean_square, verify=True)


class Keyed(nn.Module):
    """Attention: the bias of its keys has a gradient that is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).mT / 6
        found: torch.Tensor = scores.softmax(-1) @ self.v(x)
        return found


def test_weights_that_are_moved_by_a_rounding_are_cast_anew() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        solution = lowtide.plan(Keyed(), (batch(),), budget="min", loss=mean_square, effort="quick")
        ladder = Ladder(StepSpec(Keyed(), (batch(),), mean_square), "auto")
        alike = verify._numbers_of_plain(RealStep(ladder.spec, warm_up=1), another_order=False)
        assert alike is not None
        assert alike.spread["gradient", "k.bias"] > 0
        verify.tried(ladder.spec, solution, ladder.step.plain)


class Counted(nn.Module):
    """Counts its calls in Python, so that it is compiled anew at every one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(32, 32), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.layer(x).tanh()
        return found


def test_what_dynamo_holds_while_it_compiles_is_no_part_of_the_peak() -> None:
    model, x = Counted(), torch.randn(8, 32)  # which are less than it holds
    lowtide.optimize(model, (x,), budget="min", loss=mean_square, effort="quick", verify=True)
    assert lowtide.plans_of(model)
    assert model.calls == 0


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), 0),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), 0.5),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), torch.inf),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 5),
        (torch.tensor([True]), torch.tensor([False]), 1),
        (torch.tensor([1.0]), None, torch.inf),
        (None, None, 0),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), torch.inf),
    ],
)
def test_how_far_numbers_are_apart(one: Any, other: Any, apart: float) -> None:
    assert verify._apart(one, other) == apart


def numbers(loss: float, weight: float, noise: float, stream: int = 1) -> dict[tuple[str, str], Any]:
    gradients = {
        ("gradient", "weight"): torch.tensor(float(weight)),
        ("gradient", "noise"): torch.tensor(float(noise)),
    }
    return {
        ("loss", ""): torch.tensor(float(loss)),
        **gradients,
        ("random state", "cpu"): torch.tensor([stream]),
    }


def test_kernels_that_are_not_deterministic_are_held_to_their_own_spread() -> None:
    # what should be zero is anything at all, and says nothing of the others
    alike = verify._Alike.of(numbers(2, 8, 1e-7), numbers(2, 8, -1e-7), 0)
    assert not list(alike.differences(numbers(2, 8 * (1 + 2e-4), 7e-7)))
    found = alike.differences(numbers(2, 8.5, 7e-7, stream=0))
    assert [(each.what, each.name, each.by) for each in found] == [
        ("gradient", "weight", 0.5),
        ("random state", "cpu", 1),
    ]
    assert [each.name for each in alike.differences(numbers(2, 8, 1e-5))] == ["noise"]


def test_kernels_that_are_deterministic_are_held_to_the_last_bit() -> None:
    alike = verify._Alike.of(numbers(2, 8, 0), numbers(2, 8, 0), 0)
    assert not alike.tolerant
    assert [each.name for each in alike.differences(numbers(2, 8 * (1 + 1e-6), 0))] == ["weight"]


def test_rounding_is_allowed_where_it_is_asked_for() -> None:
    alike = verify._Alike.of(numbers(2, 8, 0), numbers(2, 8, 0), 0.5)
    assert not list(alike.differences(numbers(3, 12, 0.5)))
    assert list(alike.differences(numbers(3.5, 8, 0))) == [Difference("loss", "", 1.5, 1.0)]


def test_a_model_without_memory_cannot_be_verified() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.empty(2, 4)
    with pytest.raises(
        lowtide.BadRequest, match="cannot verify the plan: the model or the batch is on the meta"
    ):
        lowtide.plan(model, (x,), budget="100%", loss=mean_square, device="cpu", profile=False, verify=True)
