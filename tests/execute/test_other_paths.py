"""Steps whose path numbers decide: op plans follow every path, with plain training's gradients."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import CannotApply
from lowtide.ir.assumptions import Guess, NodesBetween
from lowtide.solvers.solution import GraphSolution

INPUTS = torch.randn(256, 16, generator=torch.Generator().manual_seed(3))
SEEDS = range(6)
LOSS_BYTES = 64  # the loss itself, and the gradient that it begins with

Drop = Callable[[], "torch.Tensor | bool"]
Model = TypeVar("Model", bound=nn.Module)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def by_torch() -> torch.Tensor:
    return torch.rand([]) < 0.4


def by_python() -> bool:
    return random.random() < 0.4


def by_python_within_bounds() -> bool:
    return random.uniform(0, 1) < 0.4


def by_numpy() -> bool:
    return bool(np.random.rand() < 0.4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.narrow(self.dropout(F.gelu(self.wide(x))))
        return x + added


class Dropping(nn.Module):
    """LayerDrop. The first layer does not know that it is the first: its input has a gradient too."""

    def __init__(self, drops: Drop) -> None:
        super().__init__()
        self.drops = drops
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.drops():
                continue
            x = layer(x)
        return x.square().mean()


class Branching(nn.Module):
    """Takes a way of its own for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.usual, self.other = Block(), Block(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.other(x).tanh() if x.mean() > 3 else self.usual(x)
        return x.square().mean()


class BranchingEagerly(Branching):
    """What it does for large inputs alone is hidden from Dynamo."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.mean() > 3:
            x = torch.compiler.disable(self.other.forward)(x)
        return x.square().mean()


def stepping(model: nn.Module, inputs: torch.Tensor, seed: int) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        model(inputs).backward()

    return step


def planned(model: nn.Module, budget: str) -> GraphSolution:
    lowtide.optimize(model, INPUTS, budget=budget, effort="quick")
    (solution,) = lowtide.plans_of(model)
    assert isinstance(solution, GraphSolution)
    return solution


def made(kind: Callable[[], Model]) -> Model:
    torch.manual_seed(0)
    return kind()


def assert_same_step(model: nn.Module, plain: nn.Module, inputs: torch.Tensor, seed: int) -> None:
    """Gradients to the last bit, none where there is none, and the same draws afterwards."""
    after = []
    for each in (plain, model):
        stepping(each, inputs, seed)()
        after.append((torch.get_rng_state().tolist(), random.random(), np.random.rand()))
    assert after[0] == after[1]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or other.grad is None or torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("budget", ["70%", "min"])
@pytest.mark.parametrize("drops", [by_torch, by_python, by_python_within_bounds, by_numpy])
def test_every_path_that_leaves_layers_out_is_within_the_budget(drops: Drop, budget: str) -> None:
    model, plain = made(lambda: Dropping(drops)), made(lambda: Dropping(drops))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = planned(model, budget)
        for seed in SEEDS:
            assert_same_step(model, plain, INPUTS, seed)
    peaks = {lowtide.measure(stepping(model, INPUTS, seed)).growth_bytes for seed in SEEDS}
    assert len(peaks) > 1
    assert max(peaks) <= solution.timeline.growth_bytes + LOSS_BYTES


def test_the_step_that_is_planned_drops_no_layer_and_says_what_was_taken_to_be_so() -> None:
    solution = planned(made(lambda: Dropping(by_torch)), "min")
    guess, between = solution.graph.assumptions
    assert isinstance(guess, Guess)
    assert isinstance(between, NodesBetween)
    assert dict(between.counts)["AddmmBackward0"] == 1  # the first layer: Dynamo leaves the loop to Python
    assert guess.number == "False"
    assert "if self.drops():" in guess.line
    assert {op.module for op in solution.graph.ops} >= {f"layers.{n}.wide" for n in range(3)} | {"layers.2"}


def test_a_branch_that_was_not_planned_is_run_in_little_memory_and_told_once() -> None:
    model, plain = made(Branching), made(Branching)
    solution = planned(model, "min")
    assert_same_step(model, plain, INPUTS, 0)
    with pytest.warns(UserWarning, match=r"took another path .* not in the plan"):
        assert_same_step(model, plain, INPUTS + 10, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(model, plain, INPUTS + 10, 1)
        assert_same_step(model, plain, INPUTS, 2)
    usual = lowtide.measure(stepping(model, INPUTS, 0)).growth_bytes
    assert usual <= solution.timeline.growth_bytes + LOSS_BYTES


def test_a_branch_of_which_nothing_is_captured_is_told_as_well() -> None:
    model, plain = made(BranchingEagerly), made(BranchingEagerly)
    planned(model, "min")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(model, plain, INPUTS, 0)
    with pytest.warns(
        UserWarning, match=r"took another path .* nor in any captured graph \(AddmmBackward0\)"
    ):
        assert_same_step(model, plain, INPUTS + 10, 0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides it
def test_a_branch_that_was_not_planned_is_refused_where_nothing_new_is_wanted() -> None:
    model, plain = made(Branching), made(Branching)
    lowtide.optimize(model, INPUTS, budget="min", effort="quick", on_new_shape="error")
    with pytest.raises(CannotApply, match=r"took another path .* Plan for the path"):
        stepping(model, INPUTS + 10, 0)()
    assert_same_step(model, plain, INPUTS, 0)


def test_what_was_taken_to_be_so_is_kept_in_files(tmp_path: Path) -> None:
    solution = planned(made(lambda: Dropping(by_python)), "70%")
    lowtide.save_solution(solution, tmp_path / "plan.json")
    loaded = lowtide.load_solution(tmp_path / "plan.json")
    assert loaded == solution
    model, plain = made(lambda: Dropping(by_python)), made(lambda: Dropping(by_python))
    assert isinstance(loaded, GraphSolution)
    lowtide.apply(model, loaded)
    assert_same_step(model, plain, INPUTS, 1)


# Outputs that nobody knew to be unused ----------------------------------------------------------------


class TwoHeads(nn.Module):
    """One of its heads is left out by the loss. The number that is drawn is guessed when a plan is made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.used, self.unused = Block(), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x) * random.uniform(0.5, 1.5)
        return self.used(x), self.unused(x.tanh())


