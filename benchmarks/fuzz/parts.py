"""What random modules are made of: parts that take a tensor and give one of the same shape.

A part is drawn from a stream of its own, so that a model without one of its parts has the others unchanged.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Maker = Callable[[random.Random, int], nn.Module]  # of the stream, and of the number of channels
_Run = Callable[[Any, Tensor], Tensor]


class Part(nn.Module):
    """A module whose forward is `run`, with the modules, parameters and buffers that it is given."""

    def __init__(self, run: _Run, **owned: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, thing in owned.items():
            if isinstance(thing, nn.Module | nn.Parameter):
                setattr(self, name, thing)
            else:
                self.register_buffer(name, thing)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def weight(*shape: int) -> nn.Parameter:
    """A parameter with small numbers."""
    return nn.Parameter(torch.randn(shape) * 0.3)
