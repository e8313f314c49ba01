"""Numbers that are known although the step is fake: masks, labels, positions, step counters.

Models look at such numbers to choose a path (is anything padded? is this one sequence or several?) and
optimizers to count their steps. The batch and the optimizer's state are real, so what is computed from
their integers, booleans and scalars alone, and from constants, can be computed for real beside the fake.
Floating-point numbers that were given are never followed, but for single ones; what was made of whole numbers
is, where it is not large (a mask of zeros and infinities, or of a batch of pictures).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.compat.dispatch import without_modes, written_by
from lowtide.compat.tensors import leaves, map_tensors, storage_key, tensors_in
from lowtide.trace.ranges import Ranges

_MOST_ELEMENTS = 1 << 20  # beyond this, following would cost time and memory of its own

# Ops that fill all of their result with one number: at which position that is given, or the number.
_GIVEN_AT = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1, "fill_": 1, "scalar_tensor": 0}
_FILLS_WITH = {
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero", "zero_"), 0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
}


class Shadows:
    """The real numbers behind fake tensors, where they are known."""

    def __init__(self) -> None:
        self._real: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._storages: set[int] = set()  # of these, and of some that are gone
        self.ranges = Ranges()

    def remember(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """`fake` stands for `real`, which nobody will write to."""
        if real.device.type != "meta" and real.numel() <= _MOST_ELEMENTS:
            self._storages.add(storage_key(fake))
            with without_modes():
                self._real[fake] = real.detach().cpu()

    def remember_given(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """`fake` stands for `real`, which belongs to somebody else."""
        inexact = real.dtype.is_floating_point or real.dtype.is_complex
        if real.device.type != "meta" and real.numel() <= (1 if inexact else _MOST_ELEMENTS):
            with without_modes():
                self.remember(fake, real.detach().clone())

    def known(self, fake: torch.Tensor) -> torch.Tensor | None:
        """The numbers of `fake`, if they are known."""
        found: torch.Tensor | None = self._real.get(fake)
        return found

    def chosen(self, mask: torch.Tensor) -> int | None:
        """How many elements a mask chooses, if that is known."""
        numbers = self._real.get(mask)
        if numbers is None:
            return None
        with without_modes():
            return int(numbers.count_nonzero())

    def largest(self, fake: torch.Tensor) -> int | None:
        """The largest of whole numbers, if they are known; 0 if there are none."""
        numbers = self._real.get(fake)
        if numbers is None:
            return None
        with without_modes():
            return int(max(numbers.flatten().tolist(), default=0))

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The real result of an op, or None if some of its inputs are not known."""
        given = list(tensors_in(args, kwargs))
        followed = [tensor for tensor in given if tensor in self._real]
        if len(followed) < len(given) or torch.Tag.nondeterministic_seeded in func.tags:
            for tensor in written_by(func, args, kwargs):  # with what is not known
                self._forget(tensor)
            return None
        if not given and not _makes_integers(func, args, kwargs):
            return None
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

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Remember what an op of unknown numbers makes all the same: one number everywhere, or bounds."""
        number = self.ranges.follow(func, args, kwargs, result)
        if number is None:
            number = _filled_with(func, args, kwargs)
        if number is not None and isinstance(result, torch.Tensor) and result.numel() <= _MOST_ELEMENTS:
            with without_modes():
                self.remember(result, torch.full(result.shape, number, dtype=result.dtype))

    def _forget(self, written: torch.Tensor) -> None:
        """The numbers behind a tensor, and all that look at the same memory, are not known any more."""
        key = storage_key(written)
        if key in self._storages:
            for fake in [each for each in self._real if storage_key(each) == key]:
                del self._real[fake]
            self._storages.discard(key)


def _filled_with(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The number that an op fills all of its result with; None if it does not, or with one unknown."""
    name = func.overloadpacket.__name__
    if name not in _GIVEN_AT:
        return _FILLS_WITH.get(name)
    position = _GIVEN_AT[name]
    number = args[position] if len(args) > position else kwargs.get("fill_value")
    return number if isinstance(number, bool | int | float) else None


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a factory makes a few whole numbers, judged before it runs."""
    if func.overloadpacket is not torch.ops.aten.arange:
        return False
    small = all(isinstance(arg, int) and abs(arg) <= _MOST_ELEMENTS for arg in args)
    return small and kwargs.get("dtype") in (None, torch.int64, torch.int32)
