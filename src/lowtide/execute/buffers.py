"""Buffers that a forward changes are changed by its first run alone.

Running statistics are written in training and never read, so a recomputation is given something else to
write to. Any other buffer that the plan knows to change (the vectors of a spectral norm) is given back as
it was when the first run began. A buffer that changes although the plan knows nothing of it is an error:
running that module again would change it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lowtide.compat.modules import NormWithStatistics, buffers_of
from lowtide.compat.tensors import version_of
from lowtide.errors import CannotApply

Buffer: TypeAlias = tuple[str, str]  # the module that has it, seen from the unit, and its name
Before: TypeAlias = Mapping[Buffer, torch.Tensor]

_SCRATCH = "_lowtide_scratch"


class UnitBuffers:
    """The buffers in one unit of a plan: by name, so that nothing here holds the model."""

    def __init__(self, path: str, unit: nn.Module, changed: Iterable[str]) -> None:
        known = set(changed)
        self.statistics: list[Buffer] = []
        self.changed: list[Buffer] = []
        self.watched: list[Buffer] = []
        for owner, module in unit.named_modules():
            for name in buffers_of(module):
                full = ".".join(filter(None, [path, owner, name]))
                kind = self.statistics if isinstance(module, NormWithStatistics) else self.watched
                (self.changed if full in known and kind is self.watched else kind).append((owner, name))

    def before(self, unit: nn.Module) -> dict[Buffer, torch.Tensor]:
        """Copies of what running the unit again must see as it is now."""
        return {key: found.clone() for key in self.changed if (found := _buffer(unit, key)) is not None}

    def versions(self, unit: nn.Module) -> list[int]:
        """To be handed to `check` when the first run is over."""
        return [_version(unit, key) for key in self.watched]

    def check(self, path: str, unit: nn.Module, versions: Sequence[int]) -> None:
        """Raise if the unit has changed a buffer that the plan takes for constant."""
        for key, version in zip(self.watched, versions, strict=True):
            if _version(unit, key) != version:
                name = ".".join(filter(None, [path, *key]))
                raise CannotApply(
                    f"{name} changes when the model runs, but did not when the plan was made. "
                    "Plan again, with the model in the mode in which it trains."
                )

    def again(self, unit: nn.Module, before: Before) -> Callable[..., Any]:
        """What to call to run the unit again without changing its buffers again."""
        if not self.statistics and not self.changed:
            return unit
        return partial(_with_others, unit, (*self.statistics, *self.changed), before)


def forget_scratch(model: nn.Module) -> None:
    """Let go of what recomputations wrote to."""
    for module in model.modules():
        module.__dict__.pop(_SCRATCH, None)


def _buffer(unit: nn.Module, key: Buffer) -> torch.Tensor | None:
    return buffers_of(unit.get_submodule(key[0]))[key[1]]


def _version(unit: nn.Module, key: Buffer) -> int:
    found = _buffer(unit, key)
    return 0 if found is None else version_of(found)


def _with_others(unit: nn.Module, keys: Sequence[Buffer], before: Before, *args: Any, **kwargs: Any) -> Any:
    """Call `unit` with other tensors in place of the buffers that it would change."""
    owners = [unit.get_submodule(owner) for owner, _ in keys]
    real = [buffers_of(owner)[name] for owner, (_, name) in zip(owners, keys, strict=True)]
    try:
        for owner, buffer, key in zip(owners, real, keys, strict=True):
            if key in before:
                buffers_of(owner)[key[1]] = before[key].clone()
            elif buffer is not None and owner.training:  # in evaluation statistics are read, not written
                buffers_of(owner)[key[1]] = _scratch(owner, key[1], buffer)
        return unit(*args, **kwargs)
    finally:
        for owner, buffer, (_, name) in zip(owners, real, keys, strict=True):
            buffers_of(owner)[name] = buffer


def _scratch(owner: nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor:
    """Something like `buffer` to write to. It stays with its module: a new one each time is a kernel each."""
    kept: dict[str, torch.Tensor] = owner.__dict__.setdefault(_SCRATCH, {})
    found = kept.get(name)
    if found is None or _kind(found) != _kind(buffer):
        found = kept[name] = torch.zeros_like(buffer)
    return found


def _kind(tensor: torch.Tensor) -> tuple[type, torch.device, torch.dtype, torch.Size]:
    return type(tensor), tensor.device, tensor.dtype, tensor.shape
