"""Loops with Hugging Face Accelerate, with and without a budget."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import BadRequest, CannotApply, MissingExtra
from lowtide.ir.graph import Role
from lowtide.solvers.solution import GraphSolution

accelerate = pytest.importorskip("accelerate")
from lowtide.integrations.accelerate import prepare  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()
    gc.collect()


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def batches(count: int = 4) -> Any:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8 * count, 3, 20, 20, generator=generator)
    labels = torch.randint(0, 10, (8 * count,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=8)


def like_the_loss(logits: torch.Tensor) -> torch.Tensor:
    """A number that is made of logits as a cross entropy is, whatever the labels."""
    return F.cross_entropy(logits, logits.argmax(1))


def an_accelerator(**options: Any) -> Any:
    return accelerate.Accelerator(cpu=True, **options)


def prepared(accelerator: Any, budget: str | None, count: int = 4) -> Any:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if budget is None:
        return accelerator.prepare(model, optimizer, batches(count))
    return prepare(
        accelerator, model, optimizer, batches(count), budget=budget, loss=like_the_loss, progress=False
    )


def loop(accelerator: Any, model: Any, optimizer: Any, data: Any) -> tuple[list[float], list[int]]:
    """The losses, and what each step but the first held."""
    torch.manual_seed(1)
    losses: list[float] = []
    growth: list[int] = []
    for images, labels in data:

        def step(images: torch.Tensor = images, labels: torch.Tensor = labels) -> None:
            with accelerator.accumulate(model):
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))

        if not losses:
            step()
        else:
            growth.append(lowtide.measure(step, device="cpu").growth_bytes)
    return losses, growth


def solution_of(accelerator: Any, model: Any) -> GraphSolution:
    (solution,) = lowtide.plans_of(accelerator.unwrap_model(model))
    assert isinstance(solution, GraphSolution)
    return solution


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"},
    ],
)
def test_a_loop_trains_as_it_did_and_within_the_budget(options: dict[str, Any], tmp_path: Path) -> None:
    plain = an_accelerator(**options)
    unplanned = prepared(plain, None)
    expected, most = loop(plain, *unplanned)
    accelerator = an_accelerator(**options)
    model, optimizer, data = prepared(accelerator, "75%")
    losses, growth = loop(accelerator, model, optimizer, data)
    mine, its = accelerator.unwrap_model(model).state_dict(), plain.unwrap_model(unplanned[0]).state_dict()
    if options:  # autocast casts a weight once, a plan where it is used
        assert losses == pytest.approx(expected, rel=1e-2)
    else:
        assert losses == expected
        assert all(torch.equal(mine[name], its[name]) for name in its)
    assert list(mine) == list(its)
    solution = solution_of(accelerator, model)
    assert solution.budget_bytes is not None
    assert max(growth) <= solution.budget_bytes - solution.timeline.resident_bytes
    assert max(growth) < 0.8 * max(most)
    values = solution.graph.values
    assert any(value.role is Role.OPTIMIZER_STATE for value in values)
    assert any(value.name.endswith("so far") for value in values) == bool(options)


@pytest.mark.long
def test_a_state_that_is_saved_and_loaded_goes_on_as_before(tmp_path: Path) -> None:
    accelerator = an_accelerator()
    model, optimizer, data = prepared(accelerator, "65%", count=2)
    loop(accelerator, model, optimizer, data)
    accelerator.save_state(str(tmp_path))
    after, _ = loop(accelerator, model, optimizer, data)
    accelerator.load_state(str(tmp_path))
    again, _ = loop(accelerator, model, optimizer, data)
    assert again == after


def planned_first(accelerator: Any) -> Any:
    model = lowtide.optimize(net(), budget="75%", loss=like_the_loss, profile=False)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters()), batches(1))


def test_planning_first_works_where_nothing_is_wrapped() -> None:
    accelerator = an_accelerator()
    model, optimizer, data = planned_first(accelerator)
    assert len(loop(accelerator, model, optimizer, data)[0]) == 1
    assert solution_of(accelerator, model).inputs == ("float32[8, 3, 20, 20]",)


# Refusals ---------------------------------------------------------------------------------------------


def test_planning_first_is_refused_where_mixed_precision_is_wrapped_around_the_plan() -> None:
    accelerator = an_accelerator(mixed_precision="bf16")
    model, optimizer, data = planned_first(accelerator)
    with pytest.raises(CannotApply, match=r"accelerator\.prepare, say"):
        loop(accelerator, model, optimizer, data)


def test_a_model_that_is_compiled_anyway_is_refused_and_nothing_is_prepared() -> None:
    accelerator = an_accelerator(dynamo_backend="eager")
    model = net()
    with pytest.raises(BadRequest, match="compiles the model"):
        prepare(accelerator, model, torch.optim.SGD(model.parameters()), budget="60%")
    assert accelerator._models == []


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = an_accelerator()
    monkeypatch.setattr(
        type(accelerator), "distributed_type", accelerate.utils.DistributedType.FSDP, raising=True
    )
    model = net()
    with pytest.raises(BadRequest, match="works with FSDP"):
        prepare(accelerator, model, torch.optim.SGD(model.parameters()), budget="60%")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lowtide.integrations.accelerate")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lowtide\[accelerate\]'"):
        import lowtide.integrations.accelerate  # noqa: F401
