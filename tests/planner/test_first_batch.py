"""Planning at the first batch: nothing is looked at before, and nothing else changes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import BadRequest, CannotApply, InfeasibleBudget
from lowtide.ir.graph import Role
from lowtide.solvers.solution import GraphSolution
from lowtide.trace.spec import StepSpec
from lowtide.trace.training import trace_training
from tests.helpers.transformer_models import small_transformer


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Net(nn.Module):
    """Convolutions, BatchNorm and dropout, and the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.1)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return (
        torch.randn(size, 3, 24, 24, generator=generator),
        torch.randint(0, 10, (size,), generator=generator),
    )


def route(model: nn.Module) -> Any:
    """What stands in for the model's forward."""
    return vars(model)["forward"]


def trained(model: nn.Module, sizes: list[int]) -> list[float]:
    """The losses of steps over batches of these sizes; what is random goes on from step to step."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for size in sizes:
        loss = model(*batch(size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("method", ["auto", "rotor"])
def test_the_first_batch_is_planned_for_without_a_warning_and_the_bits_are_those_of_plain_training(
    method: str,
) -> None:
    plain, model = net(), net()
    assert lowtide.optimize(model, budget="60%", method=method) is model
    expected = trained(plain, [8, 8, 8])
    assert trained(model, [8, 8, 8]) == expected
    for (name, mine), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize("method", ["auto", "rotor"])
def test_a_part_of_the_plain_peak_stays_what_it_was_for_the_first_batch(method: str) -> None:
    model = net()
    lowtide.optimize(model, budget="60%", method=method, profile=False)
    trained(model, [8])
    planned = lowtide.plan(net(), batch(8), budget="60%", method=method, profile=False).budget_bytes
    replan = route(model)._replan
    assert planned is not None
    assert replan.budget.bytes == planned
    with pytest.warns(UserWarning, match="new inputs|inputs without a plan|New inputs"):
        trained(model, [6])
    assert replan.budget.bytes == planned


def test_the_budget_is_kept_from_the_second_step_on() -> None:
    model = net()
    lowtide.optimize(model, budget="55%")
    trained(model, [8])
    (solution,) = lowtide.plans_of(model)
    assert isinstance(solution, GraphSolution)
    assert solution.budget_bytes is not None
    x, labels = batch(8)
    reading = lowtide.measure(lambda: model(x, labels).backward(), device="cpu")
    model.zero_grad()
    plain = net()
    unplanned = lowtide.measure(lambda: plain(x, labels).backward(), device="cpu")
    assert reading.growth_bytes <= solution.budget_bytes - solution.timeline.resident_bytes
    assert reading.growth_bytes < 0.6 * unplanned.growth_bytes


def test_what_runs_before_training_is_not_planned_for() -> None:
    model = net()
    model.eval()
    lowtide.optimize(model, budget="60%", profile=False)
    model(*batch(4))
    model.train()
    with torch.no_grad():
        model(*batch(4))
    assert lowtide.plans_of(model) == ()
    model(*batch(8))
    (solution,) = lowtide.plans_of(model)
    assert isinstance(solution, GraphSolution)
    assert solution.inputs[0] == "float32[8, 3, 24, 24]"
    lowtide.remove(model)
    assert lowtide.plans_of(model) == ()


@pytest.mark.parametrize("method", ["auto", "rotor"])
def test_on_request_shapes_after_the_first_are_refused(method: str) -> None:
    model = net()
    lowtide.optimize(model, budget="60%", method=method, on_new_shape="error", profile=False)
    trained(model, [8])
    with pytest.raises(CannotApply, match=r"float32\[6, 3, 24, 24\]"):
        trained(model, [6])


def test_progress_is_told_when_the_batch_is_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where no costs are known yet
    told: list[tuple[int, int]] = []
    model = net()
    lowtide.optimize(model, budget="60%", progress=lambda done, of: told.append((done, of)))
    assert told == []
    trained(model, [8])
    assert told[-1][0] == told[-1][1] > 0


def test_a_shape_that_comes_back_after_another_was_planned_for_runs_as_it_did() -> None:
    """Planning empties Dynamo's caches: this model's graph has outputs that get no gradient, and a number."""
    model, inputs = small_transformer("gpt2", n_layer=1)
    lowtide.optimize(model, budget="80%", profile=False)
    smaller = {name: tensor[:1] for name, tensor in inputs.items()}
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lowtide: the model meets inputs without a plan")
        for each in (inputs, smaller, inputs):
            torch.manual_seed(1)
            loss = model(**each).loss
            loss.backward()
            model.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[0] == losses[2] != losses[1]


# Optimizers that there are ----------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_lowtide_has_no_name_for_is_counted_as_it_is(kind: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    trace = trace_training(StepSpec(model, batch(), optimizer=optimizer, profile=False))
    assert not optimizer.state
    model(*batch()).backward()
    optimizer.step()
    held = sum(
        thing.untyped_storage().nbytes() for state in optimizer.state.values() for thing in state.values()
    )
    counted = [
        trace.graph.values[value].bytes
        for value in trace.graph.resident
        if trace.graph.values[value].role is Role.OPTIMIZER_STATE
    ]
    assert sum(counted) == held > 0


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "many"}, "cannot read 'many' as a size"),
        ({"budget": "1GiB", "optimizer": "lion"}, "there is no optimizer 'lion'"),
        ({"budget": "1GiB", "optimizer": nn.Linear(1, 1)}, "the optimizer is a Linear"),
        ({"budget": "1GiB", "accumulate": 0}, "accumulate is 0"),
        ({"budget": "1GiB", "method": "best"}, "there is no method called 'best'"),
        ({"budget": "1GiB", "on_new_shape": "warn"}, "on_new_shape is 'warn'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_batch(options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(BadRequest, match=message):
        lowtide.optimize(model, **options)
    assert "forward" not in vars(model)


def test_a_budget_that_cannot_be_kept_is_refused_when_the_batch_is_met() -> None:
    model = net()
    lowtide.optimize(model, budget="100KiB", profile=False)
    with pytest.raises(InfeasibleBudget, match=r"no plan of auto fits in 100\.0 KiB"):
        model(*batch())


def test_a_forward_that_another_library_wraps_afterwards_is_refused() -> None:
    model = net()
    lowtide.optimize(model, budget="60%")
    planned = model.forward
    model.forward = lambda *args: planned(*args)  # type: ignore[method-assign]
    with pytest.raises(CannotApply, match=r"wrapped by another library after lowtide\.optimize"):
        model(*batch())
