"""The peak of a plan of ops, predicted and measured on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.measure import measure
from tests.helpers.effort import long_but


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def assert_peak_is_predicted(
    model: nn.Module, batch: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor], budget: str = "min"
) -> None:
    """What the step of a plan holds is what was predicted, but for a few numbers."""
    solution = lowtide.plan(model, (batch,), loss=loss, budget=budget, effort="quick", profile=False)
    lowtide.apply(model, solution)

    def step() -> None:
        output = model(batch)
        loss(output).backward()

    step()
    model.zero_grad()
    predicted = solution.timeline.growth_bytes
    assert measure(step, device="cpu").growth_bytes == pytest.approx(predicted, abs=128)


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "square": lambda scores: scores.square().mean(),
    "power": lambda scores: (scores**3).sum(),
    "norm": lambda scores: scores.norm(dim=1).sum(),
    "abs": lambda scores: scores.abs().sum(),
    "L1": lambda scores: nn.functional.l1_loss(scores, torch.zeros_like(scores)),
    "logsumexp": lambda scores: scores.logsumexp(1).mean(),
    "normalized": lambda scores: nn.functional.normalize(scores).sum(),
    "distances": lambda scores: torch.cdist(scores, scores).mean(),
    "products": lambda scores: (scores @ scores.T).logsumexp(1).sum(),
}


@pytest.mark.parametrize("name", long_but(LOSSES, "square", "logsumexp", "L1"))
def test_what_the_formulas_of_a_loss_outside_of_the_model_hold_is_counted(name: str) -> None:
    assert_peak_is_predicted(nn.Linear(16, 64), torch.randn(256, 16), LOSSES[name])


class Clamped(nn.Module):
    """A layer whose backward has done with the gradient that it is given long before it is over."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lin(x)
        return y.clamp(-0.5, 0.5).maximum(x.amin(1, keepdim=True))


def test_a_gradient_that_a_backward_hook_holds_while_its_module_goes_backward_is_counted() -> None:
    model = nn.Sequential(nn.Linear(16, 64), Clamped())
    model[1].register_full_backward_hook(lambda module, incoming, outgoing: None)
    assert_peak_is_predicted(model, torch.randn(256, 16), lambda output: output.square().mean())
