"""What a call finds switched on around it: whether gradients are recorded, and autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What decides, beside its arguments, which ops a call runs; the same when it is run again."""

    gradients: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]  # of _DEVICES
    caches_casts: bool

    @classmethod
    def now(cls) -> Surroundings:
        """What is on in this thread."""
        autocast = tuple(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES
        )
        return cls(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled())

    def again(self) -> AbstractContextManager[object]:
        """Have the same on, for a while. Casts that are cached stay cached where the same is on already."""
        stack, now = ExitStack(), Surroundings.now()
        if self.gradients != now.gradients:
            stack.enter_context(torch.set_grad_enabled(self.gradients))
        for device, (enabled, dtype), found in zip(_DEVICES, self.autocast, now.autocast, strict=True):
            if (enabled, dtype) != found:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=self.caches_casts))
        return stack
