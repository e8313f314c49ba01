"""What a dry run and a capture leave as it was: what functions have cached."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import pytest
import torch
from torch import nn

import lowtide


def cached_in_eager(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As transformers caches positions: around the cache is a function of its own."""
    remembering = lru_cache(maxsize=1)(function)

    @wraps(function)
    def wrapper(*args: Any) -> torch.Tensor:
        return remembering(*args)

    return wrapper


@lru_cache(maxsize=2)
def angles(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32).sin()


class Positioned(nn.Linear):
    @lru_cache  # noqa: B019
    def phases(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32).cos()

    @staticmethod
    @lru_cache
    def scale(size: int) -> torch.Tensor:
        return torch.full((size,), 2.0)

    @cached_in_eager
    def offsets(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        placed = super().forward(x) * self.scale(size) + self.offsets(size)
        return (placed + self.phases(size) + angles(size)).square().sum()


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
@pytest.mark.parametrize("trace", [lowtide.fit, lowtide.capture])
def test_what_functions_cache_is_no_fake_afterwards(trace: Callable[..., object]) -> None:
    angles.cache_clear()
    model, x = Positioned(5, 5), torch.randn(3, 5)
    trace(model, (x,))
    model(x).backward()
    assert model.weight.grad is not None
    assert type(angles(5)) is torch.Tensor


def test_what_was_cached_before_stays_where_nothing_is_added() -> None:
    angles.cache_clear()
    model, x = Positioned(5, 5), torch.randn(3, 5)
    model(x)
    before = angles(5)
    lowtide.fit(model, (x,), profile=False)
    assert angles(5) is before
