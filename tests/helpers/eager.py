"""A plan held against plain training: loss, gradients, buffers and random state, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide

Loss = Callable[[Any], torch.Tensor]


def mean_square(output: Any) -> torch.Tensor:
    """A loss of everything that a model returns."""
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([(tensor * tensor).mean() for tensor in outputs]).sum()


def assert_trains_like_plain(
    model: nn.Module,
    *args: Any,
    loss: Loss = mean_square,
    budget: str = "min",
    steps: int = 2,
    profile: bool = False,
) -> None:
    """`model` under a plan does what a copy of it does without one, from the same random state."""
    plain = copy.deepcopy(model)
    lowtide.optimize(model, args, budget=budget, loss=loss, accumulate=steps, effort="quick", profile=profile)
    assert_step_like(model, plain, *args, loss=loss, steps=steps)


def assert_step_like(
    model: nn.Module, plain: nn.Module, *args: Any, loss: Loss = mean_square, steps: int = 1
) -> None:
    """Steps of `model` are those of `plain`; the gradients of all steps add up."""
    torch.manual_seed(7)
    state = torch.get_rng_state()
    expected = [_step(plain, args, loss) for _ in range(steps)]
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    found = [_step(model, args, loss) for _ in range(steps)]
    assert all(map(torch.equal, found, expected)), f"losses are {found}, and not {expected}"
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None and other.grad is not None:
            far = float((mine.grad - other.grad).abs().max())
            assert torch.equal(mine.grad, other.grad), f"{name}: off by {far}"
    for (name, buffer), other_buffer in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other_buffer), name
    assert torch.equal(torch.get_rng_state(), after), "the random state differs"


def _step(model: nn.Module, args: tuple[Any, ...], loss: Loss) -> torch.Tensor:
    number = loss(model(*args))
    number.backward()
    return number.detach()
