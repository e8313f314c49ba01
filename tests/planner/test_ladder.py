"""A plan for every step that can be traced, and one honest line about what could not be done."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import CannotCapture, InfeasibleBudget
from lowtide.planner.ladder import AnySolution
from lowtide.solvers.solution import Solution

INPUTS = torch.randn(512, 16, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Block(nn.Module):
    """Widens, drops out, and comes back."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.narrow(self.dropout(F.gelu(self.wide(x))))
        return x + added


class Blocks(nn.Module):
    """A stack of blocks; `between` is what a model does before each of them."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(16, 1)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(self.between(x))
        output: torch.Tensor = self.head(x)
        return output.square().mean()


class OnAnItem(Blocks):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x[0, 0].item() < -1e6 else x


class WithNumpy(Blocks):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x if np.zeros(3).sum() + x.mean().item() > -1e6 else -x


class Counting(Blocks):
    """Has a side effect, and a generator in its way."""

    calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        if not all(number > -1e6 for number in self._numbers(x)):
            return -x
        return x

    def _numbers(self, x: torch.Tensor) -> Iterator[float]:
        yield x[0, 0].item()


UNCAPTURABLE: list[type[Blocks]] = [OnAnItem, WithNumpy, Counting]


def made(kind: type[Blocks]) -> Blocks:
    torch.manual_seed(0)
    return kind()


def stepping(model: nn.Module, inputs: torch.Tensor = INPUTS) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        model(inputs).backward()

    return step


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def assert_trains_as(model: nn.Module, plain: nn.Module, inputs: torch.Tensor = INPUTS) -> None:
    """Gradients to the last bit, and the same random numbers afterwards."""
    stepping(plain, inputs)()
    after = torch.get_rng_state()
    stepping(model, inputs)()
    assert torch.equal(after, torch.get_rng_state())
    for mine, other in zip(gradients(model), gradients(plain), strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)


def promised_growth(solution: AnySolution) -> int:
    """The most that a planned step holds beyond what is there before it."""
    if isinstance(solution, Solution):
        assert solution.confirmation is not None
        return solution.confirmation.peak_bytes - resident_bytes(solution.chain.name)
    return solution.timeline.growth_bytes


def resident_bytes(name: str) -> int:
    """Parameters and batch of a model of that name."""
    kinds: dict[str, type[Blocks]] = {kind.__name__: kind for kind in UNCAPTURABLE}
    model = made(kinds[name])
    return sum(4 * parameter.numel() for parameter in model.parameters()) + 4 * INPUTS.numel()


def planned(model: nn.Module, budget: str | int, **options: Any) -> AnySolution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowtide.optimize(model, INPUTS, budget=budget, effort="quick", profile=False, **options)
    (solution,) = lowtide.plans_of(model)
    return solution


@pytest.mark.parametrize("budget", ["60%", "min"])
@pytest.mark.parametrize("kind", UNCAPTURABLE)
def test_what_cannot_be_captured_is_planned_all_the_same(kind: type[Blocks], budget: str) -> None:
    model, plain = made(kind), made(kind)
    solution = planned(model, budget)
    assert solution.remark
    assert solution.remark in str(solution)
    assert_trains_as(model, plain)
    step = stepping(model)
    assert lowtide.measure(step).growth_bytes <= promised_growth(solution) + 64
    if solution.budget_bytes is not None:
        allowed = solution.budget_bytes - resident_bytes(kind.__name__)
        assert lowtide.measure(step).growth_bytes <= allowed < lowtide.measure(stepping(plain)).growth_bytes


def test_one_warning_says_what_was_done_and_why() -> None:
    model = made(OnAnItem)
    with pytest.warns(UserWarning, match=r"layer by layer.*test_ladder.*x\[0, 0\]\.item\(\) < -1e6"):
        lowtide.optimize(model, INPUTS, budget="60%", effort="quick", profile=False)
    with pytest.warns(UserWarning, match="inputs without a plan") as told:
        stepping(model, INPUTS[:256])()
    assert len(told) == 1
    assert lowtide.plans_of(model)[1].remark == lowtide.plans_of(model)[0].remark


def test_other_inputs_are_planned_for_when_they_are_met() -> None:
    model, plain = made(OnAnItem), made(OnAnItem)
    planned(model, "60%")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stepping(model, INPUTS[:256])()
    assert len(lowtide.plans_of(model)) == 2
    assert_trains_as(model, plain, INPUTS[:256])


def test_the_first_batch_decides_where_there_is_no_example() -> None:
    model, plain = made(OnAnItem), made(OnAnItem)
    lowtide.optimize(model, budget="60%", effort="quick", profile=False)
    with pytest.warns(UserWarning, match="layer by layer"):
        stepping(model)()
    assert_trains_as(model, plain)
    assert isinstance(lowtide.plans_of(model)[0], Solution)


def test_gradients_of_earlier_backward_calls_are_within_the_budget() -> None:
    model = made(OnAnItem)
    solution = planned(model, "80%", accumulate=2)
    stepping(model)()

    def second() -> None:
        model(INPUTS).backward()

    gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    assert solution.budget_bytes is not None
    allowed = solution.budget_bytes - resident_bytes("OnAnItem") - gradient_bytes
    assert lowtide.measure(second).growth_bytes <= allowed


def test_a_budget_that_nothing_keeps_names_the_lowest_that_would_be() -> None:
    model = made(OnAnItem)
    with pytest.raises(InfeasibleBudget) as refused:
        lowtide.plan(model, INPUTS, budget="5%", effort="quick", profile=False)
    least = planned(model, refused.value.least_bytes)
    assert isinstance(least, Solution)
    assert least.confirmation is not None
    assert least.confirmation.peak_bytes == refused.value.least_bytes


def test_ops_insists_and_names_the_true_reason() -> None:
    with pytest.raises(CannotCapture, match=r"depends on a number .* if x\[0, 0\]\.item\(\) < -1e6"):
        lowtide.plan(made(OnAnItem), INPUTS, budget="60%", method="ops")
    solution = lowtide.plan(made(Blocks), INPUTS, budget="60%", method="ops", effort="quick", profile=False)
    assert (solution.method, solution.remark) == ("auto", "")


def test_a_remark_is_kept_in_files(tmp_path: Path) -> None:
    solution = planned(made(OnAnItem), "60%")
    lowtide.save_solution(solution, tmp_path / "plan.json")
    assert lowtide.load_solution(tmp_path / "plan.json") == solution


def test_a_plan_comes_off() -> None:
    model, plain = made(OnAnItem), made(OnAnItem)
    planned(model, "60%")
    lowtide.remove(model)
    assert lowtide.plans_of(model) == ()
    assert "forward" not in vars(model)
    assert_trains_as(model, plain)


@pytest.mark.filterwarnings("ignore:lowtide. the model meets inputs without a plan")
def test_an_exception_in_the_middle_leaves_nothing_behind() -> None:
    model, plain = made(OnAnItem), made(OnAnItem)
    planned(model, "min")

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    handle = model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        model(INPUTS)
    handle.remove()
    assert_trains_as(model, plain)
