"""Masks of which each part chooses some of a whole: tokens for an expert, where every token has a few.

How many one part chooses nobody knows, but all of them together choose no more than there are choices: so the
first is taken to choose all, and the others what is left. A step whose parts share needs about as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowtide.ir.graph import Op, Ref, short_name
from lowtide.trace.graph_builder import GraphBuilder

_COPIES = frozenset({"_to_copy", "clone"})


@dataclass(slots=True)
class _Left:
    """What parts have been asked for at one line: how many elements they had, and how many may yet choose."""

    elements: int
    choices: int


@dataclass(frozen=True, slots=True)
class _Choices:
    """How many choices there are, and how many elements the mask of them has."""

    count: int
    whole: int


class OneHots:
    """Tells how many a part of a mask of this kind chooses. `writer` finds the op that made a value."""

    def __init__(
        self, builder: Callable[[], GraphBuilder], writer: Callable[[int | None], Op | None]
    ) -> None:
        self._builder, self._writer = builder, writer
        self._left: dict[tuple[int, str], _Left] = {}

    def chosen(self, part: torch.Tensor, line: str) -> int | None:
        """How many elements of `part` are taken to be chosen at `line`; None if it is no part of such a mask.

        Where all of a mask has been gone through, it is begun again.
        """
        value = self._builder().value_of(part)
        choices = None if value is None else self._choices(value)
        if value is None or choices is None:
            return None
        left = self._left.get((value, line))
        if left is None or left.elements + part.numel() > choices.whole:
            left = self._left[value, line] = _Left(0, choices.count)
        found = min(part.numel(), left.choices)
        left.elements += part.numel()
        left.choices -= found
        return found

    def _choices(self, value: int) -> _Choices | None:
        """Of a mask that says for each choice which of so many it is: `choices == arange(count)`."""
        op = self._writer(value)
        while op is not None and short_name(op.target) in _COPIES:
            op = self._writer(self._value(op, 0))
        if op is None or short_name(op.target) != "eq" or not all(isinstance(arg, Ref) for arg in op.args):
            return None
        chosen, classes = (self._builder().tensors[arg.tensor] for arg in op.args if isinstance(arg, Ref))
        made = self._writer(classes.value)
        if made is None or short_name(made.target) != "arange" or chosen.shape[-1:] != (1,):
            return None
        count = math.prod(chosen.shape)
        return _Choices(count, count * math.prod(classes.shape))

    def _value(self, op: Op, position: int) -> int | None:
        given = op.args[position]
        return self._builder().tensors[given.tensor].value if isinstance(given, Ref) else None
