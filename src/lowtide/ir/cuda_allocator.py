"""What PyTorch's CUDA caching allocator holds and reserves for a schedule.

The caching allocator takes segments from the device, splits them into blocks, and keeps what is freed.
A block that is a little too large is handed out whole, so a little more is allocated than was asked for;
and what lies between blocks is reserved but of no use. This replays its rules: sizes are rounded to
512 B; up to 1 MiB comes from 2 MiB segments, less than 10 MiB from 20 MiB segments, more from a segment
of its own, rounded to 2 MiB; the smallest free block that is large enough is taken, and split if more
than 1 MiB (512 B in small segments) would be left over; neighbours that are free are joined.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule
from lowtide.ir.walk import walk

_MIB = 1 << 20
_GRAIN = 512
_SMALL = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_SEGMENT_GRAIN = 2 * _MIB


@dataclass(frozen=True, slots=True)
class Reserve:
    """The most the allocator hands out at once, and the most it takes from the device."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(eq=False, slots=True)
class _CachedBlock:
    address: int
    size: int
    small: bool
    free: bool = True
    before: _CachedBlock | None = None
    after: _CachedBlock | None = None

    @property
    def rank(self) -> tuple[int, int]:
        return self.size, self.address


class CachingAllocator:
    """One device, one stream, unlimited memory."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self._pools: dict[bool, list[_CachedBlock]] = {True: [], False: []}

    def allocate(self, requested_bytes: int) -> _CachedBlock:
        """A block of at least `requested_bytes`, from the cache or from a new segment."""
        size = max(_GRAIN, _up(requested_bytes, _GRAIN))
        small = size <= _SMALL
        block = self._from_cache(size, small) or self._from_device(size, small)
        spare = block.size - size
        if (spare >= _GRAIN) if small else (spare > _SMALL):
            self._split(block, size)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: _CachedBlock) -> None:
        """Back into the cache, joined with its free neighbours."""
        self.allocated_bytes -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                block = _joined(*sorted((block, neighbour), key=lambda one: one.address))
        bisect.insort(self._pools[block.small], block, key=lambda one: one.rank)

    def _from_cache(self, size: int, small: bool) -> _CachedBlock | None:
        pool = self._pools[small]
        position = bisect.bisect_left(pool, (size, 0), key=lambda one: one.rank)
        return pool.pop(position) if position < len(pool) else None

    def _from_device(self, size: int, small: bool) -> _CachedBlock:
        segment = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _LARGE else _up(size, _SEGMENT_GRAIN)
        # Addresses only break ties; segments are taken to follow each other with a gap.
        block = _CachedBlock(self.reserved_bytes * 2, segment, small)
        self.reserved_bytes += segment
        return block

    def _split(self, block: _CachedBlock, size: int) -> None:
        rest = _CachedBlock(block.address + size, block.size - size, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        bisect.insort(self._pools[block.small], rest, key=lambda one: one.rank)

    def _take(self, block: _CachedBlock) -> None:
        pool = self._pools[block.small]
        del pool[bisect.bisect_left(pool, block.rank, key=lambda one: one.rank)]


def cached(graph: Graph, schedule: Schedule, steps: int = 3) -> Reserve:
    """Replay `schedule` through the caching allocator, `steps` times in a row as in training.

    The first step warms the cache; the figures are those of the last. Values that outlive the step are
    given back between steps (gradients set to None). Workspaces are taken after the op's outputs.
    """
    allocator = CachingAllocator()
    resident = {value: _allocated(allocator, graph.counted_bytes(value)) for value in graph.resident}
    for _ in range(steps):
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        held = dict(resident)
        for event in walk(graph, schedule):
            for value in event.born:
                held[value] = _allocated(allocator, graph.counted_bytes(value))
            if event.op is not None and event.op.workspace_bytes > 0:
                allocator.release(allocator.allocate(event.op.workspace_bytes))
            for value in event.died:
                if (block := held.pop(value)) is not None:
                    allocator.release(block)
        for value, block in held.items():
            if block is not None and value not in resident:
                allocator.release(block)
        resident = {
            value: held[value] if value in held else _allocated(allocator, graph.counted_bytes(value))
            for value in resident
        }
    return Reserve(allocator.peak_allocated_bytes, allocator.reserved_bytes)


def _allocated(allocator: CachingAllocator, size: int) -> _CachedBlock | None:
    return allocator.allocate(size) if size else None


def _joined(first: _CachedBlock, second: _CachedBlock) -> _CachedBlock:
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


def _up(size: int, grain: int) -> int:
    return -(-size // grain) * grain
