"""Does a planned model train as the plain one does?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import lowtide

Arguments = tuple[Any, ...]
Loss = Callable[[Any], torch.Tensor]


def assert_same_training(
    model: nn.Module, args: Arguments, loss: Loss | None = None, budget: str = "min", **options: Any
) -> nn.Module:
    """Two steps under the lowest plan give the losses, gradients, buffers and random state of plain steps.

    All are equal to the last bit. Returns the planned model.
    """
    planned = copy.deepcopy(model)
    lowtide.optimize(planned, args, loss=loss, budget=budget, effort="quick", profile=False, **options)
    for (name, mine), (_, plains) in zip(_seen(planned, args, loss), _seen(model, args, loss), strict=True):
        assert (mine is None) == (plains is None), name
        assert mine is None or torch.equal(mine, plains), name
    return planned


def _seen(model: nn.Module, args: Arguments, loss: Loss | None) -> Iterator[tuple[str, Any]]:
    """What two steps show, after a known random state."""
    torch.manual_seed(7)
    for _ in range(2):
        model.zero_grad()
        output = model(*args)
        number = output if loss is None else loss(output)
        number.backward()
        yield "loss", number.detach()
        for name, parameter in model.named_parameters():
            yield f"gradient of {name}", None if parameter.grad is None else parameter.grad.clone()
        for name, buffer in model.named_buffers():
            yield name, buffer.clone()
    yield "random state", torch.get_rng_state()
