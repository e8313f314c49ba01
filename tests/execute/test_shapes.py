"""Shapes in turn, as a loop meets them: what is planned and compiled once stays."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn

import lowtide
from lowtide.aot.graph_backend import CapturedGraph
from lowtide.solvers.solution import GraphSolution
from lowtide.zoo.gpt import GPT
from tests.helpers.eager import assert_step_like, mean_square


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture(autouse=True)
def _no_word_of_new_plans() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lowtide: the model meets inputs without a plan")
        yield


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Every graph that a backend of lowtide was given, in order."""
    found: list[fx.GraphModule] = []
    compile_ = CapturedGraph.compile

    def counted(self: CapturedGraph, module: fx.GraphModule, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        found.append(module)
        return compile_(self, module, *args, **kwargs)

    monkeypatch.setattr(CapturedGraph, "compile", counted)
    return found


class Halves(nn.Module):
    """Two layers in two graphs; what is between them Dynamo does not follow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        found: torch.Tensor = self.second(x)
        return found


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _sections(model: nn.Module) -> set[int]:
    (first, *_) = lowtide.plans_of(model)
    assert isinstance(first, GraphSolution)
    return {op.section for op in first.graph.ops if op.section >= 0}


@pytest.mark.parametrize("make", [network, pytest.param(Halves, marks=pytest.mark.long)])
def test_a_shape_that_comes_back_is_not_compiled_again(
    make: Callable[[], nn.Module], compiled: Sequence[fx.GraphModule]
) -> None:
    model, plain = make(), make()
    lowtide.optimize(model, budget="min", loss=mean_square, effort="quick", profile=False, accumulate=2)
    batches = [torch.randn(size, 8) for size in (3, 5, 7)]
    for batch in batches:
        assert_step_like(model, plain, batch)
    count = len(compiled)
    assert count == 3 * len(_sections(model)), "what was captured is what runs"
    for batch in (*batches, *reversed(batches)):
        assert_step_like(model, plain, batch)
    assert len(compiled) == count
    assert len(lowtide.plans_of(model)) == 3


def test_what_others_have_compiled_stays_compiled() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    others = torch.compile(torch.square, backend=backend)
    others(torch.ones(3))
    model = network()
    lowtide.optimize(model, torch.ones(3, 8), budget="min", loss=mean_square, effort="quick", profile=False)
    others(torch.ones(3))
    assert len(graphs) == 1
    model(torch.ones(3, 8))
    lowtide.remove(model)
    gc.collect()
    others(torch.ones(3))
    assert len(graphs) == 1


def tokens(length: int) -> torch.Tensor:
    return torch.randint(50, (2, length), generator=torch.Generator().manual_seed(length))


def _step(model: nn.Module, batch: torch.Tensor) -> None:
    mean_square(model(batch)).backward()


def test_the_budget_holds_for_every_length() -> None:
    model = GPT(layers=2, width=32, heads=2, vocab=50, context=64)
    lowtide.optimize(model, budget="70%", loss=mean_square, effort="quick")
    for length in (48, 64, 40, 48, 64):
        step = partial(_step, model, tokens(length))
        step()
        model.zero_grad()
        plan = lowtide.plans_of(model)[(48, 64, 40).index(length)]
        assert plan.budget_bytes is not None
        reading = lowtide.measure(step)
        weights = sum(4 * parameter.numel() for parameter in model.parameters())
        assert weights + tokens(length).nbytes + reading.growth_bytes <= plan.budget_bytes
        model.zero_grad()


class TwoResults(nn.Module):
    """A loss, and the scores that it was made of; what the backward begins at depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layers(x)
        return scores.square().mean(), scores


def the_first(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return results[0]


def both_of_few(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss, scores = results
    return loss if len(scores) > 4 else loss + scores.sum()


def test_another_shape_is_captured_once_where_the_first_showed_what_gets_no_gradient(
    compiled: list[fx.GraphModule],
) -> None:
    model = lowtide.optimize(TwoResults(), (torch.randn(8, 8),), budget="1GiB", loss=the_first)
    model(torch.randn(8, 8))[0].backward()
    assert len(compiled) == 2  # with a gradient for the scores, and without
    model.zero_grad()
    model(torch.randn(6, 8))[0].backward()
    assert len(compiled) == 3


def test_a_gradient_that_only_another_shape_gets_is_not_left_out() -> None:
    model, plain = TwoResults(), TwoResults()
    lowtide.optimize(model, (torch.randn(8, 8),), budget="1GiB", loss=both_of_few)
    for rows in (8, 3, 8):
        x = torch.randn(rows, 8)
        for each in (model, plain):
            each.zero_grad()
            both_of_few(each(x)).backward()
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None
            assert wanted.grad is not None
            assert torch.equal(parameter.grad, wanted.grad)
