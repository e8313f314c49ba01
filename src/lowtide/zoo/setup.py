"""What there is to train: a model, an example of its arguments, and how its output becomes a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowtide.errors import BadRequest


@dataclass(frozen=True)
class Setup:
    """Something to train. `loss` is None when the model's output is the loss or carries it."""

    name: str
    model: nn.Module
    example: tuple[Any, ...] | dict[str, Any]
    loss: Callable[[Any], Tensor] | None
    sizes: Mapping[str, int]  # those that had an effect
    notes: tuple[str, ...] = ()  # what the user should know about how it was set up


def refuse_strays(name: str, sizes: Mapping[str, int], known: tuple[str, ...]) -> None:
    """Raise BadRequest if a size was given that the model does not have."""
    strays = [size for size in sizes if size not in known]
    if strays:
        raise BadRequest(f"{name} has no {' or '.join(strays)}: the sizes that apply are {', '.join(known)}")
