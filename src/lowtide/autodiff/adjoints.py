"""Adjoints of values, gathered from what arrives through the ways in which ops looked at them.

Ops look at values through tensors: whole or in part, transposed, repeated. A gradient arrives in the shape
of such a tensor and has to be brought back to the value. Mostly that is another look at the gradient; what
was repeated is summed, parts that make up the whole are put side by side, and a lone part is put among
zeros.

Sums are made as autograd makes them: what arrives through one tensor is added up in the order of arrival,
then the tensors, in the order in which they were complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from itertools import pairwise
from typing import NamedTuple

from lowtide.errors import BadRequest
from lowtide.ir.builder import Growing, dense
from lowtide.ir.calls import add, full, summed
from lowtide.ir.graph import Ref
from lowtide.ir.strides import Ints, contiguous, is_dense, outermost_first, overlaps, runs
from lowtide.ir.validate import item_bytes


class Look(NamedTuple):
    """A way to look at a value."""

    shape: Ints
    stride: Ints
    offset: int = 0


class RowSlice(NamedTuple):
    """The elements from `start` to `stop` of every row, of a value of so many rows of so many elements."""

    rows: int
    length: int
    start: int
    stop: int


class Adjoints:
    """The gradients that have arrived, by value. `of` sums them up; after that nothing may be added."""

    def __init__(self, growing: Growing) -> None:
        self.growing = growing
        self._arrived: dict[int, dict[int, Ref]] = {}  # value -> tensor -> sum of what arrived
        self._complete: dict[int, tuple[Look, Ref]] = {}

    def __contains__(self, value: int) -> bool:
        return value in self._arrived

    def add(self, tensor: Ref, gradient: Ref) -> None:
        """`gradient` belongs to what `tensor` shows, and has its shape."""
        arrived = self._arrived.setdefault(self.growing.tensors[tensor.tensor].value, {})
        before = arrived.pop(tensor.tensor, None)  # so that the tensor that is completed last comes last
        arrived[tensor.tensor] = gradient if before is None else add(self.growing, before, gradient)

    def of(self, tensor: Ref) -> Ref:
        """The adjoint of the value that `tensor` looks at, as `tensor` shows it.

        Raises:
            BadRequest: an op looked at the value so that elements overlap.
        """
        growing, seen = self.growing, self.growing.tensors[tensor.tensor]
        wanted = Look(seen.shape, seen.stride, seen.offset)
        flat = Look((growing.values[seen.value].bytes // item_bytes(seen.dtype),), (1,))
        whole = growing.owns(tensor)
        if seen.value not in self._complete:
            target = wanted if whole else flat
            terms = list(self._terms(self._arrived[seen.value], target, math.prod(flat.shape)))
            self._complete[seen.value] = (target, self._sum(terms))
        had, adjoint = self._complete[seen.value]
        if whole:
            return brought(growing, adjoint, had, wanted)
        packed = growing.tensors[growing.packed(brought(growing, adjoint, had, flat)).tensor]
        return growing.look(packed.value, *wanted[:2], packed.offset + wanted.offset, packed.dtype)

    def _sum(self, gradients: list[Ref]) -> Ref:
        return reduce(partial(add, self.growing), gradients)

    def _terms(self, arrived: Mapping[int, Ref], whole: Look, count: int) -> Iterator[Ref]:
        """What arrived, each for the whole value, which has `count` elements."""
        parts: dict[RowSlice, list[Ref]] = {}
        for tensor, gradient in arrived.items():
            seen = self.growing.tensors[tensor]
            look, once = self._unrepeated(Look(seen.shape, seen.stride, seen.offset), gradient)
            if overlaps(look.shape, look.stride):
                raise BadRequest(
                    f"the gradient of '{self.growing.name(Ref(tensor))}' cannot be had: an op looks at it "
                    f"with strides {look.stride} for shape {look.shape}, so that its elements overlap. "
                    "Copy what is looked at like this."
                )
            if is_dense(look.shape, look.stride) and math.prod(look.shape) == count:
                yield brought(self.growing, once, look, whole)
            elif (part := part_of(look, count)) is not None:
                parts.setdefault(part, []).append(self._in_rows(once, look, part))
            else:
                yield brought(self.growing, self._scattered(once, look, count), Look((count,), (1,)), whole)
        for rows, gradient in self._put_together({part: self._sum(found) for part, found in parts.items()}):
            yield brought(self.growing, gradient, rows, whole)

    def _unrepeated(self, look: Look, gradient: Ref) -> tuple[Look, Ref]:
        """With what the tensor repeats summed up."""
        dims = [dim for dim, step in enumerate(look.stride) if step == 0 and look.shape[dim] > 1]
        if not dims:
            return look, gradient
        shape = tuple(1 if dim in dims else size for dim, size in enumerate(look.shape))
        return look._replace(shape=shape), summed(self.growing, gradient, dims)

    def _in_rows(self, gradient: Ref, look: Look, part: RowSlice) -> Ref:
        """The gradient of a part as a matrix: a row of it for every row of the value."""
        ordered = self.growing.permuted(gradient, outermost_first(look.shape, look.stride))
        return self.growing.reshaped(ordered, (part.rows, part.stop - part.start))

    def _put_together(self, parts: Mapping[RowSlice, Ref]) -> Iterator[tuple[Look, Ref]]:
        """The gradients of parts, side by side where they make up the whole, or else each among zeros."""
        for rows, length in dict.fromkeys(part[:2] for part in parts):
            mine = sorted(part for part in parts if part[:2] == (rows, length))
            edges = [(0, 0), *(part[2:] for part in mine), (length, length)]
            look = Look((rows, length), contiguous((rows, length)))
            form = dense(look.shape, self.growing.dtype(parts[mine[0]]))
            if all(before[1] == after[0] for before, after in pairwise(edges)):
                beside = tuple(parts[part] for part in mine)
                yield look, self.growing.call("aten.cat.default", [beside, 1], form)
                continue
            for part in mine:
                where = (look.shape, 1, part.start, part.stop, 1)
                yield look, self.growing.call("aten.slice_backward.default", [parts[part], *where], form)

    def _scattered(self, gradient: Ref, look: Look, count: int) -> Ref:
        """The gradient of scattered elements among zeros."""
        dtype = self.growing.dtype(gradient)
        zeros = full(self.growing, (count,), 0, dtype)
        form = dense((count,), dtype)
        return self.growing.call("aten.as_strided_scatter.default", [zeros, gradient, *look], form)


def brought(growing: Growing, gradient: Ref, had: Look, wanted: Look) -> Ref:
    """A gradient in the shape of `had`, in the shape of `wanted`, where both show all of a value."""
    if had[:2] == wanted[:2]:
        return gradient
    ordered = growing.permuted(gradient, outermost_first(had.shape, had.stride))
    order = outermost_first(wanted.shape, wanted.stride)
    shaped = growing.reshaped(ordered, [wanted.shape[dim] for dim in order])
    return growing.permuted(shaped, [order.index(dim) for dim in range(len(order))])


def part_of(look: Look, count: int) -> RowSlice | None:
    """The part of every row that a look shows, if it is such a part of a value of `count` elements."""
    order = outermost_first(look.shape, look.stride)
    steps = runs([look.shape[dim] for dim in order], [look.stride[dim] for dim in order])
    width = steps.pop()[0] if steps and steps[-1][1] == 1 else 1
    rows, length = steps.pop() if steps else (1, count)
    if steps or rows * length != count or look.offset + width > length:
        return None
    return RowSlice(rows, length, look.offset, look.offset + width)
