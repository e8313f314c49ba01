"""Losses as training loops have them: with labels beside the model, and batches that come later."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import BadRequest
from lowtide.solvers.solution import GraphSolution, Solution

IMAGES = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8)


def net(classes: int = 400) -> nn.Module:
    """With so many classes the loss is the peak."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, classes))


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "a closure": lambda: {"example": IMAGES, "loss": lambda output: F.cross_entropy(output, LABELS)},
    "a partial": lambda: {"example": IMAGES, "loss": partial(F.cross_entropy, target=LABELS)},
    "a module": lambda: {"example": (IMAGES, LABELS), "loss": nn.CrossEntropyLoss()},
    "a batch of a loader": lambda: {"example": [IMAGES, LABELS], "loss": F.cross_entropy},
    "a target": lambda: {"example": (IMAGES,), "loss": nn.CrossEntropyLoss(), "target": LABELS},
}


def test_every_way_to_give_a_loss_with_labels_is_the_same_step() -> None:
    fits = [lowtide.fit(net(), **way()) for way in WAYS.values()]
    plans = [lowtide.plan(net(), **way(), budget="min", effort="quick") for way in WAYS.values()]
    graphs = [lowtide.capture(net(), **way()) for way in WAYS.values()]

    assert len({fit.peak_bytes for fit in fits}) == 1
    assert len({plan.peak_bytes for plan in plans}) == 1
    assert len({len(graph.ops) for graph in graphs}) == 1


def test_the_others_take_a_batch_with_labels_too() -> None:
    loss = nn.CrossEntropyLoss()
    step = lowtide.in_arena(net(), (IMAGES, LABELS), loss)

    assert torch.equal(step(), loss(net()(IMAGES), LABELS))
    assert lowtide.saved(net(), (IMAGES, LABELS), loss).entries
    found = lowtide.largest_batch(
        net(),
        lambda size: (torch.empty(size, 16), torch.zeros(size, dtype=torch.int64)),
        memory="100KiB",
        loss=loss,
        profile=False,
    )
    assert found.plain is not None
    assert found.plain.batch > 1


def trained(model: nn.Module, size: int) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    output = model(IMAGES[:size])
    loss = F.cross_entropy(output, LABELS[:size])
    loss.backward()
    return loss.detach()


def planned_bytes(plan: Solution | GraphSolution) -> int:
    return plan.peak_bytes if isinstance(plan, GraphSolution) else plan.confirmation.peak_bytes  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("way", "method"),
    [("a closure", "auto"), ("a closure", "rotor"), ("a partial", "auto"), ("a target", "auto")],
)
def test_the_last_smaller_batch_of_an_epoch_is_planned_for_and_within_its_prediction(
    way: str, method: str
) -> None:
    model = lowtide.optimize(net(), **WAYS[way](), budget="1MiB", method=method)

    with pytest.warns(UserWarning, match="the loss cannot be run for these inputs|planned for"):
        trained(model, 5)
    for plan, size in zip(lowtide.plans_of(model), (8, 5), strict=True):
        trained(model, size)
        model.zero_grad(set_to_none=True)
        reading = lowtide.measure(partial(trained, model, size))
        there = 4 * sum(parameter.numel() for parameter in model.parameters()) + size * (16 * 4 + 8)
        excess = planned_bytes(plan) - there - (reading.peak_bytes - reading.resident_bytes)
        assert 0 <= excess <= (0 if size == 8 else 4400)


def test_a_stand_in_for_a_loss_is_told_of_once_and_changes_no_gradient() -> None:
    model, plain = lowtide.optimize(net(), (IMAGES, LABELS), loss=nn.CrossEntropyLoss(), budget="1MiB"), net()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (5, 3, 8, 5):
            assert torch.equal(trained(model, size), trained(plain, size))
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    assert len([each for each in told if "cannot be run" in str(each.message)]) == 1


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 400), nn.Linear(16, 400)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x).relu()
        return {"first": self.heads[0](hidden), "second": self.heads[1](hidden)}


def test_a_stand_in_hands_no_gradient_to_an_output_that_the_loss_leaves_out() -> None:
    model = TwoHeads()
    lowtide.optimize(
        model, IMAGES, loss=lambda output: F.cross_entropy(output["second"], LABELS), budget="1MiB"
    )
    with pytest.warns(UserWarning, match="cannot be run|planned for"):
        F.cross_entropy(model(IMAGES[:4])["second"], LABELS[:4]).backward()

    assert model.heads[0].weight.grad is None
    assert model.heads[1].weight.grad is not None


def test_a_loss_that_follows_the_loop_is_run_for_every_batch() -> None:
    labels = LABELS
    model = net()
    lowtide.optimize(model, IMAGES, loss=lambda output: F.cross_entropy(output, labels), budget="1MiB")
    labels = LABELS[:5]
    with pytest.warns(UserWarning, match="lowtide") as told:
        trained(model, 5)
    assert ["the model meets inputs" in str(each.message) for each in told] == [True]


def test_the_labels_of_the_first_batch_are_not_held() -> None:
    labels = LABELS.clone()
    gone = weakref.ref(labels)
    model = lowtide.optimize(net(), (IMAGES, labels), loss=nn.CrossEntropyLoss(), budget="1MiB")
    trained(model, 8)
    del labels
    assert gone() is None


@pytest.mark.parametrize("example", [IMAGES, (IMAGES,), {"input": IMAGES}])
def test_a_loss_that_takes_labels_is_refused_where_there_are_none(example: Any) -> None:
    with pytest.raises(BadRequest, match=r"target=labels, or last in the example"):
        lowtide.plan(net(), example, loss=nn.CrossEntropyLoss(), budget="min")


def test_a_loss_that_takes_labels_is_refused_without_an_example() -> None:
    with pytest.raises(BadRequest, match="without an example"):
        lowtide.optimize(net(), loss=nn.CrossEntropyLoss(), budget="1MiB")


def test_a_target_without_a_loss_is_refused() -> None:
    with pytest.raises(BadRequest, match="no loss"):
        lowtide.fit(net(), IMAGES, target=LABELS)


def test_an_error_of_the_loss_itself_is_still_the_users() -> None:
    with pytest.raises(BadRequest, match="batch_size"):
        lowtide.optimize(
            net(), IMAGES, loss=lambda output: F.cross_entropy(output, LABELS[:3]), budget="1MiB"
        )
