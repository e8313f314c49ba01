"""The caching allocator: PyTorch's rules on hand-drawn requests, and whole steps replayed through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.ir.cuda_allocator import CachingAllocator, Reserve, cached
from lowtide.ir.graph import Graph, Role
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import CUDA, simulate
from tests.helpers.handmade import Drawing, chain, graphs, steps

MIB = 1 << 20


def held_and_reserved(*requests: int) -> tuple[int, int]:
    allocator = CachingAllocator()
    for request in requests:
        allocator.allocate(request)
    return allocator.allocated_bytes, allocator.reserved_bytes


# Rounding and segments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "held", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),  # one byte too many for the small segments
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded first: from 10 MiB on, a segment of its own
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # more than 1 MiB would be left: split
        (11 * MIB - 511, 12 * MIB, 12 * MIB),  # exactly 1 MiB would be left: handed out whole
        (12 * MIB - 1, 12 * MIB, 12 * MIB),
        (12 * MIB, 12 * MIB, 12 * MIB),
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ],
)
def test_one_request_holds_and_reserves(request_bytes: int, held: int, reserved: int) -> None:
    assert held_and_reserved(request_bytes) == (held, reserved)


@pytest.mark.parametrize(
    ("requests", "held", "reserved"),
    [
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),  # the first small segment is full
        ([MIB, MIB - 512, 1], 2 * MIB, 2 * MIB),  # in small segments 512 B are worth splitting off
        ([2 * MIB] * 10, 20 * MIB, 20 * MIB),
        ([2 * MIB] * 11, 22 * MIB, 40 * MIB),
        ([9 * MIB, 9 * MIB, 1], 18 * MIB + 512, 22 * MIB),  # a small one never comes out of a large segment
        (
            [9 * MIB, 9 * MIB, MIB + 512],
            20 * MIB,
            20 * MIB,
        ),  # 2 MiB are left, less than 1 MiB over: all of it
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB, 20 * MIB),
        ([9 * MIB, 11 * MIB], 20 * MIB, 20 * MIB),  # what is left over serves requests of any large size
        ([9 * MIB, 10 * MIB], 20 * MIB, 20 * MIB),
        ([9 * MIB, 10 * MIB - 512], 19 * MIB - 512, 20 * MIB),
        ([1, 5 * MIB], 5 * MIB + 512, 22 * MIB),  # nor a large one out of a small segment
    ],
)
def test_several_requests_hold_and_reserve(requests: Sequence[int], held: int, reserved: int) -> None:
    assert held_and_reserved(*requests) == (held, reserved)


# Freeing, joining, choosing -------------------------------------------------------------------------


def free_sizes(allocator: CachingAllocator) -> dict[bool, list[int]]:
    """Sizes of the free blocks, small pool and large pool, smallest first."""
    return {small: [block.size for block in pool] for small, pool in allocator._pools.items()}


def test_what_is_freed_stays_reserved_and_serves_the_next_request() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(30 * MIB)
    allocator.release(block)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 30 * MIB)
    again = allocator.allocate(30 * MIB)
    assert (again.address, again.size) == (block.address, 30 * MIB)
    assert allocator.reserved_bytes == 30 * MIB
    assert allocator.peak_allocated_bytes == 30 * MIB


def test_a_cached_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    for request, held in ((29 * MIB, 30 * MIB), (29 * MIB - 512, 29 * MIB - 512), (29 * MIB + 512, 30 * MIB)):
        allocator = CachingAllocator()
        allocator.release(allocator.allocate(30 * MIB))
        allocator.allocate(request)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (held, 30 * MIB)


def test_the_smallest_block_that_is_large_enough_is_taken_and_of_equals_the_lowest() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 20, 30, 20)]
    for block in blocks:
        allocator.release(block)
    assert free_sizes(allocator)[False] == [20 * MIB, 20 * MIB, 30 * MIB, 40 * MIB]
    chosen = [allocator.allocate(size * MIB) for size in (20, 21, 20)]
    assert [block.address for block in chosen] == [blocks[1].address, blocks[2].address, blocks[3].address]
    assert [block.size for block in chosen] == [20 * MIB, 21 * MIB, 20 * MIB]
    assert free_sizes(allocator)[False] == [9 * MIB, 40 * MIB]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1]])
def test_free_neighbours_are_joined_in_whatever_order_they_are_freed(order: list[int]) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(3)]
    for number in order:
        allocator.release(blocks[number])
    assert free_sizes(allocator) == {True: [], False: [20 * MIB]}
    assert allocator.allocate(20 * MIB).address == blocks[0].address
    assert allocator.reserved_bytes == 20 * MIB


def test_blocks_are_not_joined_across_one_that_is_held() -> None:
    allocator = CachingAllocator()
    first, middle, last, rest = (allocator.allocate(5 * MIB) for _ in range(4))
    allocator.release(first)
    allocator.release(last)
    assert free_sizes(allocator)[False] == [5 * MIB, 5 * MIB]
    allocator.release(middle)
    assert free_sizes(allocator)[False] == [15 * MIB]
    assert allocator.allocated_bytes == rest.size == 5 * MIB


def test_segments_are_not_joined_with_each_other() -> None:
    allocator = CachingAllocator()
    for block in [allocator.allocate(MIB) for _ in range(4)]:
        allocator.release(block)
    assert free_sizes(allocator) == {True: [2 * MIB, 2 * MIB], False: []}


def test_a_hole_that_is_too_small_is_of_no_use() -> None:
    """Three of 6 MiB, the middle one freed: 7 MiB do not fit, though 8 MiB of 20 are free."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    allocator.release(blocks[1])
    allocator.allocate(7 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (19 * MIB, 40 * MIB)


# Any requests, against a plain model ----------------------------------------------------------------


class Plain:
    """The same rules with nothing but lists: segments of [size, owner] cells, searched from the front."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[Any]]]] = []

    def allocate(self, request: int, owner: int) -> None:
        size = max(1, -(-request // 512)) * 512
        small = size <= MIB
        free = [
            (cell[0], number, place)
            for number, (kind, cells) in enumerate(self.segments)
            for place, cell in enumerate(cells)
            if kind is small and cell[1] is None and cell[0] >= size
        ]
        if not free:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((small, [[whole, None]]))
            free = [(whole, len(self.segments) - 1, 0)]
        found, number, place = min(free)
        cells = self.segments[number][1]
        over = found - size
        if (over >= 512) if small else (over > MIB):
            cells[place : place + 1] = [[size, owner], [over, None]]
        else:
            cells[place][1] = owner

    def release(self, owner: int) -> None:
        for _, cells in self.segments:
            for cell in cells:
                if cell[1] == owner:
                    cell[1] = None
            for place in range(len(cells) - 1, 0, -1):
                if cells[place][1] is None and cells[place - 1][1] is None:
                    cells[place - 1][0] += cells.pop(place)[0]

    def bytes(self, *, held: bool) -> int:
        return sum(
            size for _, cells in self.segments for size, owner in cells if owner is not None or not held
        )


REQUESTS = st.one_of(
    st.integers(1, 3 * MIB),
    st.integers(1, 40).map(lambda half: half * MIB // 2),
    st.integers(1, 30).map(lambda whole: whole * MIB + 512),
    st.integers(2, 30).map(lambda whole: whole * MIB - 512),
    st.integers(1, 8).map(lambda grains: grains * 512),
)


@given(st.lists(st.tuples(REQUESTS, st.one_of(st.none(), st.integers(0, 30))), max_size=40))
def test_any_requests_are_served_by_the_rules(script: list[tuple[int, int | None]]) -> None:
    """Each entry allocates, or frees one of the blocks that are held."""
    allocator, plain = CachingAllocator(), Plain()
    live: dict[int, tuple[int, Any]] = {}
    most = 0
    for turn, (request, victim) in enumerate(script):
        if victim is not None and live:
            owner = sorted(live)[victim % len(live)]
            allocator.release(live.pop(owner)[1])
            plain.release(owner)
        else:
            live[turn] = request, allocator.allocate(request)
            plain.allocate(request, turn)
        most = max(most, allocator.allocated_bytes)
        assert allocator.allocated_bytes == plain.bytes(held=True) == sum(b.size for _, b in live.values())
        assert allocator.reserved_bytes == plain.bytes(held=False)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert all(block.size >= asked for asked, block in live.values())
        spans = sorted((block.address, block.address + block.size) for _, block in live.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert allocator.peak_allocated_bytes == most
    for _, block in live.values():
        allocator.release(block)
    whole = free_sizes(allocator)
    assert allocator.allocated_bytes == 0
    assert sorted(whole[True] + whole[False]) == sorted(
        sum(c[0] for c in cells) for _, cells in plain.segments
    )


# Whole steps ----------------------------------------------------------------------------------------


def test_a_chain_of_small_values_is_rounded_and_fits_one_segment() -> None:
    graph = chain("cuda:0")
    # at relu_'s backward: weight 512, image 512, hidden 1024, loss 512, hidden.grad 1024, conv.grad 1024
    assert cached(graph, straight(graph)) == Reserve(4608, 2 * MIB)


def test_workspaces_are_held_beside_the_outputs_while_the_op_runs_and_not_after() -> None:
    drawing = Drawing("cuda:0")
    x, y, z = (drawing.value(name, 12 * MIB) for name in "xyz")
    drawing.op("aten.one.default", [x], [y], workspace=20 * MIB)
    drawing.op("aten.two.default", [x], [z], workspace=30 * MIB)
    graph = drawing.graph(outputs=[z])
    # z comes out of the 20 MiB that the first workspace left; the second needs a new segment
    assert cached(graph, steps(0, 1, f"f{y}")) == Reserve(
        (12 + 12 + 12 + 30) * MIB, (12 + 12 + 20 + 30) * MIB
    )
    # if y is freed before, its 12 MiB are the better fit
    assert cached(graph, steps(0, f"f{y}", 1)) == Reserve((12 + 12 + 30) * MIB, (12 + 12 + 20 + 30) * MIB)


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_a_value_that_outlives_the_step_is_given_back_before_the_next(count: int) -> None:
    drawing = Drawing("cuda:0")
    x, kept = drawing.value("x", 10 * MIB, Role.BATCH), drawing.value("kept", 11 * MIB)
    drawing.op("aten.one.default", [x], [kept])
    graph = drawing.graph(outputs=[kept])
    assert cached(graph, steps(0), steps=count) == Reserve((10 + 12) * MIB, (10 + 12) * MIB)


def test_a_resident_value_that_the_step_frees_is_there_again_for_the_next() -> None:
    drawing = Drawing("cuda:0")
    old, new = drawing.value("grad", 40 * MIB, Role.GRADIENT), drawing.value("new grad", 40 * MIB)
    x = drawing.value("x", 2 * MIB, Role.BATCH)
    drawing.op("aten.one.default", [x], [new])
    graph = drawing.graph(outputs=[new])
    # the new gradient takes the place of the old one: 40 MiB once, whichever step it is
    for count in (1, 2, 5):
        assert cached(graph, steps(f"f{old}", 0), steps=count) == Reserve(42 * MIB, 60 * MIB)
    assert cached(graph, steps(0), steps=2) == Reserve(82 * MIB, 100 * MIB)


def test_the_figures_are_those_of_the_last_step() -> None:
    drawing = Drawing("cuda:0")
    moving, staying = drawing.value("moving", 23 * MIB // 2), drawing.value("staying", 17 * MIB // 2)
    made = drawing.value("made", 0)
    drawing.op("aten.one.default", [staying], [made])
    graph = drawing.graph()
    schedule = steps(f"f{moving}", 0)
    # At first `moving` lies in a segment of its own, 12 MiB; later in the 11.5 that `staying` leaves of 20.
    assert cached(graph, schedule, steps=1) == Reserve(41 * MIB // 2, 32 * MIB)
    assert cached(graph, schedule) == Reserve(20 * MIB, 32 * MIB) == cached(graph, schedule, steps=3)


def test_what_is_elsewhere_or_empty_takes_nothing() -> None:
    drawing = Drawing("cuda:0")
    host = drawing.value("host", 50 * MIB, Role.BATCH, device="cpu")
    nothing = drawing.value("nothing", 0)
    made = drawing.value("made", 60 * MIB, device="cpu")
    drawing.op("aten.one.default", [host], [nothing, made])
    graph = drawing.graph()
    assert cached(graph, steps(0, f"f{nothing}", f"f{made}", f"f{host}")) == Reserve(0, 0)


@given(graphs(), st.integers(1, 3))
def test_small_values_are_allocated_as_the_referee_counts_them(graph: Graph, count: int) -> None:
    rounded = replace(
        graph, ops=tuple(replace(op, workspace_bytes=CUDA.held(op.workspace_bytes)) for op in graph.ops)
    )
    schedule = straight(graph)
    found = cached(graph, schedule, steps=count)
    assert found.allocated_bytes == simulate(rounded, schedule, CUDA).peak_bytes
    assert found.reserved_bytes in (0, 2 * MIB)
