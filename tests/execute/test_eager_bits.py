"""Plans of ops that recompute as much as they can, against plain training, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.eager import assert_trains_like_plain


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Around(nn.Module):
    """A function of one tensor between two linear layers."""

    def __init__(self, function: Callable[[torch.Tensor], Any], *shape: int, like: torch.dtype | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape, dtype=like))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x * self.weight)


# Random ops whose results nobody uses ---------------------------------------------------------------------


def unused_dropout(x: torch.Tensor) -> torch.Tensor:
    F.dropout(x, 0.5)
    return F.dropout(x, 0.5)


def unused_noise(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    torch.randn_like(x)
    torch.randperm(5)
    return F.dropout(x.sin(), 0.5)


def unused_in_place(x: torch.Tensor) -> torch.Tensor:
    torch.empty(4).bernoulli_(0.5)
    torch.empty(4).uniform_()
    return F.dropout(x.sin(), 0.5)


def unused_at_the_end(x: torch.Tensor) -> torch.Tensor:
    y = F.dropout(x.sin(), 0.5)
    F.dropout(y, 0.5)
    return y


@pytest.mark.parametrize("function", [unused_dropout, unused_noise, unused_in_place, unused_at_the_end])
def test_a_random_op_whose_result_nobody_uses_draws_all_the_same(function: Callable[..., Any]) -> None:
    assert_trains_like_plain(Around(function, 4, 6), torch.randn(4, 6))
