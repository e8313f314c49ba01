"""What a planned model is called with: which calls are one to a plan, and which want another."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.execute.identity import described_inputs, inputs_of
from tests.helpers.eager import assert_step_like
from tests.helpers.effort import long_but

X, Y = torch.randn(16, 8), torch.randn(16, 8)
Call = tuple[tuple[Any, ...], dict[str, Any]]


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


def test_arguments_in_words() -> None:
    images = torch.zeros(2, 3, 4, 4)
    batch = {"words": torch.zeros(2, 7, dtype=torch.int64), "more": [X, None]}
    assert described_inputs((images, 3, None, batch), {"mask": X, "causal": True}) == (
        "float32[2, 3, 4, 4]",
        "3",
        "None",
        "['more'][0]=float32[16, 8]",
        "['more'][1]=None",
        "['words']=int64[2, 7]",
        "causal=True",
        "mask=float32[16, 8]",
    )


def test_strides_and_gradients_are_told() -> None:
    images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    found = described_inputs((images, images[0], X.T, X[:1], X.clone().requires_grad_(), X.to_sparse()), {})
    assert found == (
        "float32[2, 3, 4, 4] channels last",
        "float32[3, 4, 4] with strides [1, 12, 3]",
        "float32[8, 16] with strides [1, 8]",
        "float32[1, 8]",
        "float32[16, 8] with a gradient",
        "float32[16, 8] sparse_coo",
    )


class Sum(nn.Module):
    """Uses what it is given, in this order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any, y: Any = None, *, z: Any = None) -> torch.Tensor:
        found: torch.Tensor = self.b(self.a(x).relu())
        found = found if y is None else found * y
        return (found if z is None else found + z).square().mean()


def test_a_call_is_the_same_however_it_is_written() -> None:
    calls: list[Call] = [
        ((X, Y), {"z": X}),
        ((X,), {"y": Y, "z": X}),
        ((X,), {"z": X, "y": Y}),
        ((), {"z": X, "y": Y, "x": X}),
    ]
    model = Sum()
    assert len({inputs_of(model, args, kwargs) for args, kwargs in calls}) == 1
    assert inputs_of(model, (), {"unknown": X}) == ("unknown=float32[16, 8]",)


def channels_last() -> Call:
    return (torch.randn(4, 8, 5, 16).permute(0, 2, 3, 1),), {}


def nothing_in_the_middle() -> Call:
    return (X, None), {"z": Y}


OTHERS: dict[str, tuple[Call, Call]] = {
    "strides": (((torch.randn(4, 5, 16, 8),), {}), channels_last()),
    "None": (((X, Y), {}), nothing_in_the_middle()),
}


@pytest.mark.parametrize("kind", long_but(list(OTHERS), "strides"))
def test_a_call_that_runs_other_ops_gets_a_plan_of_its_own(kind: str) -> None:
    (args, kwargs), (other_args, other_kwargs) = OTHERS[kind]
    model, plain = Sum(), Sum()
    lowtide.optimize(model, budget="min", effort="quick", profile=False, accumulate=2)
    for given, named in ((args, kwargs), (other_args, other_kwargs), (args, kwargs)):
        assert_step_like(_With(model, named), _With(plain, named), *given, loss=_itself)
        assert len(lowtide.plans_of(model)) <= 2


class _With(nn.Module):
    """A model that is called with these keywords beside its arguments."""

    def __init__(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.kwargs = model, kwargs

    def forward(self, *args: Any) -> Any:
        return self.model(*args, **self.kwargs)


def _itself(output: torch.Tensor) -> torch.Tensor:
    return output


def test_what_the_inputs_were_made_from_gets_its_gradient() -> None:
    generators, judges = [nn.Linear(8, 8), nn.Linear(8, 8)], [Sum(), Sum()]
    generators[1].load_state_dict(generators[0].state_dict())
    lowtide.optimize(judges[0], X, budget="min", effort="quick", profile=False, accumulate=2)
    for generator, judge in zip(generators, judges, strict=True):
        judge(X).backward()
        judge(generator(X)).backward()
    for mine, other in zip(generators[0].parameters(), generators[1].parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("kind", long_but(["positions", "any names"], "any names"))
def test_the_order_of_keywords_needs_no_other_plan(kind: str) -> None:
    class AnyNames(Sum):
        def forward(self, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
            return super().forward(**kwargs)

    make: Callable[[], nn.Module] = AnyNames if kind == "any names" else Sum
    model = make()
    lowtide.optimize(model, {"x": X, "y": Y}, budget="min", effort="quick", profile=False, accumulate=2)
    first = model(x=X, y=Y)
    assert torch.equal(model(y=Y, x=X), first)
    assert len(lowtide.plans_of(model)) == 1
