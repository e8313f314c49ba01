"""`torch.compile(model, backend="lowtide")` for what models do that is not usual: it trains as plain."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.backend import lowtide as backend
from lowtide.backend import plans_of

WIDTH = 8
Forward = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Odd(nn.Module):
    """Something between two layers."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x))).square().mean()
        return out


def _slices_assigned(x: Tensor) -> Tensor:
    """What lies around a slice that is written is copied with it."""
    out = torch.zeros_like(x)
    out[:1] = x[:1]
    out[1:] = x[1:] * 2
    out[1:] += x[:-1]
    return out


def _of_a_constant(x: Tensor) -> Tensor:
    return x * torch.tensor([2.0]) + torch.tensor(1.0)


def _turned(x: Tensor) -> Tensor:
    """On the CPU the result lies row by row, however its input does."""
    return nn.functional.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2)


@pytest.mark.parametrize("between", [_slices_assigned, _of_a_constant, _turned])
def test_it_trains_as_plain_and_holds_what_it_said(between: Forward) -> None:
    torch.manual_seed(0)
    model, rows = Odd(between), torch.randn(3, 6, WIDTH).transpose(0, 1).contiguous().transpose(0, 1)
    plain = copy.deepcopy(model)
    plain(rows).backward()
    options: dict[str, Any] = {"budget": "min"}
    planned = torch.compile(model, backend=backend, options=options, dynamic=False)
    for _ in range(2):
        model.zero_grad()
        planned(rows).backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)
    model.zero_grad()
    grown = lowtide.measure(lambda: planned(rows).backward(), device="cpu").growth_bytes
    there = sum(each.nbytes for each in (*model.parameters(), rows))
    (plan,) = plans_of(options)
    assert there + grown <= plan.peak_bytes
