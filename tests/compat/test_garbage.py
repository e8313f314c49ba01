"""How often garbage is collected while a step is captured, and afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compat.garbage import SELDOM, collecting_seldom


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_put_back_when_the_last_block_ends() -> None:
    gc.set_threshold(700, 10, 10)
    one, other = collecting_seldom(), collecting_seldom()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold() == (SELDOM, 10, 10)
    other.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_they_are_put_back_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), collecting_seldom():
        raise ZeroDivisionError
    assert gc.get_threshold() == before


@pytest.mark.parametrize("first", [0, 3 * SELDOM])
def test_who_collects_never_or_even_less_often_goes_on_so(first: int) -> None:
    gc.set_threshold(first)
    with collecting_seldom():
        assert gc.get_threshold()[0] == first


def test_a_step_is_traced_and_captured_with_few_collections() -> None:
    seen: list[int] = []

    class Seeing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(gc.get_threshold()[0])
            return super().forward(input)

    model = Seeing(4, 4)
    gc.set_threshold(700, 10, 10)
    lowtide.dry_run(lambda: model(torch.ones(2, 4)).sum().backward(), model=model)
    assert set(seen) == {SELDOM}
    lowtide.capture(nn.Linear(4, 4), torch.ones(2, 4), loss=lambda output: _seen_in(output, seen))
    assert set(seen) == {SELDOM}
    assert gc.get_threshold() == (700, 10, 10)


def _seen_in(output: torch.Tensor, seen: list[int]) -> torch.Tensor:
    torch._dynamo.graph_break()
    seen.append(gc.get_threshold()[0])
    return output.sum()
