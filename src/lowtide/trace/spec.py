"""Which step of training is meant: everything that is needed to trace, capture or run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from lowtide.cost.profile import Progress
from lowtide.trace.step import Example, Loss, Updates


@dataclass(frozen=True)
class StepSpec:
    """A model, a batch and a step over them, as `lowtide.plan` describes it.

    `accumulate` counts the backward calls between two updates. `device` is where the step will run, by
    default where the model is. With `profile` ops have costs, and `progress` is told while they are found.
    With `tiles` stretches of the step may run in slices. `kernels` names those that are to run it.
    """

    model: nn.Module
    example: Example
    loss: Loss | None = None
    optimizer: Updates | None = None
    accumulate: int = 1
    device: str | torch.device | None = None
    profile: bool = True
    name: str | None = None
    progress: Progress | None = None
    tiles: bool = False
    kernels: str = "eager"


# A step that is settled but for its model and batch. It is kept by the model that it is for, and so it must
# not hold that.
SpecOf: TypeAlias = Callable[[nn.Module, Example], StepSpec]
