"""Many lengths by few plans: nothing is searched once the classes are known, and the budget holds for all."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import BadRequest, CannotApply
from lowtide.execute import ops_forward
from lowtide.ir.graph import Graph
from lowtide.planner.by_classes import best_following
from lowtide.planner.ops import StepBudget
from lowtide.solvers.solution import GraphSolution
from lowtide.trace.spec import StepSpec
from lowtide.zoo.gpt import GPT
from tests.helpers.eager import assert_step_like, mean_square
from tests.helpers.searches import watched


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    return watched(monkeypatch)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=1, width=16, heads=2, vocab=20, context=64)


def tokens(length: int) -> Tensor:
    return torch.randint(20, (2, length), generator=torch.Generator().manual_seed(length))


def optimized(model: nn.Module, **more: Any) -> nn.Module:
    request = {"budget": "70%", "loss": mean_square, "effort": "quick", "profile": False, **more}
    return lowtide.optimize(model, tokens, **request)


def plans_of(model: nn.Module) -> list[GraphSolution]:
    found = lowtide.plans_of(model)
    assert all(isinstance(plan, GraphSolution) for plan in found)
    return list(found)  # type: ignore[arg-type]


def step_at(length: int) -> StepBudget:
    return StepBudget(StepSpec(gpt(), tokens(length), mean_square, profile=False))


def inputs(length: int) -> tuple[str, ...]:
    return (f"int64[2, {length}]",)


TWENTY = [*range(8, 64, 3), 64]


def test_an_epoch_of_twenty_lengths_searches_for_its_classes_alone(searches: list[Graph]) -> None:
    """In random order, and each of them twice; measured within the budget, and no plan for each is kept."""
    model, plain = gpt(), gpt()
    optimized(model, lengths=TWENTY, classes=3)
    assert len(plans_of(model)) == 3
    (budget,) = {plan.budget_bytes for plan in plans_of(model)}
    assert budget is not None
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    searched = len(searches)
    order = 2 * TWENTY
    random.Random(0).shuffle(order)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in order[:20]:
            model.zero_grad()
            plain.zero_grad()
            assert_step_like(model, plain, tokens(length))
        for length in order[20:]:
            step = partial(_step, model, tokens(length))
            step()
            model.zero_grad()
            reading = lowtide.measure(step)
            model.zero_grad()
            assert weights + tokens(length).nbytes + reading.growth_bytes <= budget
    assert len(searches) == searched, "nothing is searched once the classes are known"
    assert {plan.inputs for plan in plans_of(model)} == {inputs(length) for length in TWENTY}
    assert all(plan.peak_bytes <= budget for plan in plans_of(model))


def _step(model: nn.Module, batch: Tensor) -> None:
    model.zero_grad()
    mean_square(model(batch)).backward()


def test_the_budget_is_settled_on_the_worst_class() -> None:
    model = optimized(gpt(), lengths=[8, 64, 20], classes=(20, 64))
    worst = step_at(64)
    first, second = plans_of(model)
    assert (first.inputs, second.inputs) == (inputs(64), inputs(20))
    assert first.budget_bytes == second.budget_bytes == int(0.7 * worst.plain_peak_bytes)


def test_the_lowest_peak_is_that_of_the_worst_class() -> None:
    model = optimized(gpt(), lengths=[32, 64], classes=(32, 64), budget="min")
    most = max(plan.peak_bytes for plan in plans_of(model))
    _step(model, tokens(40))
    *_, last = plans_of(model)
    assert last.inputs == inputs(40)
    assert last.peak_bytes <= most


def test_a_length_follows_the_class_that_costs_it_least() -> None:
    """The plan for 64 tokens recomputes, that for 20 does not; both keep 16 within the budget."""
    at = {length: step_at(length) for length in (16, 20, 64)}
    budget = int(0.7 * at[64].plain_peak_bytes)
    plans = [at[64].solve("auto", budget), at[20].solve("auto", budget)]
    assert plans[0].recomputed
    assert not plans[1].recomputed
    for order in (plans, plans[::-1]):
        found = best_following(at[16], order, budget)
        assert found is not None
        assert found.schedule == plans[1].schedule
        assert found.peak_bytes == found.timeline.peak_bytes < plans[1].peak_bytes
        assert found.inputs == inputs(16)
        tighter = best_following(at[16], order, found.peak_bytes - 1)
        assert tighter is not None
        assert tighter.schedule == plans[0].schedule
        assert best_following(at[16], order, tighter.peak_bytes - 1) is None


def test_on_a_card_everything_that_is_taken_of_it_is_kept() -> None:
    """What the card leaves to the allocator is what a replay of that on a shorter text's own graph keeps."""
    card = lowtide.Card("1GiB")
    short, long = (
        StepBudget(StepSpec(gpt(), tokens(length), mean_square, device="cuda", profile=False)).on(card)
        for length in (20, 60)
    )
    plan = long.solve("auto", card)
    found = best_following(short, [plan], short.left_bytes)
    assert found is not None
    assert found.schedule == plan.schedule
    assert short.promised_bytes(found) <= card.memory_bytes
    assert best_following(short, [plan], short.left_bytes - card.memory_bytes) is None


