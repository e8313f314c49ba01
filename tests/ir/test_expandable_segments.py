"""Expandable segments and caps: PyTorch's rules on hand-drawn requests, and against a judge of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.ir.cuda_allocator import CachingAllocator, OutOfReserve, Reserve, cached
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, steps

MIB = 1 << 20


def growing() -> CachingAllocator:
    return CachingAllocator(expandable=True)


def limited(limit: str, count: int, expandable: bool = False) -> CachingAllocator:
    """One that is allowed so much, or whose device has no more."""
    if limit == "allowed":
        return CachingAllocator(expandable=expandable, allowed_bytes=count)
    return CachingAllocator(expandable=expandable, device_bytes=count)


# Pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "held", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([MIB], MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),  # one more page of the small stretch
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([19 * MIB], 19 * MIB, 20 * MIB),  # not handed out whole: nothing is
        ([20 * MIB], 20 * MIB, 20 * MIB),
        ([20 * MIB + 1], 20 * MIB + 512, 40 * MIB),
        ([30 * MIB, 10 * MIB], 40 * MIB, 40 * MIB),  # the second lies where the first's pages end
        ([30 * MIB, 30 * MIB], 60 * MIB, 60 * MIB),  # 10 MiB are there; one page of 20 is what is missing
        ([30 * MIB, 30 * MIB + 512], 60 * MIB + 512, 80 * MIB),
        ([1, 30 * MIB], 30 * MIB + 512, 42 * MIB),  # small requests have a stretch of their own
    ],
)
def test_only_pages_that_are_missing_are_mapped(requests: Sequence[int], held: int, reserved: int) -> None:
    allocator = growing()
    for request in requests:
        allocator.allocate(request)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (held, reserved)


def test_what_is_freed_stays_mapped_and_is_split_to_the_grain() -> None:
    allocator = growing()
    block = allocator.allocate(40 * MIB)
    allocator.release(block)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 40 * MIB)
    assert allocator.allocate(40 * MIB - 512).size == 40 * MIB - 512
    assert allocator.reserved_bytes == 40 * MIB


def test_a_hole_is_taken_before_what_can_still_grow_though_it_is_larger() -> None:
    allocator = growing()
    hole, wall, rest = (allocator.allocate(size * MIB) for size in (30, 5, 5))
    allocator.release(hole)
    allocator.release(rest)  # 5 MiB at the end: the better fit, were it not for what can follow
    assert allocator.allocate(4 * MIB).address == hole.address
    assert allocator.allocate(28 * MIB).address == rest.address  # 26 MiB of hole are not enough
    assert allocator.reserved_bytes == (40 + 40) * MIB
    assert wall.size == 5 * MIB


def test_the_end_grows_by_what_it_lacks() -> None:
    allocator = growing()
    allocator.allocate(19 * MIB)
    allocator.allocate(21 * MIB)  # one MiB is there, 20 are missing: exactly a page
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_pages_in_which_nothing_lies_are_given_back_when_asked() -> None:
    allocator = growing()
    first, second, third = (allocator.allocate(30 * MIB) for _ in range(3))  # 0-30, 30-60, 60-90 of 100
    small = allocator.allocate(1)
    allocator.release(second)
    allocator.empty_cache()  # the page 40-60 alone; and none behind 90, where a block begins
    assert allocator.reserved_bytes == (100 - 20 + 2) * MIB
    allocator.release(small)
    allocator.release(third)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    allocator.release(first)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_a_gap_is_filled_before_the_end_grows() -> None:
    allocator = growing()
    first, second, third = (allocator.allocate(40 * MIB) for _ in range(3))
    allocator.release(second)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 80 * MIB
    assert allocator.allocate(10 * MIB).address == second.address  # the lowest address with room
    assert allocator.reserved_bytes == 100 * MIB
    assert allocator.allocate(35 * MIB).address == third.address + 40 * MIB  # 30 MiB are left of the gap
    assert allocator.reserved_bytes == 140 * MIB
    assert allocator.allocate(30 * MIB).address == second.address + 10 * MIB
    assert allocator.reserved_bytes == 160 * MIB
    assert first.size == 40 * MIB


def test_segments_that_are_there_when_it_is_switched_on_stay_and_serve() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MIB))
    allocator.expandable = True
    assert allocator.allocate(29 * MIB + 512).size == 29 * MIB + 512  # of a segment, and yet split
    assert allocator.reserved_bytes == 30 * MIB
    grown = allocator.allocate(15 * MIB)
    assert allocator.reserved_bytes == 50 * MIB
    allocator.release(grown)
    allocator.expandable = False
    allocator.allocate(15 * MIB)  # what can grow is left alone once it is off
    assert allocator.reserved_bytes == 66 * MIB


# Caps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["allowed", "device"])
def test_at_the_cap_what_is_cached_is_given_back_and_it_is_tried_again(limit: str) -> None:
    allocator = limited(limit, 100 * MIB)
    kept, gone = allocator.allocate(30 * MIB), allocator.allocate(40 * MIB)
    allocator.release(gone)
    allocator.allocate(70 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (100 * MIB, 100 * MIB)
    assert allocator.peak_reserved_bytes == 100 * MIB
    assert kept.size == 30 * MIB


@pytest.mark.parametrize("limit", ["allowed", "device"])
def test_a_segment_in_which_something_lies_is_not_given_back(limit: str) -> None:
    allocator = limited(limit, 100 * MIB)
    first, _second = allocator.allocate(9 * MIB), allocator.allocate(9 * MIB)  # one segment of 20
    allocator.release(first)
    allocator.allocate(60 * MIB)
    with pytest.raises(OutOfReserve) as refused:
        allocator.allocate(20 * MIB + 1)
    assert refused.value.requested_bytes == 20 * MIB + 512
    assert refused.value.reserved_bytes == 80 * MIB
    assert refused.value.missing_bytes == 2 * MIB  # 80 and 22 for a segment of its own


def test_an_allowance_asks_for_a_whole_segment_where_the_device_gives_pages() -> None:
    for limit, fits in (("allowed", False), ("device", True)):
        allocator = limited(limit, 60 * MIB, expandable=True)
        allocator.allocate(30 * MIB)  # of 40
        allocator.allocate(5 * MIB)
        if fits:
            allocator.allocate(25 * MIB)  # 5 MiB are there, a page is missing
            assert allocator.reserved_bytes == 60 * MIB
        else:
            with pytest.raises(OutOfReserve):
                allocator.allocate(25 * MIB)  # 40 + 26 are more than 60


def test_an_allowance_may_be_passed_by_less_than_a_page() -> None:
    allocator = limited("allowed", 50 * MIB, expandable=True)
    allocator.allocate(20 * MIB)
    allocator.allocate(22 * MIB)  # 20 + 22 are allowed; two pages are mapped
    assert allocator.reserved_bytes == 60 * MIB


def test_what_was_mapped_in_vain_stays() -> None:
    allocator = limited("device", 120 * MIB, expandable=True)
    first, second, third = (allocator.allocate(40 * MIB) for _ in range(3))
    allocator.release(second)
    allocator.empty_cache()
    with pytest.raises(OutOfReserve):
        allocator.allocate(60 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    assert (first.size, third.size) == (40 * MIB, 40 * MIB)


# Any requests, against a judge that keeps no blocks -------------------------------------------------------


class Judge:
    """One stretch of addresses: which pages have memory, and which bytes are whose. No lists to keep up."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.pages: set[int] = set()
        self.live: dict[int, tuple[int, int]] = {}

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """Begin and end of every stretch of free bytes that have memory."""
        edges = {edge for span in self.live.values() for edge in span}
        edges |= {edge * self.page for page in self.pages for edge in (page, page + 1)}
        cells = pairwise(sorted(edges))
        for free, run in groupby(cells, lambda cell: self.is_free(cell) and self.is_mapped(cell)):
            spans = list(run)
            if free:
                yield spans[0][0], spans[-1][1]

    def is_free(self, cell: tuple[int, int]) -> bool:
        return not any(begin <= cell[0] < end for begin, end in self.live.values())

    def is_mapped(self, cell: tuple[int, int]) -> bool:
        return cell[0] // self.page in self.pages

    def grows(self, end: int) -> float:
        """How many bytes without memory follow on an address."""
        if end % self.page or end // self.page in self.pages:
            return 0
        later = [page * self.page - end for page in self.pages if page * self.page > end]
        return min(later, default=float("inf"))

    def allocate(self, size: int, owner: int) -> None:
        fits = sorted((end - begin, begin, end) for begin, end in self.free_runs() if end - begin >= size)
        ranked = [(width + self.grows(end), begin) for width, begin, end in fits]
        place = 0
        while place + 1 < len(ranked) and ranked[place + 1][0] < ranked[place][0]:
            place += 1
        begin = ranked[place][1] if ranked else self.lowest(size)
        missing = range(begin // self.page, -(-(begin + size) // self.page))
        self.pages.update(missing)
        self.live[owner] = begin, begin + size

    def lowest(self, size: int) -> int:
        """The lowest address where a request has room, if it begins or ends in pages without memory."""
        starts = {end for _, end in self.live.values()} | {0}
        starts |= {begin for begin, _ in self.free_runs()}
        starts |= {(page + 1) * self.page for page in self.pages}
        for start in sorted(starts):
            inside = any(begin < start + size and start < end for begin, end in self.live.values())
            if not inside and any(
                page not in self.pages for page in range(start // self.page, -(-(start + size) // self.page))
            ):
                return start
        raise AssertionError("there is always room at the end")

    def empty_cache(self) -> None:
        spans = self.live.values()
        self.pages = {
            page
            for page in self.pages
            if any(begin < (page + 1) * self.page and page * self.page < end for begin, end in spans)
        }


LARGE = st.one_of(
    st.integers(MIB + 1, 60 * MIB),
    st.integers(1, 8).map(lambda pages: pages * 20 * MIB),
    st.integers(1, 8).map(lambda pages: pages * 20 * MIB + 512),
    st.integers(2, 30).map(lambda whole: whole * MIB),
)
SMALL = st.one_of(st.integers(1, MIB), st.integers(1, 4).map(lambda part: part * MIB // 4))
TURN = st.tuples(st.sampled_from(["take", "take", "take", "free", "free", "empty"]), st.integers(0, 30))


@given(st.lists(st.tuples(TURN, st.tuples(LARGE, SMALL)), max_size=30), st.booleans())
def test_any_requests_are_served_by_the_rules(
    script: list[tuple[tuple[str, int], tuple[int, int]]], small: bool
) -> None:
    allocator, judge = growing(), Judge(2 * MIB if small else 20 * MIB)
    live: dict[int, Any] = {}
    base = 0
    for turn, ((action, victim), requests) in enumerate(script):
        if action == "take":
            request = requests[small]
            live[turn] = allocator.allocate(request)
            if len(judge.pages) == 0 and not judge.live:
                base = live[turn].address
            judge.allocate(-(-request // 512) * 512, turn)
        elif action == "free" and live:
            owner = sorted(live)[victim % len(live)]
            allocator.release(live.pop(owner))
            del judge.live[owner]
        elif action == "empty":
            allocator.empty_cache()
            judge.empty_cache()
        spans = {
            owner: (held.address - base, held.address - base + held.size) for owner, held in live.items()
        }
        assert spans == judge.live
        assert allocator.reserved_bytes == len(judge.pages) * judge.page


@given(
    st.lists(st.tuples(TURN, st.one_of(LARGE, SMALL)), max_size=examples(40)),
    st.booleans(),
    st.sampled_from(["allowed", "device"]),
)
def test_a_cap_is_kept_and_nothing_overlaps(
    script: list[tuple[tuple[str, int], int]], expandable: bool, limit: str
) -> None:
    cap = 200 * MIB
    allocator = limited(limit, cap, expandable)
    live: dict[int, Any] = {}
    for turn, ((action, victim), request) in enumerate(script):
        if action == "take":
            with suppress(OutOfReserve):
                live[turn] = allocator.allocate(request)
        elif action == "free" and live:
            allocator.release(live.pop(sorted(live)[victim % len(live)]))
        elif action == "empty":
            allocator.empty_cache()
        spans = sorted((block.address, block.address + block.size) for block in live.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size for block in live.values())
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert allocator.reserved_bytes % (2 * MIB) == 0
        passed = 20 * MIB if expandable and limit == "allowed" else 0
        assert allocator.peak_reserved_bytes <= cap + passed
    for block in live.values():
        allocator.release(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


# Whole steps ----------------------------------------------------------------------------------------


def test_a_step_reserves_what_it_holds_up_to_the_next_page() -> None:
    drawing = Drawing("cuda:0")
    x, y, z = (drawing.value(name, 12 * MIB) for name in "xyz")
    drawing.op("aten.one.default", [x], [y], workspace=20 * MIB)
    drawing.op("aten.two.default", [x], [z], workspace=30 * MIB)
    graph = drawing.graph(outputs=[z])
    assert cached(graph, steps(0, 1, f"f{y}"), expandable=True) == Reserve(
        (12 + 12 + 12 + 30) * MIB, 80 * MIB
    )
