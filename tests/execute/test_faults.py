"""Interrupts and failing kernels at any moment leave nothing behind, and the next step is a whole one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

import lowtide
from lowtide.chain.plan import Plan, Segment
from lowtide.planner.layers import Rehearsal
from tests.execute.test_layer_hooks import solution_of, square
from tests.helpers.faults import FailingOp, Moments, differences, make_up, streams, switched_on

X = torch.randn(4, 8)
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())]
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(8, 2))


def ready(model: nn.Module) -> None:
    """Where `network` begins."""
    torch.manual_seed(1)
    model.load_state_dict(network().state_dict())
    model.zero_grad()


def train(model: nn.Module) -> None:
    square(model(X)).backward()


def step(model: nn.Module) -> list[torch.Tensor | None]:
    """Gradients and buffers after a step from where `network` begins."""
    ready(model)
    train(model)
    return [*(parameter.grad for parameter in model.parameters()), *map(torch.clone, model.buffers())]


def nested() -> lowtide.Solution:
    chain = Rehearsal(network(), (X,), square, profile=False).chain("fine")
    middle, last = len(chain) // 2, len(chain) - 1
    inside = (Segment(0, middle, (Segment(0, 2),)), Segment(middle, last))
    return solution_of(chain, Plan((Segment(0, last, inside),)))


def by_layers(model: nn.Sequential) -> None:
    lowtide.apply(model, nested())


def by_ops(model: nn.Sequential) -> None:
    lowtide.optimize(model, (X,), loss=square, budget="min", effort="quick", profile=False)


def in_an_arena(model: nn.Module) -> Callable[[nn.Module], object]:
    step = lowtide.in_arena(model, (X,), square)
    return lambda _: step()


def by_the_backend(model: nn.Module) -> Callable[[nn.Module], object]:
    compiled = torch.compile(model, backend="lowtide", options={"budget": "1MiB"})
    return lambda _: square(compiled(X)).backward()


def plan_layers(model: nn.Module) -> None:
    lowtide.plan(model, (X,), loss=square, method="chen-sqrt", profile=False)


def plan_ops(model: nn.Module) -> None:
    lowtide.plan(model, (X,), loss=square, budget="min", effort="quick", profile=False)


def untouched(model: nn.Sequential) -> None:
    """No plan."""


# How the model is prepared, what is interrupted, and at how many moments.
Way = tuple[Callable[[nn.Sequential], None], Callable[[nn.Sequential], object], int]
WAYS: dict[str, Way] = {
    "a step by layers": (by_layers, train, 40),
    "planning layers": (by_layers, plan_layers, 8),
    "a step by ops": (by_ops, train, 10),
    "planning ops": (untouched, plan_ops, 4),
}


def spread(count: int, number: int) -> list[int]:
    """Some of the moments 1 … `count`, evenly spread."""
    return sorted({1 + (count - 1) * k // max(number - 1, 1) for k in range(number)})


def check(way: Way, more: int = 1) -> None:
    prepare, work, number = way
    model = network()
    prepare(model)
    work(model)
    counted = Moments()
    ready(model)
    counted.during(lambda: work(model))
    expected = step(network())
    for at in spread(counted.count, number * more):
        ready(model)
        before, stood = (switched_on(), make_up(model)), streams()
        moments = Moments(at)
        interrupted = moments.during(lambda: work(model))
        if not interrupted:  # a cache has made it shorter
            continue
        left = differences(before[0], switched_on()) + differences(before[1], make_up(model))
        left += ["random numbers"] if work is not train and streams() != stood else []
        assert not left, f"an interrupt at {moments.where}, number {at}, leaves {', '.join(left)}"
        for mine, other in zip(step(model), expected, strict=True):
            assert mine is not None, moments.where
            assert other is not None
            assert torch.equal(mine, other), moments.where


@pytest.mark.parametrize("name", WAYS)
def test_an_interrupt_at_any_moment_leaves_nothing(name: str) -> None:
    check(WAYS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
def test_an_interrupt_at_any_of_many_moments_leaves_nothing(name: str) -> None:
    check(WAYS[name], more=10)


@pytest.mark.parametrize("begin", [in_an_arena, by_the_backend])
@pytest.mark.parametrize("number", [6, pytest.param(80, marks=pytest.mark.long)])
def test_an_interrupt_of_a_step_that_was_made_leaves_nothing(
    begin: Callable[[nn.Module], Callable[[nn.Module], object]], number: int
) -> None:
    model = network()
    run, expected = begin(model), step(network())
    for _ in range(3):  # the first steps compile
        ready(model)
        run(model)
    ready(model)
    counted = Moments()
    counted.during(lambda: run(model))
    for at in spread(counted.count, number):
        ready(model)
        before, moments = (switched_on(), make_up(model)), Moments(at)
        moments.during(lambda: run(model))
        left = differences(before[0], switched_on()) + differences(before[1], make_up(model))
        assert not left, f"an interrupt at {moments.where} leaves {', '.join(left)}"
        ready(model)
        run(model)
        found = [*(parameter.grad for parameter in model.parameters()), *model.buffers()]
        for mine, other in zip(found, expected, strict=True):
            assert mine is not None
            assert other is not None
            assert torch.equal(mine, other), moments.where


@pytest.mark.parametrize("number", [5, pytest.param(40, marks=pytest.mark.long)])
def test_an_arena_whose_first_step_is_interrupted_begins_again(number: int) -> None:
    expected, counted = step(network()), Moments()
    model = network()
    run = in_an_arena(model)
    ready(model)
    counted.during(lambda: run(model))
    for at in spread(counted.count, number):
        model = network()
        run, moments = in_an_arena(model), Moments(at)
        ready(model)
        moments.during(partial(run, model))
        for _ in range(2):
            ready(model)
            run(model)
            found = [*(parameter.grad for parameter in model.parameters()), *model.buffers()]
            for mine, other in zip(found, expected, strict=True):
                assert mine is not None
                assert other is not None
                assert torch.equal(mine, other), moments.where


def test_another_batch_whose_giving_was_interrupted_is_given_again() -> None:
    model = nn.Linear(8, 2)
    run = lowtide.in_arena(model, {"input": X}, square)
    other, counted = X + 1, Moments()
    first, expected = (float(square(model(batch)).detach()) for batch in (X, other))
    assert float(run()) == first
    counted.during(lambda: run.executor.bind({"input": other.clone()}))
    for at in range(1, counted.count + 1):
        run.executor.bind({"input": X})
        Moments(at).during(lambda: run.executor.bind({"input": other}))
        for batch, loss in ((other, expected), (X, first)) if at % 2 else ((X, first), (other, expected)):
            model.zero_grad()
            assert float(run(input=batch)) == loss, at


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_kernel_that_fails_leaves_nothing(error: type[BaseException]) -> None:
    model = network()
    by_layers(model)
    expected = step(network())
    step(model)
    ready(model)
    with FailingOp(None, error) as counted:
        train(model)
    for at in spread(counted.count, 20):
        before = switched_on(), make_up(model)
        ready(model)
        with pytest.raises(error), FailingOp(at, error):
            train(model)
        assert not differences(before[0], switched_on()) + differences(before[1], make_up(model)), at
        for mine, other in zip(step(model), expected, strict=True):
            assert mine is not None
            assert other is not None
            assert torch.equal(mine, other)