class TwoHeadsAsPlanned(TwoHeads):
    """The number that is guessed is the one that comes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        if x.isfinite().all():
            x = x * 2
        return self.used(x), self.unused(x.tanh())


def test_a_head_that_the_planned_step_leaves_out_is_not_computed_backwards_for_another_loss() -> None:
    model, plain = made(TwoHeadsAsPlanned), made(TwoHeadsAsPlanned)
    lowtide.optimize(model, INPUTS, budget="min", loss=lambda heads: heads[0].square().mean(), effort="quick")
    for each in (model, plain):
        torch.manual_seed(1)
        each(INPUTS)[0].square().mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
    model.zero_grad(set_to_none=True)
    heads = model(INPUTS)
    with pytest.raises(CannotApply, match="an output that the loss did not use when the step was planned"):
        torch.stack([head.square().mean() for head in heads]).sum().backward()


def test_a_head_that_the_loss_leaves_out_gets_no_gradient_and_not_zeros() -> None:
    model = made(TwoHeads)
    lowtide.optimize(model, INPUTS, budget="min", loss=lambda heads: heads[0].square().mean(), effort="quick")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number takes another path
        heads = model(INPUTS)
    heads[0].square().mean().backward()
    assert model.unused.weight.grad is None
    assert model.used.weight.grad is not None
    assert model.stem.wide.weight.grad is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.stack([head.square().mean() for head in model(INPUTS)]).sum().backward()
    assert model.unused.weight.grad is not None
