"""One training step from a known state, and whether two of them are the same.

What is compared is held on the CPU, so that it is no part of what is measured on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

TO_THE_BIT = "to the bit"
CLOSE = 1e-4  # of the largest number: what adding up in another order does
_SPREADS = 4  # times as far from a plain step as another plain one is


@dataclass(frozen=True)
class Outcome:
    """What a step leaves behind."""

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    draws: tuple[float, ...]  # the next random numbers of every generator; none where plain steps differ


class Laboratory:
    """Runs steps of a model from the same state: its buffers, no gradients, the same random streams."""

    def __init__(self, model: nn.Module, step: Callable[[], Tensor]) -> None:
        self.model, self.step = model, step
        self._buffers = {name: _copied(buffer) for name, buffer in model.named_buffers()}

    def outcome(self) -> Outcome:
        """One step, run now."""
        self.restore()
        seed_everything()
        loss = self.step()
        gradients = {
            name: None if parameter.grad is None else _copied(parameter.grad)
            for name, parameter in self.model.named_parameters()
        }
        buffers = {name: _copied(buffer) for name, buffer in self.model.named_buffers()}
        found = Outcome(_copied(loss), gradients, buffers, draws(loss.device))
        self.restore()
        return found

    def restore(self) -> None:
        """The model as it was before any step."""
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self._buffers and buffer.shape == self._buffers[name].shape:
                    buffer.copy_(self._buffers[name])


def compared(
    found: Outcome, expected: Outcome, close: float = CLOSE, spread: Mapping[str, float] | None = None
) -> str:
    """'to the bit', 'to 3e-7' where numbers differ by less than `close`, or 'wrong: …'.

    With a `spread`, how far plain steps are apart, a planned one may be a few times as far from them.
    """
    if expected.draws and found.draws != expected.draws:
        return "wrong: the random numbers that follow differ"
    if found.buffers.keys() != expected.buffers.keys():
        return "wrong: other buffers"
    for name, gradient in expected.gradients.items():
        mine = found.gradients[name]
        if (mine is None) != (gradient is None):
            return f"wrong: {name} gets {'no' if mine is None else 'a'} gradient"
    apart = distances(found, expected)
    allowed = {name: max(close, _SPREADS * (spread or {}).get(name, 0.0)) for name in apart}
    name = max(apart, key=lambda name: (apart[name] >= allowed[name], apart[name]))
    if apart[name] == 0:
        return TO_THE_BIT
    if apart[name] >= allowed[name]:
        return f"wrong: {name} is off by {apart[name]:.1e}"
    return f"to {apart[name]:.0e}: {name}"


def distances(found: Outcome, expected: Outcome) -> dict[str, float]:
    """How far each number of one step is from that of another, as a part of the largest one."""
    theirs = _numbers(expected)
    return {name: _distance(mine, theirs[name]) for name, mine in _numbers(found).items()}


def _numbers(outcome: Outcome) -> dict[str, Tensor]:
    found = {"the loss": outcome.loss}
    found |= {f"buffer {name}": buffer for name, buffer in outcome.buffers.items()}
    return found | {
        f"the gradient of {name}": gradient
        for name, gradient in outcome.gradients.items()
        if gradient is not None
    }


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _distance(mine: Tensor, other: Tensor) -> float:
    """The largest difference, as a part of the largest number; 0 where every bit is the same."""
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return float("inf")
    if torch.equal(mine, other) or (torch.equal(mine.isnan(), other.isnan()) and bool(mine.isnan().all())):
        return 0.0
    if mine.is_complex():
        return _distance(torch.view_as_real(mine.resolve_conj()), torch.view_as_real(other.resolve_conj()))
    if not mine.is_floating_point():
        return float("inf")
    here, there = mine.double().nan_to_num(0.0), other.double().nan_to_num(0.0)
    if not torch.equal(mine.isnan(), other.isnan()):
        return float("inf")
    return float((here - there).abs().max()) / max(float(there.abs().max()), 1e-30)


def seed_everything() -> None:
    """Every generator at the same place."""
    torch.manual_seed(7)
    random.seed(7)
    _numpy().random.seed(7)


def draws(device: torch.device) -> tuple[float, ...]:
    """The next random number of every generator."""
    drawn = [random.random(), float(_numpy().random.random()), float(torch.rand(()))]
    return (*drawn, float(torch.rand((), device=device)))


def _numpy() -> Any:
    return import_module("numpy")
