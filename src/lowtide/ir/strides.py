"""Shapes and strides, as PyTorch works them out: what a new tensor looks like and what is only another look.

Everything here is arithmetic on whole numbers. A layout is *dense* if it names every element of a piece of
memory exactly once. Strides count elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Ints: TypeAlias = tuple[int, ...]


def contiguous(shape: Sequence[int]) -> Ints:
    """Strides of a row-major tensor: (3, 4) gives (4, 1). Empty dimensions count as one."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def channels_last(shape: Sequence[int]) -> Ints:
    """Strides of a batch of images whose channels are innermost."""
    _, channels, height, width = shape
    return (channels * height * width, 1, width * channels, channels)


def in_order(shape: Sequence[int], order: Sequence[int]) -> Ints:
    """Strides of a dense tensor whose dimensions lie in memory in this order, outermost first."""
    packed = contiguous([shape[dim] for dim in order])
    strides = dict(zip(order, packed, strict=True))
    return tuple(strides[dim] for dim in range(len(shape)))


def outermost_first(shape: Sequence[int], stride: Sequence[int]) -> Ints:
    """The dimensions from the largest stride to the smallest; those of one element come last."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (shape[dim] == 1, -stride[dim], dim)))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor names every element of a piece of memory exactly once."""
    step = 1
    for dim in reversed(outermost_first(shape, stride)):
        if shape[dim] == 1:
            continue
        if stride[dim] != step:
            return False
        step *= shape[dim]
    return True


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor may name an element twice."""
    reach = 1
    for dim in reversed(outermost_first(shape, stride)):
        if shape[dim] == 1:
            continue
        if stride[dim] < reach:
            return True
        reach = stride[dim] * (shape[dim] - 1) + reach
    return False


def like(shape: Sequence[int], stride: Sequence[int]) -> Ints:
    """Strides of a new tensor that keeps the layout of an old one as far as that is dense."""
    if is_dense(shape, stride):
        return tuple(stride)
    return pointwise(shape, [(shape, stride)])


def broadcast(*shapes: Sequence[int]) -> Ints | None:
    """The shape that all of these stretch to, or None where they do not go together."""
    sizes: list[int] = []
    for position in range(1, max(map(len, shapes), default=0) + 1):
        found = {shape[-position] for shape in shapes if len(shape) >= position} - {1}
        if len(found) > 1:
            return None
        sizes.append(found.pop() if found else 1)
    return tuple(reversed(sizes))


def stretched(shape: Sequence[int], stride: Sequence[int], to: Sequence[int]) -> Ints:
    """Strides of a tensor when it is looked at in the larger shape `to`: 0 where it repeats itself."""
    missing = len(to) - len(shape)
    kept = (0 if size == 1 and to[missing + dim] != 1 else stride[dim] for dim, size in enumerate(shape))
    return (0,) * missing + tuple(kept)


def pointwise(shape: Sequence[int], operands: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Ints:
    """Strides of what a pointwise kernel makes: dense, in the order in which its operands lie in memory.

    `operands` are shapes and strides; the first one that can tell two dimensions apart decides.
    """
    steps = [stretched(operand, stride, shape) for operand, stride in operands]
    inner_first = list(reversed(range(len(shape))))
    for start in range(1, len(inner_first)):
        place = start
        for other in reversed(range(start)):
            verdict = _compare(inner_first[other], inner_first[place], shape, steps)
            if verdict < 0:
                break
            if verdict > 0:
                inner_first[other], inner_first[place] = inner_first[place], inner_first[other]
                place = other
    return in_order(shape, inner_first[::-1])


def _compare(inner: int, outer: int, shape: Sequence[int], steps: Sequence[Ints]) -> int:
    """1 if `inner` has to lie outside of `outer`, -1 if it may not, 0 if no operand can tell."""
    for step in steps:
        if step[inner] == 0 or step[outer] == 0:
            continue
        if step[inner] != step[outer]:
            return 1 if step[inner] > step[outer] else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def same(shape: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides mean the same: those of dimensions with one element do not count."""
    return all(size == 1 or a == b for size, a, b in zip(shape, stride, other, strict=True))


def viewed(shape: Sequence[int], stride: Sequence[int], to: Sequence[int]) -> Ints | None:
    """Strides that show the same elements, in the same order, in the shape `to`; None if they must be moved.

    Dimensions that lie behind one another in memory are runs; a new dimension must not cross from one run
    into the next. A new dimension of one element belongs to the run before it, as in PyTorch's kernels: what
    its stride is decides whether a batch of one image has its channels last.
    """
    if math.prod(shape) != math.prod(to):
        return None
    if math.prod(shape) == 0:
        return tuple(stride) if tuple(shape) == tuple(to) else contiguous(to)
    left, strides = list(to), list[int]()
    for length, step in _runs_from_within(shape, stride):
        taken = 1
        while left and (taken < length or left[-1] == 1):
            size = left.pop()
            strides.append(step * taken)
            taken *= size
        if taken != length:
            return None
    return tuple(reversed(strides))


def _runs_from_within(shape: Sequence[int], stride: Sequence[int]) -> Iterator[tuple[int, int]]:
    """As `runs`, innermost first; a dimension of one element begins a run where it is the innermost."""
    length, step = 1, stride[-1] if stride else 1
    for dim in reversed(range(len(shape))):
        length *= shape[dim]
        if dim and shape[dim - 1] != 1 and stride[dim - 1] != length * step:
            yield length, step
            length, step = 1, stride[dim - 1]
    yield length, step


def runs(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, int]]:
    """Lengths and steps of what remains when dimensions that lie behind one another are merged."""
    found: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * step:
            found[-1] = (found[-1][0] * size, step)
        else:
            found.append((size, step))
    return found
