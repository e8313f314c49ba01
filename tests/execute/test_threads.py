"""A planned model that several threads train, and what Python's warnings are afterwards."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compat import patches
from tests.helpers.eager import mean_square

BATCHES = [torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Layers(nn.Module):
    """Layers in a row; it may have something to say."""

    def __init__(self, says: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.says = says

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.says:
            warnings.warn(self.says, stacklevel=2)
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def by_ops(model: nn.Module) -> nn.Module:
    return lowtide.optimize(
        model, (BATCHES[0],), budget="min", loss=mean_square, effort="quick", profile=False
    )


def by_layers(model: nn.Module) -> nn.Module:
    return lowtide.optimize(model, (BATCHES[0],), method="every-k", loss=mean_square, profile=False)


def gradients(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(mean_square(model(batch)), list(model.parameters()))


@pytest.mark.parametrize("plan", [by_ops, by_layers])
def test_threads_that_train_one_model_get_the_gradients_of_plain_training(
    plan: Callable[[nn.Module], nn.Module],
) -> None:
    model, filters = plan(Layers()), list(warnings.filters)
    gradients(model, BATCHES[0])
    expected = [gradients(Layers(), batch) for batch in BATCHES]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: gradients(model, BATCHES[number % 4]), range(40)))
    for number, mine in enumerate(found):
        assert all(map(torch.equal, mine, expected[number % 4]))
    assert warnings.filters == filters
    assert patches.active() == ()


def test_what_a_model_says_is_not_said_again_in_every_step() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        model = by_ops(Layers(says="once will do"))
        for _ in range(2):
            gradients(model, BATCHES[0])
        heard.clear()
        for batch in BATCHES:
            gradients(model, batch)
    assert not heard
