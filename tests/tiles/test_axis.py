"""The sliced dimension: by hand, and against numpy's own arithmetic of strides."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.ir.graph import Tensor
from lowtide.ir.strides import contiguous, in_order, viewed
from lowtide.tiles.axis import (
    ABSENT,
    Axis,
    Compact,
    Place,
    Range,
    axis_of,
    extent,
    narrowed,
    parts_of,
    place_in,
    ranges,
)
from tests.helpers.effort import examples

Array = npt.NDArray[np.int64]


def tensor(shape: tuple[int, ...], stride: tuple[int, ...] | None = None, offset: int = 0) -> Tensor:
    return Tensor(0, 0, shape, contiguous(shape) if stride is None else stride, offset, "float32")


# By hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "count", "found"),
    [
        ((12,), 3, [(0, 4), (4, 8), (8, 12)]),
        ((11,), 3, [(0, 4), (4, 7), (7, 11)]),
        ((511,), 2, [(0, 256), (256, 511)]),
        ((2047,), 2, [(0, 1024), (1024, 2047)]),  # where kernels have whole tiles of 64
        ((1000,), 3, [(0, 320), (320, 640), (640, 1000)]),
        ((5,), 9, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        ((2, 6), 2, [(0, 6), (6, 12)]),
        ((2, 6), 3, [(0, 3), (3, 6), (6, 9), (9, 12)]),  # a sentence is cut into as many as the next
        ((3, 4), 2, [(0, 8), (8, 12)]),
        ((2, 2, 5), 4, [(0, 5), (5, 10), (10, 15), (15, 20)]),
        ((4,), 1, [(0, 4)]),
        ((), 3, [(0, 1)]),
    ],
)
def test_slices_are_cut_where_all_places_allow_it(
    parts: tuple[int, ...], count: int, found: list[Range]
) -> None:
    assert ranges(parts, count) == found


@pytest.mark.parametrize(
    ("places", "parts"),
    [
        ([((0, 12),)], (12,)),
        ([((0, 12),), ((0, 2), (1, 6))], (2, 6)),
        ([((0, 2), (1, 6)), ((0, 6), (1, 2))], (2, 3, 2)),
        ([((0, 2), (ABSENT, 6))], (2, 6)),
        ([((0, 6), (1, 4)), ((0, 4), (1, 6))], None),
        ([], ()),
    ],
)
def test_places_of_one_dimension_make_parts_or_contradict_one_another(
    places: list[Place], parts: tuple[int, ...] | None
) -> None:
    assert parts_of(places) == parts


@pytest.mark.parametrize(
    ("look", "place", "axis"),
    [
        (tensor((2, 6, 8)), ((0, 2), (1, 6)), ((12, 8),)),
        (tensor((12, 8)), ((0, 12),), ((12, 8),)),
        (tensor((2, 6, 8)), ((1, 6),), ((6, 8),)),
        (tensor((2, 5, 8), (48, 8, 1)), ((0, 2), (1, 5)), ((2, 48), (5, 8))),  # all but the last of six
        (tensor((6, 8)), ((ABSENT, 2), (0, 6)), ((2, 0), (6, 8))),
        (tensor((1, 6, 8)), ((0, 1), (1, 6)), ((6, 8),)),
        (tensor((1, 6, 8)), ((0, 1),), ((1, 48),)),
        (tensor((2, 3), (0, 0)), ((0, 2), (1, 3)), ((6, 0),)),
        (tensor((12, 8)), ((0, 2),), ((2, 48),)),  # the outer part of sentences times tokens
    ],
)
def test_a_place_is_an_axis_of_the_value(look: Tensor, place: Place, axis: Axis) -> None:
    assert axis_of(look, place) == axis


@pytest.mark.parametrize(
    ("look", "axis", "place"),
    [
        (tensor((12, 8)), ((2, 48), (5, 8)), None),  # the sentences are not apart
        (tensor((2, 6, 8)), ((12, 8),), ((0, 2), (1, 6))),
        (tensor((2, 4, 6, 2)), ((12, 8),), None),  # heads lie outside of tokens here
        (tensor((2, 6, 4, 2)), ((12, 8),), ((0, 2), (1, 6))),
        (tensor((8, 12), (1, 8)), ((12, 8),), ((1, 12),)),
        (tensor((12, 8)), ((6, 8),), None),
        (tensor((12, 8)), ((2, 48),), ((0, 2),)),
        (tensor((2, 5, 8), (48, 8, 1)), ((2, 48),), ((0, 2),)),
        (tensor((12, 8)), ((2, 40),), None),  # of five tokens each: not all of the dimension
        (tensor((2, 6, 1)), ((4, 0), (12, 1)), ((ABSENT, 4), (0, 2), (1, 6))),
    ],
)
def test_an_axis_is_found_in_another_look_or_is_not_there(
    look: Tensor, axis: Axis, place: Place | None
) -> None:
    assert place_in(look, axis) == place


def test_the_outer_part_of_a_dimension_is_cut_between_whole_sentences() -> None:
    part = narrowed(tensor((12, 8)), ((0, 3),), (1, 3))
    assert (part.shape, part.offset) == ((8, 8), 32)


def test_a_slice_in_memory_of_its_own() -> None:
    """Tokens 3 to 6 of 2 sentences of 6 tokens of 8 numbers: rows of 8, three to a sentence."""
    whole = tensor((2, 6, 8))
    part = narrowed(whole, ((1, 6),), (3, 6))
    assert (part.shape, part.offset) == ((2, 3, 8), 24)
    compact = Compact(whole, part)
    assert compact.stride == (24, 8, 1)
    heads = tensor((2, 4, 3, 2), (48, 2, 8, 1), 24)
    found = compact.look(heads)
    assert found is not None
    assert (found.shape, found.stride, found.offset) == ((2, 4, 3, 2), (24, 2, 8, 1), 0)
    assert compact.look(tensor((2, 6, 8))) is None  # not in the slice
    assert compact.look(tensor((2, 24), (48, 1), 24)) == tensor((2, 24), (24, 1))
    assert compact.look(tensor((4, 8), (8, 1), 24)) is None  # the fourth is not in the slice


# Properties -------------------------------------------------------------------------------------------


def addresses(look: Tensor) -> Array:
    """Where in memory the elements of a tensor are, by numpy."""
    last = look.offset + sum((n - 1) * s for n, s in zip(look.shape, look.stride, strict=True))
    memory = np.arange(last + 1)
    return np.lib.stride_tricks.as_strided(
        memory[look.offset :], look.shape, [step * memory.itemsize for step in look.stride]
    )


@st.composite
def dense(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    return tensor(shape, in_order(shape, order))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Tensor, Place]:
    look = draw(dense())
    dims = draw(st.lists(st.sampled_from(range(len(look.shape))), min_size=1, unique=True))
    return look, tuple((dim, look.shape[dim]) for dim in dims)


@given(st.lists(st.integers(1, 7), max_size=3), st.integers(1, 20))
def test_slices_follow_one_another_and_are_as_many_as_asked_for(parts: list[int], count: int) -> None:
    found = ranges(parts, count)
    assert found[0][0] == 0
    assert found[-1][1] == math.prod(parts)
    assert all(one[1] == other[0] for one, other in pairwise(found))
    lengths = [stop - start for start, stop in found]
    assert min(lengths) > 0
    assert len(found) >= min(count, math.prod(parts))


@settings(max_examples=examples(100))
@given(placed(), st.integers(1, 6))
def test_a_narrowed_tensor_shows_the_rows_of_the_sliced_dimension(
    found: tuple[Tensor, Place], count: int
) -> None:
    look, place = found
    parts = parts_of([place])
    assert parts is not None
    dims = [dim for dim, _ in place]
    rows = np.moveaxis(addresses(look), dims, range(len(dims))).reshape(extent(place), -1)
    for start, stop in ranges(parts, count):
        part = addresses(narrowed(look, place, (start, stop)))
        mine = np.moveaxis(part, dims, range(len(dims))).reshape(stop - start, -1)
        assert np.array_equal(mine, rows[start:stop])


@settings(max_examples=examples(200))
@given(placed(), st.data(), st.integers(2, 4))
def test_another_look_at_the_axis_shows_the_same_memory(
    found: tuple[Tensor, Place], data: st.DataObject, count: int
) -> None:
    look, place = found
    axis = axis_of(look, place)
    other = data.draw(other_looks(look))
    there = place_in(other, axis)
    if there is None:
        return
    parts = parts_of([place, there])
    if parts is None:
        return
    for each in ranges(parts, count):
        one, two = addresses(narrowed(look, place, each)), addresses(narrowed(other, there, each))
        assert np.array_equal(np.sort(one, axis=None), np.sort(two, axis=None))


@st.composite
def other_looks(draw: st.DrawFn, look: Tensor) -> Tensor:
    """The same elements: dimensions in another order, then flattened or split where that is a view."""
    order = draw(st.permutations(range(len(look.shape))))
    shape, stride = (tuple(each[dim] for dim in order) for each in (look.shape, look.stride))
    size = math.prod(shape)
    first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    to = draw(st.sampled_from([shape, (first, size // first), (size,)]))
    steps = viewed(shape, stride, to)
    return tensor(shape, stride) if steps is None else tensor(to, steps)


@st.composite
def any_looks(draw: st.DrawFn, size: int) -> Tensor:
    """Any look at so many elements."""
    offset = draw(st.integers(0, size - 1))
    shape, stride, left = [], [], size - 1 - offset
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.integers(0, max(left, 0)))
        count = draw(st.integers(1, 1 + (left // step if step else 3)))
        left -= step * (count - 1)
        shape.append(count)
        stride.append(step)
    return tensor(tuple(shape), tuple(stride), offset)


@settings(max_examples=examples(400))
@given(placed(), st.data(), st.integers(2, 4))
def test_a_look_at_a_slice_of_its_own_shows_the_elements_of_the_whole(
    found: tuple[Tensor, Place], data: st.DataObject, count: int
) -> None:
    whole, place = found
    parts = parts_of([place])
    assert parts is not None
    part = narrowed(whole, place, data.draw(st.sampled_from(ranges(parts, count))))
    compact = Compact(whole, part)
    memory = np.zeros(math.prod(part.shape), dtype=np.int64)
    memory[addresses(tensor(compact.shape, compact.stride)).ravel()] = addresses(part).ravel()
    own = compact.look(part)
    assert own is not None
    assert np.array_equal(memory[addresses(own)], addresses(part))
    other = data.draw(any_looks(math.prod(whole.shape)))
    moved = compact.look(other)
    if moved is not None:
        assert np.array_equal(memory[addresses(moved)], addresses(other))
    else:
        assert not is_a_view(addresses(other), memory)


def is_a_view(wanted: Array, memory: Array) -> bool:
    """Whether there is a tensor of these elements in a memory where they may lie elsewhere."""
    if not np.isin(wanted, memory).all():
        return False
    order = np.argsort(memory)
    at = order[np.searchsorted(memory, wanted, sorter=order)]
    steps = [
        int(np.take(at, 1, axis=dim).flat[0] - at.flat[0]) if n > 1 else 0 for dim, n in enumerate(at.shape)
    ]
    expected = at.flat[0] + sum(
        (step * index for step, index in zip(steps, np.indices(at.shape), strict=True)), np.zeros_like(at)
    )
    return np.array_equal(at, expected)
