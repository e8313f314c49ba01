"""Parts that cannot be cut, or not be run again: plans go around them, and say so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.chain.plan import Plan
from lowtide.errors import InfeasibleBudget
from lowtide.planner.around import Around
from lowtide.planner.layers import Rehearsal
from tests.execute.test_layer_hooks import Saving, solution_of, square

X = torch.randn(1024, 8)


def layer(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width), nn.Tanh())


class Own(nn.Module):
    """Calls a module, and then checkpoints some, or runs a custom function between them."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = layer(), nn.BatchNorm1d(8), layer()
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(self.norm, self.first(x))
        return self.last(x)  # type: ignore[no-any-return]


def checkpointed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x, use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed_reentrantly(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x, use_reentrant=True)  # type: ignore[no-any-return]


def squared(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Saving.apply(module(x))  # type: ignore[no-any-return, no-untyped-call]


BETWEEN = [checkpointed, checkpointed_reentrantly, squared]


def left_behind(model: nn.Module) -> list[torch.Tensor | None]:
    square(model(X)).backward()
    return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]


def assert_trains_like(plain: nn.Module, planned: nn.Module) -> None:
    for one, other in zip(left_behind(plain), left_behind(planned), strict=True):
        assert one is other is None or torch.equal(one, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("granularity", ["fine", "layer", "block"])
def test_a_module_that_is_checkpointed_in_part_is_run_again_as_a_whole(
    between: Callable[[nn.Module, torch.Tensor], torch.Tensor], granularity: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer(), Own(between), layer())
    plain = copy.deepcopy(model)
    chain = Rehearsal(model, (X,), square, profile=False).chain(granularity)
    assert not any(name.startswith("1.") for name in chain.names)
    for plan in (Plan.at([1]), Plan.at([len(chain) - 1]), Plan.at([len(chain)])):
        around = Around(Rehearsal(model, (X,), square, profile=False).confirmed)
        assert around(solution_of(chain, plan)).plan == plan, "nothing is left out"
        lowtide.apply(model, solution_of(chain, plan))
        assert_trains_like(copy.deepcopy(plain), copy.deepcopy(model))


class Mixed(nn.Module):
    """Some of its layers are followed by what cannot be run again from outside."""

    def __init__(self, between: Callable[[nn.Module, torch.Tensor], torch.Tensor], *where: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(6))
        self.between, self.where = between, where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, each in enumerate(self.layers):
            x = self.between(each, x) if number in self.where else each(x)
        return x


@pytest.mark.parametrize("between", BETWEEN)
def test_what_the_model_itself_checkpoints_is_left_alone(
    between: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    model = Mixed(between, 2)
    rehearsal = Rehearsal(model, (X,), square, profile=False)
    chain = rehearsal.chain("fine")
    found = Around(rehearsal.confirmed)(solution_of(chain, Plan.at(range(1, len(chain)))))
    assert 1 < len(found.plan.segments) < len(chain)
    assert found.remark.startswith("not recomputed, for it cannot be run again: layer")
    lowtide.apply(model, found)
    assert_trains_like(Mixed(between, 2), model)


def test_what_is_left_alone_is_told() -> None:
    with pytest.warns(UserWarning, match="lowtide: not recomputed, for it cannot be run again: layer"):
        lowtide.optimize(Mixed(squared, 2), (X,), loss=square, method="rotor", profile=False)


def test_a_budget_that_is_missed_for_what_is_left_alone_is_refused_with_that_reason() -> None:
    with pytest.raises(InfeasibleBudget, match="What is not recomputed, for it cannot be run again: layer"):
        lowtide.plan(Mixed(squared, 1, 3, 5), (X,), loss=square, method="rotor", budget="40%", profile=False)


def test_only_layers_that_fail_when_they_are_run_again_are_left_alone() -> None:
    model = Mixed(squared, 3)
    rehearsal = Rehearsal(model, (X,), square, profile=False)
    chain = rehearsal.chain("block")
    around = Around(rehearsal.confirmed)
    found = around(solution_of(chain, Plan.read("[1-6 [1-2]]")))
    assert (str(found.plan), found.peak_bytes) == (
        "[1-4 [1-2]][6-6]",
        solution_of(chain, found.plan).peak_bytes,
    )
    assert set(around.left) == {5}
    assert "layer 5" in found.remark


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rrelu(self.linear(x), training=True)


def test_noise_that_a_checkpoint_would_not_draw_again_is_kept() -> None:
    """PyTorch's own checkpoint reads memory that nobody has written to where it ends with such an op."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Noisy() for _ in range(4)))
    rehearsal = Rehearsal(model, (X,), square, profile=False)
    chain = rehearsal.chain("fine")
    around = Around(rehearsal.confirmed)
    assert str(around(solution_of(chain, Plan.at([2]))).plan) == "[1-1]"
    assert set(around.left) == {2}
