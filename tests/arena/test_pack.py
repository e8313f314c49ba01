"""Packing: every method against what overlaps, the exact one against all orders there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.arena.buffers import Buffer, buffers_of, largest_live_bytes
from lowtide.arena.in_place import take_overs
from lowtide.arena.pack import METHODS, pack
from lowtide.arena.pack.exact import smallest
from lowtide.arena.pack.ordered import Spans, placed_in_order
from lowtide.arena.tags import share
from lowtide.errors import BadRequest, UnknownMethod
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule, straight
from tests.helpers.effort import examples
from tests.helpers.layouts import stepped


def made(*rows: tuple[int, int, int]) -> tuple[Buffer, ...]:
    """Buffers by bytes, first and stop."""
    return tuple(Buffer(number, *row, ()) for number, row in enumerate(rows))


rows = st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(1, 5))
anything = st.lists(rows, max_size=30).map(
    lambda found: made(*((size, first, first + length) for size, first, length in found))
)


def assert_apart(buffers: Sequence[Buffer], offsets: Sequence[int], arena_bytes: int) -> None:
    """No two that are needed at a common step share a byte, and the arena ends where the highest does."""
    for one, other in combinations(buffers, 2):
        together = one.first < other.stop and other.first < one.stop
        low, high = offsets[one.id], offsets[other.id]
        assert not together or low + one.bytes <= high or high + other.bytes <= low
    assert all(offset >= 0 for offset in offsets)
    assert arena_bytes == max((offsets[b.id] + b.bytes for b in buffers), default=0)


# Lower than 5 there is no place for these, though never more than 4 is live: the halves do not fit.
AWKWARD = made(
    (2, 0, 3), (2, 0, 1), (1, 1, 5), (1, 1, 4), (1, 3, 5), (1, 3, 4), (2, 4, 7), (2, 5, 7)
)  # fmt: skip


# By hand --------------------------------------------------------------------------------------------


def test_the_largest_first_each_in_the_tightest_gap() -> None:
    buffers = made((10, 0, 9), (6, 0, 3), (8, 3, 6), (4, 0, 9), (3, 2, 4), (2, 4, 5))
    # 10 at 0; 8 and 6, never together, both above it; 4 above these; 3 and 2, never together, above that.
    assert pack(buffers, "by-size").offsets == (0, 10, 10, 18, 22, 22)


def test_a_gap_that_fits_better_is_taken_before_a_lower_one() -> None:
    spans = Spans.of(made((4, 0, 2), (1, 0, 9), (2, 0, 2), (1, 0, 9), (2, 3, 4)))
    # Stacked in order: 0-4, 4-5, 5-7, 7-8. At step 3 the gaps are 0-4 and 5-7, which is just wide enough.
    assert placed_in_order(spans, np.arange(5)).tolist() == [0, 4, 5, 7, 5]


def test_best_fit_goes_by_birth_as_an_allocator_does() -> None:
    buffers = made((4, 0, 2), (2, 1, 6), (3, 2, 6), (6, 3, 6))
    placement = pack(buffers, "best-fit")
    assert placement.offsets == (0, 4, 0, 6)
    assert placement.arena_bytes == 12
    assert not placement.proven
    assert pack(buffers, "auto").arena_bytes == 11


def test_apart_nothing_is_shared() -> None:
    placement = pack(made((10, 0, 2), (5, 1, 3), (40, 2, 4)), "apart")
    assert (placement.offsets, placement.arena_bytes, placement.proven) == ((0, 10, 15), 55, False)


def test_tags_lie_one_above_the_other_and_grow_before_they_are_placed() -> None:
    buffers = made((10, 0, 2), (5, 1, 3), (40, 2, 4), (3, 3, 5))
    # Tag 0: 10, taken again for 40. Tag 1: 5, taken again for 3.
    assert pack(buffers, "tags").offsets == (0, 40, 0, 40)
    assert pack(buffers, "tags").arena_bytes == 45
    # Of two that ask at once the larger is served first, from the box.
    assert pack(made((100, 0, 1), (40, 1, 3), (90, 1, 3)), "tags").offsets == (0, 100, 0)


def test_the_exact_method_proves_that_the_lower_bound_cannot_be_met() -> None:
    assert largest_live_bytes(AWKWARD) == 4
    placement = pack(AWKWARD, "exact")
    assert (placement.arena_bytes, placement.proven) == (5, True)
    assert_apart(AWKWARD, placement.offsets, 5)
    assert pack(AWKWARD, "auto") == placement.__class__("auto", placement.offsets, 5, True)
    spans = Spans.of(AWKWARD)
    cut_short = smallest(spans, np.cumsum(spans.sizes) - spans.sizes, 4, most_nodes=3)
    assert not cut_short.complete


@pytest.mark.parametrize("method", METHODS)
def test_nothing_needs_nothing(method: str) -> None:
    placement = pack((), method)
    assert (placement.offsets, placement.arena_bytes, placement.proven) == ((), 0, True)


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(anything, st.sampled_from(METHODS))
def test_buffers_that_are_needed_together_lie_apart(buffers: tuple[Buffer, ...], method: str) -> None:
    placement = pack(buffers, method)
    assert_apart(buffers, placement.offsets, placement.arena_bytes)
    assert placement.arena_bytes >= largest_live_bytes(buffers)
    assert pack(buffers, method) == placement


def smallest_of_all_orders(buffers: Sequence[Buffer]) -> int:
    """Press down in every order: one of them is the order of the best layout's offsets."""
    least = math.inf
    for order in permutations(buffers):
        heights = [0] * 12
        for buffer in order:
            top = max(heights[buffer.first : buffer.stop]) + buffer.bytes
            heights[buffer.first : buffer.stop] = [top] * (buffer.stop - buffer.first)
        least = min(least, max(heights))
    return int(least)


