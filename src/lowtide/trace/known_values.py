"""Numbers that are known although the step is fake: masks, labels, positions, step counters.

Models look at such numbers to choose a path (is anything padded? is this one sequence or several?) and
optimizers to count their steps. The batch and the optimizer's state are real, so what is computed from
their integers, booleans and scalars alone can be computed for real beside the fake. Floating-point
tensors of more than one element are never followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.compat.dispatch import schema_of, without_modes
from lowtide.compat.tensors import leaves, map_tensors, tensors_in

_MOST_ELEMENTS = 1 << 20  # beyond this, following would cost time and memory of its own


class Shadows:
    """The real numbers behind fake tensors, where they are known."""

    def __init__(self) -> None:
        self._real: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def remember(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """`fake` stands for `real`."""
        if _followed(real):
            with without_modes():
                self._real[fake] = real.detach().cpu()

    def chosen(self, mask: torch.Tensor) -> int | None:
        """How many elements a boolean mask chooses, if that is known."""
        numbers = self._real.get(mask) if mask.dtype is torch.bool else None
        if numbers is None:
            return None
        with without_modes():
            return int(numbers.count_nonzero())

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The real result of an op, or None if some of its inputs are not known."""
        given = list(tensors_in(args, kwargs))
        followed = [tensor for tensor in given if tensor in self._real]
        if given and not followed:
            return None
        if len(followed) < len(given) or torch.Tag.nondeterministic_seeded in func.tags:
            if schema_of(func).is_mutable:  # overwritten with what is not known
                for tensor in followed:
                    del self._real[tensor]
            return None
        if not given and not _makes_integers(func, args, kwargs):
            return None
        if schema_of(func).is_mutable:
            with without_modes():
                for tensor in followed:  # the real thing must not be written to
                    self._real[tensor] = self._real[tensor].clone()
        numbers: dict[str, Any] = dict(kwargs)
        args, numbers = map_tensors(lambda fake: self._real[fake], (args, numbers))
        if "device" in numbers:
            numbers["device"] = torch.device("cpu")
        with without_modes(), torch.no_grad():
            return func(*args, **numbers)

    def pair(self, fakes: object, reals: object) -> None:
        """Remember the results of an op."""
        for fake, real in zip(leaves(fakes), leaves(reals), strict=True):
            if isinstance(fake, torch.Tensor) and isinstance(real, torch.Tensor):
                self.remember(fake, real)


def _followed(real: torch.Tensor) -> bool:
    whole = not (real.dtype.is_floating_point or real.dtype.is_complex)
    return real.device.type != "meta" and real.numel() <= (_MOST_ELEMENTS if whole else 1)


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a factory makes a few whole numbers, judged before it runs."""
    if func.overloadpacket is not torch.ops.aten.arange:
        return False
    small = all(isinstance(arg, int) and abs(arg) <= _MOST_ELEMENTS for arg in args)
    return small and kwargs.get("dtype") in (None, torch.int64, torch.int32)
