"""A graph for any batch, or any length, from the graphs of two: what grows, grows along a straight line.

Two captures of one step at different batches run the same ops on the same values. Then every extent at a
third batch follows from the two, in whole numbers, and nothing need be captured there. Strides follow from
the extents inside of them, and storages from both: that of n×n scores grows with the square. Workspaces and
seconds follow too, rounded; they are measured, so theirs is an estimate.

Some kernels round up: the statistics of memory-efficient attention are there for 128 tokens if there are 101.
Captures at round sizes do not show that, and one more at a size that is not round does (`Family.told_by`).

Not carried along: plain numbers among the arguments of ops and the names of values. They are those of the
smaller capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lowtide.ir.graph import Arg, Graph, Op, Ref, Symbol, Tensor, Value
from lowtide.ir.validate import extent_bytes

_ROUNDED_TO = (2, 4, 8, 16, 32, 64, 128)  # by kernels that take more than they are asked for


class DoesNotScale(Exception):
    """Two graphs of one step are not on a line; the message says where they part, in the user's words."""


@dataclass(frozen=True)
class Family:
    """The graphs of one step, one for each batch, or for each of what they are `along`; see `family_of`."""

    first: Graph
    second: Graph
    batches: tuple[int, int]
    along: str = "batch"
    rounded_to: tuple[int, ...] = ()  # for each tensor: it is as large as at the next multiple of that

    def at(self, batch: int) -> Graph:
        """The graph of the step on `batch` samples."""
        line = _Line(*self.batches, batch)
        tensors = tuple(self._tensor(place, batch) for place in range(len(self.first.tensors)))
        seen = _seen_bytes(tensors, len(self.first.values))
        beyond = map(line.exact, _unseen_bytes(self.first), _unseen_bytes(self.second))
        return replace(
            self.first,
            values=tuple(
                replace(value, bytes=seen_bytes + more_bytes)
                for value, seen_bytes, more_bytes in zip(self.first.values, seen, beyond, strict=True)
            ),
            tensors=tensors,
            ops=tuple(map(line.op, self.first.ops, self.second.ops)),
        )

    def told_by(self, third: Graph, batch: int) -> Family:
        """The same, knowing from a capture at a `batch` that is not round what kernels round up.

        Raises:
            DoesNotScale: it is another step, or a size is off its line and not rounded up either.
        """
        check_same_structure(self.first, third)
        found = replace(
            self,
            rounded_to=tuple(self._rounding(place, real, batch) for place, real in enumerate(third.tensors)),
        )
        check_same_sizes(found.at(batch), third)
        return found

    def _tensor(self, place: int, batch: int) -> Tensor:
        multiple = self.rounded_to[place] if self.rounded_to else 1
        line = _Line(*self.batches, -(-batch // multiple) * multiple)
        return line.tensor(self.first.tensors[place], self.second.tensors[place])

    def _rounding(self, place: int, real: Tensor, batch: int) -> int:
        """The multiple that a tensor is rounded to, 1 if it is on its line, as far as one capture tells."""
        for multiple in (1, *_ROUNDED_TO):
            line = _Line(*self.batches, -(-batch // multiple) * multiple)
            expected = line.tensor(self.first.tensors[place], self.second.tensors[place])
            if _numbers_of(expected) == _numbers_of(real):
                return multiple
        return 1


def family_of(first: Graph, second: Graph, batches: tuple[int, int], along: str = "batch") -> Family:
    """The graphs of the step that `first` and `second` are captures of, at `batches`, the smaller first.

    Raises:
        DoesNotScale: they run different ops, or something grows by a part of one, or shrinks, a sample.
    """
    check_same_structure(first, second)
    apart = batches[1] - batches[0]
    unseen = zip(_unseen_bytes(first), _unseen_bytes(second), strict=True)
    for value, other, (before, after) in zip(first.values, second.values, unseen, strict=True):
        if (after - before) % apart or other.bytes < value.bytes:
            raise DoesNotScale(
                f"'{value.name}' takes {value.bytes} bytes at {along} {batches[0]} and {other.bytes} "
                f"at {along} {batches[1]}"
            )
    for tensor, larger in zip(first.tensors, second.tensors, strict=True):
        if any((after - before) % apart for before, after in _along_lines(tensor, larger)):
            raise DoesNotScale(
                f"'{first.values[tensor.value].name}' is {tensor.shape} at {along} {batches[0]} and "
                f"{larger.shape} at {along} {batches[1]}"
            )
    return Family(first, second, batches, along)


def check_same_structure(one: Graph, other: Graph) -> None:
    """Raise DoesNotScale unless both run the same ops on the same values, whatever the sizes of these."""
    for op, another in zip(one.ops, other.ops, strict=False):
        if _skeleton(op) != _skeleton(another):
            raise DoesNotScale(f"op {op.id} is {op.label} in one and {another.label} in the other")
    if len(one.ops) != len(other.ops):
        raise DoesNotScale(f"one runs {len(one.ops)} ops and the other {len(other.ops)}")
    if [_kind(value) for value in one.values] != [_kind(value) for value in other.values]:
        raise DoesNotScale("they hold different values")
    if [_look(tensor) for tensor in one.tensors] != [_look(tensor) for tensor in other.tensors]:
        raise DoesNotScale("they look at their values in different ways")
    if one.outputs != other.outputs:
        raise DoesNotScale("different values outlive the step")


def check_same_sizes(expected: Graph, captured: Graph) -> None:
    """Raise DoesNotScale unless `captured` is the step that `expected` is, extent by extent.

    Bytes are compared where they are those of the extents: others a profile may have corrected.
    """
    check_same_structure(expected, captured)
    for tensor, real in zip(expected.tensors, captured.tensors, strict=True):
        if _numbers_of(tensor) != _numbers_of(real):
            raise DoesNotScale(
                f"'{captured.values[real.value].name}' was expected to be {tensor.shape} and is {real.shape}"
            )
    unseen = _unseen_bytes(expected)
    for value, found, corrected in zip(expected.values, captured.values, unseen, strict=True):
        if not corrected and found.bytes != value.bytes:
            raise DoesNotScale(
                f"'{found.name}' was expected to take {value.bytes} bytes and takes {found.bytes}"
            )


def with_costs_of(captured: Graph, known: Graph) -> Graph:
    """`captured` with the bytes, workspaces and seconds of `known`, another graph of the same step."""
    return replace(
        captured,
        values=tuple(
            replace(value, bytes=other.bytes)
            for value, other in zip(captured.values, known.values, strict=True)
        ),
        ops=tuple(
            replace(
                op,
                workspace_bytes=other.workspace_bytes,
                seconds=other.seconds,
                extrapolated=other.extrapolated,
            )
            for op, other in zip(captured.ops, known.ops, strict=True)
        ),
        profiled_on=known.profiled_on,
        notes=tuple(dict.fromkeys((*captured.notes, *known.notes))),
    )


# Lines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """From what is so at two batches to what is so at a third."""

    smaller: int
    larger: int
    batch: int

    def exact(self, before: int, after: int) -> int:
        return before + (after - before) // (self.larger - self.smaller) * (self.batch - self.smaller)

    def estimate(self, before: float, after: float) -> float:
        """More never takes less, and nothing takes less than nothing, at no batch at all."""
        slope = max(0.0, (after - before) / (self.larger - self.smaller))
        slope = min(slope, after / self.larger)
        return after + slope * (self.batch - self.larger)

    def tensor(self, before: Tensor, after: Tensor) -> Tensor:
        shape = tuple(map(self.exact, before.shape, after.shape))
        stride = list(map(self.exact, before.stride, after.stride))
        for dim, inner, multiple in _dense_dims(before, after):
            stride[dim] = multiple * shape[inner] * stride[inner]
        return replace(
            before, shape=shape, stride=tuple(stride), offset=self.exact(before.offset, after.offset)
        )

    def op(self, before: Op, after: Op) -> Op:
        return replace(
            before,
            workspace_bytes=round(self.estimate(before.workspace_bytes, after.workspace_bytes)),
            seconds=self.estimate(before.seconds, after.seconds),
            extrapolated=self.batch not in (self.smaller, self.larger),
        )


def _dense_dims(before: Tensor, after: Tensor) -> Iterator[tuple[int, int, int]]:
    """Dimensions that step, in both, over the same multiple of the next one inside: (dim, inner, multiple).

    From the innermost outwards. Where that grows, such a stride grows with the square.
    """
    dims = sorted(
        (dim for dim, stride in enumerate(before.stride) if stride),
        key=lambda dim: (before.stride[dim], before.shape[dim]),
    )
    for inner, dim in pairwise(dims):
        spans = before.shape[inner] * before.stride[inner], after.shape[inner] * after.stride[inner]
        if 0 in spans or before.stride[dim] % spans[0] or after.stride[dim] % spans[1]:
            continue
        multiple = before.stride[dim] // spans[0]
        if multiple == after.stride[dim] // spans[1]:
            yield dim, inner, multiple


def _along_lines(before: Tensor, after: Tensor) -> Iterator[tuple[int, int]]:
    """The numbers of a tensor that are to lie on straight lines."""
    dense = {dim for dim, _, _ in _dense_dims(before, after)}
    yield from zip(before.shape, after.shape, strict=True)
    for dim, strides in enumerate(zip(before.stride, after.stride, strict=True)):
        if dim not in dense:
            yield strides
    yield before.offset, after.offset


def _seen_bytes(tensors: Sequence[Tensor], values: int) -> list[int]:
    """The bytes of each value that some tensor looks at."""
    seen = [0] * values
    for tensor in tensors:
        seen[tensor.value] = max(seen[tensor.value], extent_bytes(tensor))
    return seen


def _unseen_bytes(graph: Graph) -> list[int]:
    """What each value takes beyond that: nothing, but for reserves of kernels and values that no op sees."""
    seen = _seen_bytes(graph.tensors, len(graph.values))
    return [value.bytes - looked_at for value, looked_at in zip(graph.values, seen, strict=True)]


# What must be the same ------------------------------------------------------------------------------------


def _skeleton(op: Op) -> tuple[object, ...]:
    """An op without sizes, numbers and costs."""
    return (
        op.target,
        op.outputs,
        op.reads,
        op.creates,
        op.mutates,
        op.updates,
        op.phase,
        op.module,
        op.call,
        op.section,
        op.random,
        tuple(_form(arg) for arg in op.args),
        tuple((name, _form(arg)) for name, arg in op.kwargs),
    )


def _form(arg: Arg) -> object:
    if isinstance(arg, Ref | Symbol):
        return arg
    return tuple(_form(item) for item in arg) if isinstance(arg, tuple) else None


def _kind(value: Value) -> tuple[object, ...]:
    return value.role, value.module, value.device


def _look(tensor: Tensor) -> tuple[object, ...]:
    return tensor.value, tensor.dtype, len(tensor.shape)


def _numbers_of(tensor: Tensor) -> Sequence[int]:
    return (*tensor.shape, *tensor.stride, tensor.offset)