@settings(max_examples=examples(60))
@given(st.lists(rows, min_size=1, max_size=6))
def test_the_exact_method_is_as_good_as_the_best_of_all_orders(found: list[tuple[int, int, int]]) -> None:
    buffers = made(*((size, first, first + length) for size, first, length in found))
    spans = Spans.of(buffers)
    bad_start = np.cumsum(spans.sizes) - spans.sizes
    answer = smallest(spans, bad_start, largest_live_bytes(buffers))
    assert answer.complete
    assert_apart(buffers, answer.offsets.tolist(), spans.top(answer.offsets))
    assert spans.top(answer.offsets) == smallest_of_all_orders(buffers)
    assert pack(buffers, "exact").arena_bytes == spans.top(answer.offsets)


@settings(max_examples=examples(100))
@given(st.lists(rows, max_size=14))
def test_lower_bound_exact_and_the_others_come_in_this_order(found: list[tuple[int, int, int]]) -> None:
    buffers = made(*((size, first, first + length) for size, first, length in found))
    exact = pack(buffers, "exact")
    assert largest_live_bytes(buffers) <= exact.arena_bytes
    for method in METHODS:
        other = pack(buffers, method)
        assert not exact.proven or exact.arena_bytes <= other.arena_bytes
        assert not (exact.proven and other.proven) or exact.arena_bytes == other.arena_bytes
    assert pack(buffers, "auto").arena_bytes <= pack(buffers, "by-size").arena_bytes
    assert pack(buffers, "auto").arena_bytes <= pack(buffers, "best-fit").arena_bytes


@settings(max_examples=examples(100))
@given(stepped(max_again=0))
def test_tags_take_what_the_lectures_planner_takes(case: tuple[Graph, Schedule]) -> None:
    graph, _ = case
    schedule = straight(graph)
    buffers = buffers_of(graph, schedule, take_overs(graph, schedule))
    assert pack(buffers, "tags").arena_bytes == share(graph, schedule).total_bytes


def test_a_thousand_at_random_come_close_to_the_lower_bound() -> None:
    numbers = np.random.default_rng(0)
    sizes, firsts, lengths = numbers.integers(1, 100, 1000), numbers.integers(0, 1000, 1000), 60
    buffers = made(*((int(z), int(f), int(f) + 1 + int(n)) for z, f, n in zip(
        sizes, firsts, numbers.exponential(lengths, 1000), strict=True
    )))  # fmt: skip
    placement = pack(buffers)
    assert_apart(buffers, placement.offsets, placement.arena_bytes)
    assert placement.arena_bytes <= 1.05 * largest_live_bytes(buffers)


# Refusals -------------------------------------------------------------------------------------------


def test_an_unknown_method_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownMethod, match=r"no method called 'bysize'\. Did you mean by-size\?"):
        pack((), "bysize")


def test_too_many_buffers_for_the_exact_method_are_refused() -> None:
    many = made(*((1, 0, 1) for _ in range(201)))
    with pytest.raises(BadRequest, match=r"places at most 200 buffers, and there are 201\. Use auto"):
        pack(many, "exact")
