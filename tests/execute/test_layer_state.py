"""What a model keeps, and draws: plans of layers change it once, whatever path the model takes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.chain.plan import Plan, Segment
from lowtide.errors import CannotApply
from lowtide.execute.apply import apply, remove
from lowtide.planner.layers import Rehearsal
from tests.execute.test_layer_hooks import solution_of, square

X = torch.randn(6, 8)


class Body(nn.Module):
    """Four layers; what happens around each of them is up to a subclass."""

    table: torch.Tensor
    ema: torch.Tensor
    path: str

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("ema", torch.zeros(()))
        self.path = "planned"

    def around(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.tanh(layer(x))
        return found

    def last(self) -> None:
        """Before the forward ends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = self.around(number, layer, x)
        self.last()
        return x


def state_of(model: nn.Module) -> dict[str, Any]:
    """What is left in a model: gradients, buffers and other attributes, and where random numbers stand."""
    found: dict[str, Any] = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        for name, thing in vars(module).items():
            if isinstance(thing, (int, list, torch.Tensor)):
                found[f"{path}.{name}"] = thing
    return found | {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"],
    }


def are_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, nn.Module):
        return are_same([*one.state_dict().values()], [*other.state_dict().values()])
    if isinstance(one, dict):
        return are_same([*one.values()], [*other.values()])
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(np.array_equal(one, other))