def test_labels_of_each_class_come_with_its_example(searches: list[Graph]) -> None:
    def pair(length: int) -> tuple[Tensor, Tensor]:
        return tokens(length), tokens(length)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())

    model = lowtide.optimize(
        gpt(), pair, lengths=[10, 20], classes=2, loss=loss, budget="80%", effort="quick", profile=False
    )
    whole = [StepBudget(StepSpec(gpt(), tokens(20), partial(loss, labels=tokens(20)), profile=False))]
    assert plans_of(model)[0].plain_peak_bytes == whole[0].plain_peak_bytes
    searched = len(searches)
    for length in (20, 10):
        model.zero_grad()
        loss(model(tokens(length)), tokens(length)).backward()
    assert len(searches) == searched


# Beyond the classes ---------------------------------------------------------------------------------------


def test_what_follows_no_class_is_planned_for_and_told_once() -> None:
    model = optimized(gpt(), lengths=[10, 20], classes=(10, 20), budget="min")
    with pytest.warns(
        UserWarning, match=r"no plan for a class of lengths \(10, 20\) can be followed for these"
    ):
        _step(model, tokens(50))
    assert plans_of(model)[-1].inputs == inputs(50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, tokens(60))


def test_what_follows_no_class_is_refused_where_that_was_asked_for() -> None:
    model = optimized(gpt(), lengths=[10, 20], classes=(10, 20), budget="min", on_new_shape="error")
    _step(model, tokens(15))
    model.zero_grad()
    with pytest.raises(CannotApply, match=r"\(10, 20\) can be followed for these inputs: int64\[2, 50\]"):
        model(tokens(50))


class Branching(nn.Module):
    """What it does depends on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found.tanh().exp() if x.shape[1] > 9 else found.relu()


def test_another_structure_follows_no_class() -> None:
    model = lowtide.optimize(
        Branching(),
        lambda length: torch.ones(2, length, 4),
        lengths=[12, 14],
        classes=1,
        budget="1GiB",
        loss=mean_square,
        profile=False,
    )
    with pytest.warns(UserWarning, match="no plan for a class of lengths"):
        _step(model, torch.ones(2, 5, 4))
    (first, second) = plans_of(model)
    assert len(first.graph.ops) != len(second.graph.ops)


# How many plans are held ----------------------------------------------------------------------------------


def test_the_plan_that_was_not_used_for_longest_is_let_go(
    monkeypatch: pytest.MonkeyPatch, searches: list[Graph]
) -> None:
    monkeypatch.setattr(ops_forward, "MOST_PLANS", 2)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    lowtide.optimize(model, budget="1GiB", loss=mean_square, effort="quick", profile=False)
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    plain.load_state_dict(model.state_dict())

    def step(rows: int) -> list[str]:
        assert_step_like(model, plain, torch.ones(rows, 4))
        model.zero_grad()
        plain.zero_grad()
        return [name for plan in plans_of(model) for name in plan.inputs]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert step(1) == ["float32[1, 4]"]
        assert step(2) == ["float32[1, 4]", "float32[2, 4]"]
        assert step(1) == ["float32[1, 4]", "float32[2, 4]"]
        assert step(3) == ["float32[1, 4]", "float32[3, 4]"]
        count = len(searches)
        step(1)
        assert len(searches) == count
        assert step(2) == ["float32[1, 4]", "float32[2, 4]"]
        assert len(searches) > count
    many = [str(each.message) for each in told if "more than 2 kinds of inputs" in str(each.message)]
    assert len(many) == 1


def test_with_a_model_go_the_plans_for_its_classes() -> None:
    model = optimized(gpt(), lengths=[8, 12], classes=1, budget="min")
    _step(model, tokens(10))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "more", "message"),
    [
        (tokens(8), {"lengths": [8]}, "with lengths the example is a function"),
        (tokens, {}, "the example is a function, and nobody says of which lengths"),
        (tokens(8), {"classes": 2}, r"classes are chosen from lengths, and there are none"),
        (tokens, {"lengths": [8], "target": tokens(8)}, "a target is that of one batch"),
        (tokens, {"lengths": []}, "there are no lengths"),
        (
            tokens,
            {"lengths": [8, 50], "classes": (8, 20)},
            "a length of 50 fits in none of the classes 8, 20",
        ),
        (tokens, {"lengths": [8], "classes": range(8, 60)}, "52 classes are too many: plans are held for 32"),
        (tokens, {"lengths": [8], "method": "rotor"}, "rotor plans layers, and lengths are planned op by op"),
    ],
)
def test_what_does_not_go_together_is_refused(example: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        lowtide.optimize(gpt(), example, budget="1GiB", loss=mean_square, **more)
