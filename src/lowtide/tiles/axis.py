"""The dimension that is sliced: where it is in each tensor, and what a slice of it looks like.

    place   of a tensor: which of its dimensions make up the one that is sliced, outermost part first; of a
            dimension that is longer than the part, the part is the outer one
    axis    of a value: the same in memory, as sizes and steps, so that any look at the value can be asked
    ranges  the slices, cut so that each is a view in every tensor

Tokens of a batch may be one dimension here, (16384, 2048), and two there, (8, 2048, 2048).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from lowtide.ir.graph import Tensor
from lowtide.ir.strides import Ints, in_order, is_dense, outermost_first

_GRAIN = 64
ABSENT = -1  # in a place: a part that this tensor has no dimension for, since it repeats itself along it

Place: TypeAlias = tuple[tuple[int, int], ...]  # (dimension, size)
Axis: TypeAlias = tuple[tuple[int, int], ...]  # (size, step); step 0 where the value repeats itself
Range: TypeAlias = tuple[int, int]


def extent(parts: Iterable[tuple[int, int]], *, size: int = 1) -> int:
    """How long the sliced dimension is by this place (`size` 1), or by this axis (`size` 0)."""
    return math.prod(part[size] for part in parts)


def axis_of(tensor: Tensor, place: Place) -> Axis:
    """The axis of the value that `tensor` looks at, if it is at `place` there."""
    found: list[tuple[int, int]] = []
    for dim, size in place:
        step = 0 if dim == ABSENT else tensor.stride[dim] * _within(tensor, dim, size)
        if size == 1 and found:
            continue
        if found and found[-1][0] == 1:
            found.pop()
        if found and step and found[-1][1] == step * size:
            found[-1] = (found[-1][0] * size, step)
        elif found and not step and not found[-1][1]:
            found[-1] = (found[-1][0] * size, 0)
        else:
            found.append((size, step))
    return tuple(found)


def place_in(tensor: Tensor, axis: Axis) -> Place | None:
    """Where an axis is in a tensor; None where its dimensions do not show it."""
    place: list[tuple[int, int]] = []
    for size, step in axis:
        if not step:
            place.append((ABSENT, size))
            continue
        if size == 1:
            place.append((ABSENT, 1))
            continue
        inside = [
            dim
            for dim in outermost_first(tensor.shape, tensor.stride)
            if tensor.shape[dim] > 1 and step <= tensor.stride[dim] < step * size
        ]
        chained = all(
            tensor.stride[outer] == tensor.stride[inner] * tensor.shape[inner]
            for outer, inner in pairwise(inside)
        )
        whole = math.prod(tensor.shape[dim] for dim in inside) == size
        if not inside and (outer := _merged(tensor, size, step)) is not None:
            place.append((outer, size))
            continue
        if not inside or not chained or not whole or tensor.stride[inside[-1]] != step:
            return None
        place += [(dim, tensor.shape[dim]) for dim in inside]
    return tuple(place)


def _merged(tensor: Tensor, size: int, step: int) -> int | None:
    """The dimension of which this is the outer part: batches of a dimension that is batches times tokens."""
    for dim, (length, stride) in enumerate(zip(tensor.shape, tensor.stride, strict=True)):
        if stride and length > size and length * stride == size * step and not step % stride:
            return dim
    return None


def _within(tensor: Tensor, dim: int, size: int) -> int:
    """How many elements of a dimension one of the sliced elements is."""
    return tensor.shape[dim] // size


def narrowed(tensor: Tensor, place: Place, part: Range) -> Tensor:
    """The look at a range of the sliced dimension. The range must be one of `ranges` for this place."""
    start, stop = part
    shape, offset = list(tensor.shape), tensor.offset
    inner = extent(place)
    for dim, size in place:
        inner //= size
        first, last = start // inner, -(-stop // inner)
        if dim != ABSENT:
            within = _within(tensor, dim, size)
            shape[dim] = (last - first) * within
            offset += first * within * tensor.stride[dim]
        if last - first > 1:
            assert not start % inner, "ranges are cut where all places allow it"
            assert not stop % inner, "ranges are cut where all places allow it"
            break
        start, stop = start - first * inner, stop - first * inner
    return replace(tensor, shape=tuple(shape), offset=offset)


def parts_of(places: Iterable[Place]) -> Ints | None:
    """The sizes, outermost first, into which the sliced dimension falls when all places are respected.

    None if they contradict one another: (6, 4) and (4, 6).
    """
    edges = {1}
    for place in places:
        inner = 1
        for _, size in reversed(place):
            inner *= size
            edges.add(inner)
    ordered = sorted(edges, reverse=True)
    if any(outer % inner for outer, inner in pairwise(ordered)):
        return None
    return tuple(outer // inner for outer, inner in pairwise(ordered))


def ranges(parts: Sequence[int], count: int) -> list[Range]:
    """`count` slices or a few more, as equal as can be, that no place tears: outer parts are cut first."""
    whole = math.prod(parts)
    pieces: list[Range] = [(0, whole)]
    for size in parts:
        if len(pieces) >= count:
            break
        wanted = min(size, -(-count // len(pieces)))
        length = (pieces[0][1] - pieces[0][0]) // size
        cuts = _cuts(size, wanted)
        pieces = [
            (start + low * length, start + high * length)
            for start, _ in pieces
            for low, high in pairwise(cuts)
        ]
        if wanted < size:
            break
    return pieces


def _cuts(size: int, count: int) -> list[int]:
    """Where `size` elements are cut in `count`: kernels are quickest on whole tiles of their own."""
    grain = _GRAIN if size // count >= 4 * _GRAIN else 1
    return [0, *(round(size * number / (count * grain)) * grain for number in range(1, count)), size]


class Compact:
    """A slice of a value in memory of its own, and how looks at the value become looks at that.

    `whole` shows all of the value, `part` the slice of it. Elements keep their order in memory.
    """

    def __init__(self, whole: Tensor, part: Tensor) -> None:
        assert is_dense(whole.shape, whole.stride), "only a value that is shown whole is sliced"
        self.shape = part.shape
        order = outermost_first(whole.shape, whole.stride)
        self.stride = in_order(part.shape, order)
        self._start = whole.offset
        self._dims = [
            (whole.stride[dim], self.stride[dim], part.shape[dim]) for dim in order if whole.shape[dim] > 1
        ]
        self._first = [number for number, _ in self._coordinates(part.offset)]

    def look(self, narrow: Tensor) -> Tensor | None:
        """The same elements, in the slice's own memory; None if they are not a view of it."""
        start = self._moved(narrow.offset)
        if start is None:
            return None
        strides: list[int] = []
        last, reached = narrow.offset, start
        for size, step in zip(narrow.shape, narrow.stride, strict=True):
            if size == 1 or not step:
                strides.append(step)
                continue
            second, end = self._moved(narrow.offset + step), self._moved(narrow.offset + step * (size - 1))
            if second is None or end is None or end - start != (second - start) * (size - 1):
                return None
            strides.append(second - start)
            last, reached = last + step * (size - 1), reached + end - start
        if self._moved(last) != reached:
            return None
        return replace(narrow, stride=tuple(strides), offset=start)

    def _coordinates(self, offset: int) -> list[tuple[int, int]]:
        rest, found = offset - self._start, []
        for step, new_step, _ in self._dims:
            found.append((rest // step, new_step))
            rest %= step
        return found

    def _moved(self, offset: int) -> int | None:
        """Where an element lies in the slice's memory; None if it is not in the slice."""
        moved = 0
        for (number, step), first, (_, _, size) in zip(
            self._coordinates(offset), self._first, self._dims, strict=True
        ):
            if not first <= number < first + size:
                return None
            moved += (number - first) * step
        return moved
