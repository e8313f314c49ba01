"""`torch.compile(model, backend="lowtide", options={"tiles": True})`: slices within the graphs of a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.backend import lowtide as backend
from lowtide.backend import plans_of
from lowtide.errors import InfeasibleBudget
from lowtide.solvers.tiled_summary import families
from tests.helpers.heads import LOGITS_BYTES, Head, batch


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def compiled(model: nn.Module, **options: Any) -> tuple[Any, dict[str, Any]]:
    options |= {"profile": False}
    return torch.compile(model, backend=backend, options=options, dynamic=False), options


def gradients(model: nn.Module, step: Any) -> list[Tensor]:
    model.zero_grad()
    step(*batch()).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def growth(model: nn.Module, step: Any) -> int:
    """What a step takes beyond what was there, as it is measured."""
    ids, labels = batch()
    model.zero_grad(set_to_none=True)
    return lowtide.measure(lambda: step(ids, labels).backward(), device="cpu").growth_bytes


def test_a_head_that_is_compiled_with_its_loss_runs_in_slices() -> None:
    model = Head()
    step, options = compiled(model, budget="min", tiles=True)
    plain = Head()
    expected = gradients(plain, plain)
    for _ in range(3):
        for one, other in zip(gradients(model, step), expected, strict=True):
            torch.testing.assert_close(one, other)
    (solution,) = plans_of(options)
    assert families(solution.graph)[0].spared_bytes == LOGITS_BYTES
    assert growth(model, step) < LOGITS_BYTES


def test_without_tiles_nothing_does() -> None:
    model = Head()
    step, options = compiled(model, budget="min")
    for _ in range(2):
        gradients(model, step)
    (solution,) = plans_of(options)
    assert solution.graph.tiled is None
    assert growth(model, step) > LOGITS_BYTES


def test_the_first_step_has_slices_where_the_budget_would_not_be_kept_without() -> None:
    with pytest.raises(InfeasibleBudget):
        gradients(Head(), compiled(Head(), budget=2 * LOGITS_BYTES)[0])
    model = Head()
    step, _ = compiled(model, budget=2 * LOGITS_BYTES, tiles=True)
    assert growth(model, step) < 2 * LOGITS_BYTES  # the first step
    assert growth(model, step) < 2 * LOGITS_BYTES


def test_a_budget_that_slices_do_not_keep_either_is_refused() -> None:
    with pytest.raises(InfeasibleBudget) as refusal:
        gradients(Head(), compiled(Head(), budget=1000, tiles=True)[0])
    assert refusal.value.least_bytes < LOGITS_BYTES


class Parting(nn.Module):
    """Steps that begin alike, with a head, and part after a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.weights = nn.ParameterList([torch.ones(()), torch.ones(())])
        self.scales = True

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(ids, labels)
        torch._dynamo.graph_break()
        return torch.mul(loss, self.weights[0]) if self.scales else torch.add(loss, self.weights[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_what_steps_have_in_common_runs_in_slices_before_they_part() -> None:
    model, plain = Parting(), Parting()
    step, options = compiled(model, budget=2 * LOGITS_BYTES, tiles=True)
    for number in range(6):
        model.scales = plain.scales = number % 2 == 0
        found, expected = gradients(model, step), gradients(plain, plain)
        assert len(found) == 5  # one of the two weights has none
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert growth(model, step) < 2 * LOGITS_BYTES
    assert len(plans_of(options)) == 2
