"""Numbers of Python's that change from step to step: arguments, and counters that a model keeps."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compat.dynamo_caches import forget_compiled
from lowtide.execute import courses
from lowtide.execute.identity import but_for_numbers
from tests.helpers.eager import mean_square

X = torch.randn(16, 8)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def test_floating_point_numbers_in_words() -> None:
    words = ("2.0", "-0.5", "1e-05", "1.5e+20", "inf", "nan", "scale=2.0", "p['a']=nan")
    assert [line.rpartition("=")[2] for line in but_for_numbers(words)] == ["a number"] * len(words)
    others = ("2", "float32[2, 3]", "'2.0'", "True", "frozen 0123456789abcdef", "n=3", "None")
    assert but_for_numbers(others) == others


class Scaled(nn.Module):
    """Its result is scaled; by much, through one layer more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.steps = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.first(x).tanh() * scale
        if scale > 10:
            x = self.second(x).tanh()
        return x.exp()


class Counting(Scaled):
    """Counts its steps."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.steps += 1
        return super().forward(x, scale)


def planned(model: Scaled) -> Scaled:
    example = {"x": X, "scale": 2.0}
    return lowtide.optimize(
        model, example, budget="min", loss=mean_square, effort="quick", profile=False, accumulate=2
    )


def assert_like_plain(model: Scaled, scale: float) -> None:
    found = []
    for each in (model, Scaled()):
        mean_square(each(X, scale=scale)).backward()
        found.append([parameter.grad for parameter in each.parameters()])
        each.zero_grad()
    for mine, other in zip(*found, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or other is None or torch.equal(mine, other)


def test_other_floating_point_numbers_run_by_the_same_plan() -> None:
    model = planned(Scaled())
    for scale in (2.0, 3.0, 0.5, 2.0):
        assert_like_plain(model, scale)
    assert len(lowtide.plans_of(model)) == 1


def test_a_number_with_which_other_ops_run_gets_a_plan_when_it_comes_again() -> None:
    model = planned(Scaled())
    assert_like_plain(model, 20.0)
    assert len(lowtide.plans_of(model)) == 1
    with pytest.warns(UserWarning, match="the model meets inputs without a plan"):
        assert_like_plain(model, 20.0)
    assert len(lowtide.plans_of(model)) == 2
    assert_like_plain(model, 20.0)
    assert_like_plain(model, 3.0)
    assert len(lowtide.plans_of(model)) == 2


def test_what_was_compiled_for_counts_that_are_over_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courses, "_MOST_COMPILED", 2)
    model = planned(Counting())
    forgotten = []

    def counted(backend: object) -> None:
        forgotten.append(model.steps)
        forget_compiled(backend)

    monkeypatch.setattr(courses, "forget_compiled", counted)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(7):
            assert_like_plain(model, 2.0)
    assert forgotten == [3, 6]
    assert ["was compiled 2 times for one plan" in str(each.message) for each in told] == [True, True]
    assert model.steps == 7