def train(model: nn.Module, path: str, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model.path = path  # type: ignore[assignment]
    for _ in range(steps):
        square(model(X)).backward()
    return state_of(model)


def plans(n: int) -> list[Plan]:
    nested = Segment(0, n - 1, (Segment(0, n // 2, (Segment(0, 1),)), Segment(n // 2, n - 1)))
    return [Plan.at(range(1, n)), Plan.at([n]), Plan.at([n // 2]), Plan((nested,))]


def assert_trains_alike(make: Callable[[], nn.Module], *paths: str, seed: int = 1) -> None:
    """Under plans of several shapes, made for the first of the paths, others leave behind the same."""
    planned = paths or ("planned",)
    example = make()
    chain = Rehearsal(example, (X,), square, profile=False).chain("fine")
    for plan in plans(len(chain)):
        for path in planned:
            model, plain = make(), make()
            apply(model, solution_of(chain, plan), on_new_inputs="ignore")
            expected, found = train(plain, path, 2, seed), train(model, path, 2, seed)
            remove(model)
            assert found.keys() == expected.keys()
            wrong = [key for key in expected if not are_same(found[key], expected[key])]
            assert not wrong, f"{plan} on path {path}: {', '.join(wrong)}"


# Buffers that change ------------------------------------------------------------------------------------


class ChangedLater(Body):
    def around(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x) + self.table)

    def last(self) -> None:
        self.table.mul_(0.5)


class ChangedThroughView(ChangedLater):
    def last(self) -> None:
        self.table.view(2, 4)[0] = 3.0
        self.table.data += 1.0


class ChangedBetween(ChangedLater):
    def around(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if number == 2:
            self.table[1:3] = x.detach().mean(0)[1:3]
        return torch.tanh(layer(x) + self.table)


class Keeping(nn.Module):
    """A layer that keeps things in every way."""

    ema: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("ema", torch.zeros(()))
        self.register_buffer("steps", torch.zeros(()))
        self.plain = torch.ones(8)
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ema = self.ema * 0.9 + x.detach().mean()
        self.steps += 1
        self.plain.mul_(0.9)
        self.calls += 1
        self.seen.append(self.calls)
        return self.linear(x * self.ema + self.plain * self.steps) * len(self.seen)  # type: ignore[no-any-return]


class KeepingLayers(Body):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping() for _ in range(4))


class ReassignedBetween(Body):
    def around(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.ema = self.ema * 0.9 + x.detach().mean()
        return torch.tanh(layer(x * self.ema))


class RereadStatistics(Body):
    """BatchNorm's statistics, read before they are changed, and by a norm that uses them in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.other = Renorm(8)

    def around(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert self.norm.running_mean is not None
        return torch.tanh(self.other(self.norm(layer(x) * (1 + self.norm.running_mean))))


class Renorm(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        self.running_mean.mul_(0.5).add_(x.detach().mean(0))
        return x - self.running_mean


class SwitchesAround(Body):
    """Autocast and gradients are switched on and off between modules, and around some of them."""

    def around(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number != 1):
            x = layer(x) @ torch.ones(8, 8)
        with torch.no_grad():
            scale = layer(x.float()).abs().mean() + x.float().sum()
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x.float() @ torch.ones(8, 8) * scale)


class EvaluatesItsNorm(Body):
    """Its statistics are read, though it was in training when the forward began."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Evaluated() for _ in range(4))


class Evaluated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        assert self.norm.running_mean is not None
        self.norm.running_mean.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm.eval()(self.linear(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        SwitchesAround,
        ChangedLater,
        ChangedThroughView,
        ChangedBetween,
        KeepingLayers,
        ReassignedBetween,
        RereadStatistics,
        EvaluatesItsNorm,
    ],
)
def test_what_a_model_keeps_is_changed_once_and_seen_as_it_was(make: type[Body]) -> None:
    assert_trains_alike(make)


def test_a_buffer_that_is_changed_before_the_backward_is_refused_and_not_read() -> None:
    model = ChangedLater()
    chain = Rehearsal(model, (X,), square, profile=False).chain("fine")
    apply(model, solution_of(chain, Plan.at([len(chain) - 1])))
    loss = square(model(X))
    with torch.no_grad():
        model.get_parameter("layers.0.weight").add_(1)
    with pytest.raises(CannotApply, match="was changed in place between the forward that used it"):
        loss.backward()


class ChangesItsInput(Body):
    """Before its layers, or within the first of them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers[0], self.where = InPlace(where), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5) if self.where == "model" else x)


class InPlace(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(8, 8), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.add_(1.0) if self.where == "layer" else x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", ["model", "layer"])
def test_a_batch_that_the_model_changes_in_place_is_changed_once_and_seen_as_it_was(where: str) -> None:
    chain = Rehearsal(ChangesItsInput(where), (X.clone(),), square, profile=False).chain("fine")
    for plan in plans(len(chain)):
        plain, model = ChangesItsInput(where), ChangesItsInput(where)
        apply(model, solution_of(chain, plan))
        batch, changed = X.clone(), X.clone()
        square(plain(batch)).backward()
        square(model(changed)).backward()
        remove(model)
        assert torch.equal(batch, changed)
        assert not torch.equal(batch, X)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert are_same(one.grad, other.grad), f"{plan}"


# Other paths ----------------------------------------------------------------------------------------------


class Branches(Body):
    """What it does is not what was planned, but for one path."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))
        self.hidden = [nn.BatchNorm1d(8)]  # no submodule

    def around(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.path == "skip" and number in (0, 2):
            return x
        more: dict[str, nn.Module] = {"twice": layer, "norms": self.norms[number], "hidden": self.hidden[0]}
        if self.path in more:
            x = more[self.path](x)
        if self.path == "functions":
            F.batch_norm(x, self.table, torch.ones(8), training=True, momentum=0.5)
            self.table.add_(1.0)
            x = x + self.table
        return super().around(number, layer, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.path != "backwards":
            return super().forward(x)
        for number in reversed(range(4)):
            x = self.around(number, self.layers[number], x)
        return x


def test_other_paths_than_the_planned_one_are_right() -> None:
    assert_trains_alike(Branches, "skip", "norms", "hidden", "functions", "twice", "backwards")


def test_a_path_with_fewer_layers_is_within_the_plan_and_another_one_is_told_once() -> None:
    model = Branches()
    chain = Rehearsal(model, (X,), square, profile=False).chain("fine")
    apply(model, solution_of(chain, Plan.at(range(1, len(chain)))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, "skip", 1, 0)
    with pytest.warns(
        UserWarning, match=r"took another path .* it calls norms\.0 where that was not planned"
    ):
        train(model, "norms", 2, 0)


class Switch(nn.Module):
    """A part of it is called where a number says so, which a dry run does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.more(x) if x.mean() > -10 else x


@pytest.mark.parametrize("plan", ["keep all", "[1-2]", "[1-1]"])
def test_a_call_within_a_unit_that_was_not_planned_is_told(plan: str) -> None:
    model = nn.Sequential(Switch(), nn.Linear(8, 8))
    chain = Rehearsal(model, (X,), square, profile=False).chain("block")
    apply(model, solution_of(chain, Plan.read(plan)))
    with pytest.warns(UserWarning, match=r"took another path .* it calls 0\.more where that was not planned"):
        square(model(X)).backward()


# Random numbers -------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(3)
        self.private = random.Random(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * random.random() + float(np.random.rand()) * self.private.random()
        x = x + torch.rand(8, generator=self.generator)
        return self.linear(F.dropout(x, 0.2))  # type: ignore[no-any-return]


class DrawingLayers(Body):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Drawing() for _ in range(4))
        self.generator = torch.Generator().manual_seed(5)

    def around(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super().around(number, layer, x * torch.rand(8, generator=self.generator))


class LayerDrop(Body):
    def around(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        draw = [random.random(), float(np.random.uniform()), float(torch.rand([]))][number % 3]
        return x if draw < 0.4 and self.path == "drop" else super().around(number, layer, F.dropout(x, 0.1))


def test_random_numbers_are_drawn_once_and_are_the_same_again() -> None:
    assert_trains_alike(DrawingLayers)


@pytest.mark.parametrize("seed", range(4))
def test_layers_that_are_dropped_at_random_train_alike(seed: int) -> None:
    assert_trains_alike(LayerDrop, "drop", seed=seed)


def test_a_model_that_holds_no_memory_can_be_given_a_plan() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    rehearsal = Rehearsal(model, (X,), square, device="cuda", profile=False)
    solution = rehearsal.confirmed(solution_of(rehearsal.chain("fine"), Plan.at([2])))
    assert apply(model, solution) is model
