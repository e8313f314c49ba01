"""Between which bounds numbers are that nobody knows: random draws, and indices that an op returns.

`torch.rand([]) < 0.0` is false whatever is drawn, and an index that `topk` returns is one of what it was
given. Where bounds decide a comparison, its result is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.compat.dispatch import written_by
from lowtide.compat.tensors import leaves, storage_key

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; `reached` says whether `high` itself is one of them."""

    low: float
    high: float
    reached: bool

    @property
    def most(self) -> float:
        """The largest of them."""
        return self.high if self.reached else math.nextafter(self.high, self.low)

    def decides(self, comparison: str, other: float) -> bool | None:
        """What comparing any of the numbers with `other` gives; None if that depends on the number."""
        if comparison in ("gt", "le"):
            if self.low > other:
                return comparison == "gt"
            return comparison == "le" if self.high <= other else None
        if comparison in ("lt", "ge"):
            if self.low >= other:
                return comparison == "ge"
            below = self.high < other or (self.high == other and not self.reached)
            return comparison == "lt" if below else None
        outside = other < self.low or other > self.high or (other == self.high and not self.reached)
        return comparison == "ne" if outside else None


class Ranges:
    """The bounds of fake tensors, where they are known."""

    def __init__(self) -> None:
        self._found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, tensor: torch.Tensor) -> Range | None:
        """Between which bounds all numbers of `tensor` are."""
        found: Range | None = self._found.get(tensor)
        return found

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool | None:
        """Note what is known of the result of an op; what all of it is, if it is a decided comparison."""
        name = func.overloadpacket.__name__
        if self._found:
            for tensor in written_by(func, args, kwargs):
                self._forget(tensor)
        made = [each for each in leaves(result) if isinstance(each, torch.Tensor)]
        if name in _DRAWS and made:
            self._found[made[0]] = _DRAWS[name](func, args, kwargs)
        elif name in _INDICES and made and args[0].dim():
            dim = next((arg for arg in args[_INDICES[name] :] if isinstance(arg, int)), -1)
            whole = name in ("argmax", "argmin") and not isinstance(kwargs.get("dim", dim), int)
            size = args[0].numel() if whole else args[0].shape[kwargs.get("dim", dim)]
            self._found[made[-1]] = Range(0, size - 1, reached=True)
        elif name in _KEPT and made and (given := self.of(args[0])) is not None:
            rounded = made[0].dtype != args[0].dtype
            self._found[made[0]] = replace(given, reached=given.reached or rounded)
        elif name in _COMPARISONS and len(args) > 1 and isinstance(args[1], int | float):
            given = self.of(args[0]) if isinstance(args[0], torch.Tensor) else None
            return None if given is None else given.decides(name, args[1])
        return None

    def _forget(self, written: torch.Tensor) -> None:
        key = storage_key(written)
        for tensor in [each for each in self._found if storage_key(each) == key]:
            del self._found[tensor]


def _uniform(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Range:
    low, high = (*args[1:], 0.0, 1.0)[:2] if len(args) != 2 else (args[1], 1.0)
    return Range(kwargs.get("from", low), kwargs.get("to", high), reached=False)


def _unit(_: Any, __: tuple[Any, ...], ___: Mapping[str, Any]) -> Range:
    return Range(0.0, 1.0, reached=False)


def _coin(_: Any, __: tuple[Any, ...], ___: Mapping[str, Any]) -> Range:
    return Range(0, 1, reached=True)


def _whole(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Range:
    """Of `randint` and `randint_like`: the bounds are those whole numbers that come before the size."""
    numbers = [arg for arg in args if isinstance(arg, int)]
    low, high = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0])
    return Range(low, high - 1, reached=True)


def _shuffled(_: Any, args: tuple[Any, ...], __: Mapping[str, Any]) -> Range:
    return Range(0, args[0] - 1, reached=True)


_DRAWS: Mapping[str, Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Range]] = {
    "rand": _unit,
    "rand_like": _unit,
    "uniform": _uniform,
    "uniform_": _uniform,
    "randint": _whole,
    "randint_like": _whole,
    "randperm": _shuffled,
    "bernoulli": _coin,
    "bernoulli_": _coin,
}
_INDICES = {"topk": 2, "sort": 1, "argsort": 1, "argmax": 1, "argmin": 1, "multinomial": 99}
_KEPT = {
    *("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "detach", "alias", "select", "slice"),
    *("expand", "clone", "permute", "t", "transpose", "_to_copy", "gather", "index_select", "split"),
    *("max", "min", "amax", "amin", "lift_fresh", "flatten"),
}
_COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
