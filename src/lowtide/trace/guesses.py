"""What numbers are taken to be where a step reads them and nobody knows them.

They are what an undisturbed step would see: losses finite, nothing to skip, no layer dropped. Of sizes it is
the largest there can be. A step that takes the path for these needs no less than one that leaves things out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.compat.dispatch import without_modes
from lowtide.errors import CannotTrace, LowtideError
from lowtide.ir.assumptions import Guess
from lowtide.ir.graph import Op, Ref
from lowtide.trace.graph_builder import GraphBuilder
from lowtide.trace.known_values import Shadows
from lowtide.trace.one_hots import OneHots
from lowtide.trace.ranges import Range
from lowtide.trace.sizes import ResultSizes
from lowtide.trace.user_lines import current_line

aten = torch.ops.aten

_MOST_OF_A_LINE = 1000  # reads at which the same guess for ever is one that a loop may wait to change
_PASSED_ON = ("any", "clone", "_to_copy")
_OPPOSITE = ("logical_not", "bitwise_not")
_BOTH = ("logical_and", "bitwise_and", "__and__", "mul")
_EITHER = ("logical_or", "bitwise_or", "__or__", "add")


class Guesses:
    """The guesses of one dry run."""

    def __init__(self, builder: Callable[[], GraphBuilder], shadows: Shadows, sizes: ResultSizes) -> None:
        self._builder = builder
        self._shadows = shadows
        self._sizes = sizes
        self._one_hots = OneHots(builder, self._writer)
        self._reads: dict[str, int] = {}
        self._made: dict[Guess, None] = {}

    @contextmanager
    def told_of(self) -> Iterator[None]:
        """An error that passes says what had been guessed before: it may be the reason."""
        try:
            yield
        except LowtideError:
            raise
        except Exception as error:
            for guess in self._made:
                error.add_note(f"Before that, a number that exists only when the step runs was {guess}")
            raise

    @property
    def made(self) -> tuple[Guess, ...]:
        """What was taken for what, in the order of the step."""
        return tuple(self._made)

    def number(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What an undisturbed step would read."""
        if func is aten.equal.default and not self._is_asked_whether_true(*args):
            return self._told(True)
        given = args[0]
        between = self._shadows.ranges.of(given)
        if given.dtype is torch.bool:
            truth = self._truth(self._builder().value_of(given))
            return self._told(_is_asserted() if truth is None else truth)
        if between is not None:
            most = between.most
            return self._told(float(most) if given.dtype.is_floating_point else int(most))
        writer = self._writer(self._builder().value_of(given))
        # a gradient scaler asks whether anything overflowed
        finite = 0 if writer is not None and _name(writer).startswith("_amp_") else 1
        return self._told(float(finite) if given.dtype.is_floating_point else finite)

    def size(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The fake result of an op, as large as it can be."""
        if func is aten.nonzero.default and (made := self._part(args[0])) is not None:
            return made
        result = self._sizes.result(func, args, kwargs)
        if result is None:
            raise CannotTrace(
                f"the shape of what {func} returns depends on numbers, which a dry run does not have, and "
                f"nothing bounds it: {current_line()}. Give its size as an argument where the op takes one "
                "(minlength, output_size), or compute it outside of the step."
            )
        line = current_line()
        self._note(f"the size of a result depends on numbers, and was taken to be the largest: {line}")
        self._made[Guess("the largest size", line)] = None
        return result

    def _part(self, mask: torch.Tensor) -> torch.Tensor | None:
        """Where a part of a mask is not zero, if it is known how often all of its parts together are."""
        line = current_line()
        count = self._one_hots.chosen(mask, line)
        if count is None:
            return None
        self._note(f"the sizes of parts depend on numbers, and the first was taken to be all: {line}")
        self._made[Guess("all in the first part", line)] = None
        return mask.new_empty((count, mask.dim()), dtype=torch.int64)

    def parts(self, whole: int, sizes: list[int]) -> list[int]:
        """Sizes that add up to the `whole` that is cut into so many parts: the first is all of it.

        They stay what they are where they do add up, or were not guessed: tokens that go to experts, say,
        are counted, and no guess of one count knows of the others.
        """
        guessed = {guess.number for guess in self._made}
        if sum(sizes) == whole or not sizes or not guessed.issuperset(map(repr, sizes)):
            return sizes
        line = current_line()
        self._note(f"the sizes of parts depend on numbers, and the first was taken to be all: {line}")
        self._made[Guess("all in the first part", line)] = None
        return [whole, *(0 for _ in sizes[1:])]

    def draw(self, between: Range) -> float:
        """A number that Python or numpy draws."""
        most: float = self._told(between.most)
        return most

    def array(self, given: torch.Tensor) -> Any:
        """The numbers of a tensor that is handed to numpy; zeros, which are indices too, if nobody knows."""
        numbers = self._shadows.known(given)
        if numbers is None:
            self._told(0)
        with without_modes():
            shape, dtype = given.shape, given.dtype
            return (torch.zeros(shape, dtype=dtype) if numbers is None else numbers.clone()).numpy()

    def _told(self, number: Any) -> Any:
        line = current_line()
        self._reads[line] = self._reads.get(line, 0) + 1
        if self._reads[line] > _MOST_OF_A_LINE:
            raise CannotTrace(
                f"a number that exists only when the step runs was read {_MOST_OF_A_LINE} times at one line, "
                f"which may wait for it to change: {line}. Bound the loop, or decide outside of the step."
            )
        self._note(f"a number was read and had to be assumed: {line}")
        self._made[Guess(repr(number), line)] = None
        return number

    def _note(self, text: str) -> None:
        self._builder().notes[text] = None

    # Whether something is so --------------------------------------------------------------------------

    def _truth(self, value: int | None) -> bool | None:
        """Whether a condition holds in an undisturbed step; None if what it is made of does not tell."""
        writer = self._writer(value)
        if writer is None:
            return None
        name = _name(writer)
        if name == "all":
            return self._truth(self._given(writer, 0)) is not False
        if name in _PASSED_ON:
            return self._truth(self._given(writer, 0))
        if name in _OPPOSITE:
            return not self._truth(self._given(writer, 0))
        if name in _BOTH or name in _EITHER:
            found = [self._truth(self._given(writer, position)) is True for position in (0, 1)]
            return all(found) if name in _BOTH else any(found)
        if name in ("gt", "ge", "lt", "le") and self._is_drawn(self._given(writer, 0)):
            return name in ("gt", "ge")
        return _is_ordinary(writer) if name in ("eq", "ne") else None

    def _is_asked_whether_true(self, given: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether a condition is read as PyTorch's own code does: by whether it equals a new one."""
        made = self._writer(self._builder().value_of(other))
        return given.dtype is torch.bool and made is not None and _name(made) == "new_ones"

    def _is_drawn(self, value: int | None) -> bool:
        writer = self._writer(value)
        return writer is not None and writer.random

    def _given(self, op: Op, position: int) -> int | None:
        given = op.args[position] if len(op.args) > position else None
        return self._builder().tensors[given.tensor].value if isinstance(given, Ref) else None

    def _writer(self, value: int | None) -> Op | None:
        if value is None:
            return None
        found = (op for op in reversed(self._builder().ops) if value in (*op.creates, *op.mutates))
        return next(found, None)


def _is_asserted() -> bool:
    """Whether the user's line asserts what is read: an undisturbed step goes on after it."""
    _, _, code = current_line().partition("`")
    return code.startswith("assert ") and not code.startswith("assert not ")


def _name(op: Op) -> str:
    return op.target.split(".")[1]


def _is_ordinary(comparison: Op) -> bool | None:
    """Whether ordinary numbers pass: they equal themselves, and they are not infinite."""
    left, right = comparison.args[:2]
    if left == right or (isinstance(right, float) and not math.isfinite(right)):
        return (left == right) == (_name(comparison) == "eq")
    return None
