"""What PyTorch's CUDA caching allocator holds and reserves for a schedule.

The caching allocator takes segments from the device, splits them into blocks, and keeps what is freed.
A block that is a little too large is handed out whole, so a little more is allocated than was asked for;
and what lies between blocks is reserved but of no use. This replays its rules: sizes are rounded to
512 B; up to 1 MiB comes from 2 MiB segments, less than 10 MiB from 20 MiB segments, more from a segment
of its own, rounded to 2 MiB; the smallest free block that is large enough is taken, and split if more
than 1 MiB (512 B in small segments) would be left over; neighbours that are free are joined.

*Expandable segments* are one long stretch of addresses for small requests and one for large ones, in which
pages (2 MiB, 20 MiB) are backed by memory as they are needed: where a free block ends at pages that have no
memory yet, only those that it lacks are mapped. Every block is split down to 512 B, and a block that can
still grow counts as large as it can grow, so that others are taken first. What is freed stays mapped.

A *cap* is what the process is allowed (`set_per_process_memory_fraction`), or what the device has. Where a
request would pass it, everything that is cached goes back to the device (segments that are free as a whole,
pages in which nothing lies) and it is tried again; then it is out of memory. The allowance is compared with
what a request would take in a segment of its own, even where a few pages would do; the device gives page by
page.

The facts are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.11 to 2.13, for one device and one stream.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

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
_ADDRESSES = _LARGE_SEGMENT << 20  # of an expandable segment; PyTorch takes 9/8 of the device's memory


class OutOfReserve(Exception):
    """The device has no more, or no more is allowed, and nothing that is cached can be given back."""

    def __init__(self, requested_bytes: int, reserved_bytes: int, missing_bytes: int) -> None:
        super().__init__(requested_bytes, reserved_bytes, missing_bytes)
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes  # once everything that is cached was given back
        self.missing_bytes = missing_bytes  # for the request to have a segment of its own


@dataclass(frozen=True, slots=True)
class Reserve:
    """The most the allocator hands out at once, and the most it takes from the device."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A stretch of a segment that is held, or free as a whole."""

    address: int
    size: int
    small: bool
    expandable: bool = False
    free: bool = True
    mapped: bool = True  # whether there is memory behind its addresses
    before: CachedBlock | None = None
    after: CachedBlock | None = None

    @property
    def largest(self) -> int:
        """How large it can grow."""
        follower = self.after
        return self.size + (follower.size if follower is not None and not follower.mapped else 0)


@dataclass(eq=False, slots=True)
class _FreeBlocks:
    """The free blocks of one kind: those with memory by size, those without by address."""

    small: bool
    free: list[tuple[int, int, CachedBlock]] = field(default_factory=list)
    unmapped: list[tuple[int, CachedBlock]] = field(default_factory=list)

    @property
    def page(self) -> int:
        return _SMALL_SEGMENT if self.small else _LARGE_SEGMENT

    def __iter__(self) -> Iterator[CachedBlock]:
        return (block for _, _, block in self.free)

    def put(self, block: CachedBlock) -> None:
        if block.mapped:
            bisect.insort(self.free, (block.size, block.address, block))
        else:
            bisect.insort(self.unmapped, (block.address, block))

    def take(self, block: CachedBlock) -> None:
        if block.mapped:
            del self.free[bisect.bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """One device, one stream.

    With `expandable` segments can grow; it may be switched while blocks are held. The process is allowed to
    reserve `allowed_bytes`, and the device has `device_bytes`: no limits unless they are given.
    """

    def __init__(
        self, *, expandable: bool = False, allowed_bytes: int | None = None, device_bytes: int | None = None
    ) -> None:
        self.expandable = expandable
        self.allowed_bytes = allowed_bytes
        self.device_bytes = device_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._pools = {small: _FreeBlocks(small) for small in (True, False)}
        self._taken_bytes = 0  # in all segments that there ever were: where the next one lies
        self._stretches = 0

    def allocate(self, requested_bytes: int) -> CachedBlock:
        """A block of at least `requested_bytes`, from the cache or from the device.

        Raises:
            OutOfReserve: there is none, even after everything cached was given back.
        """
        size = max(_GRAIN, _up(requested_bytes, _GRAIN))
        pool = self._pools[size <= _SMALL]
        block = self._from_cache(pool, size) or self._from_device(pool, size) or self._after_all(pool, size)
        spare = block.size - size
        if (spare >= _GRAIN) if pool.small or self.expandable else (spare > _SMALL):
            pool.put(_cut(block, size))
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def release(self, block: CachedBlock) -> None:
        """Back into the cache, joined with its free neighbours."""
        self.allocated_bytes -= block.size
        block.free = True
        pool = self._pools[block.small]
        pool.put(self._joined(pool, block))

    def empty_cache(self) -> None:
        """Give back what is cached: free segments, and pages of expandable ones in which nothing lies."""
        for small in (False, True):
            pool = self._pools[small]
            for block in list(pool):
                if block.expandable:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved_bytes -= block.size

    def _from_cache(self, pool: _FreeBlocks, size: int) -> CachedBlock | None:
        free = pool.free
        place = bisect.bisect_left(free, (size,))
        if self.expandable:
            while place + 1 < len(free) and free[place][2].expandable:
                if free[place + 1][2].largest >= free[place][2].largest:
                    break
                place += 1
        else:
            while place < len(free) and free[place][2].expandable:
                place += 1
        return free.pop(place)[2] if place < len(free) else None

    def _from_device(self, pool: _FreeBlocks, size: int) -> CachedBlock | None:
        whole = _segment_bytes(size)
        if self.allowed_bytes is not None and self.reserved_bytes + whole > self.allowed_bytes:
            return None
        if self.expandable:
            return self._expanded(pool, size)
        if not self._reserves(whole):
            return None
        # Addresses only break ties; segments are taken to follow each other with a gap.
        block = CachedBlock(self._taken_bytes * 2, whole, pool.small)
        self._taken_bytes += whole
        return block

    def _after_all(self, pool: _FreeBlocks, size: int) -> CachedBlock:
        """What the device has once everything that is cached was given back."""
        self.empty_cache()
        block = self._from_device(pool, size)
        if block is None:
            limits = (limit for limit in (self.allowed_bytes, self.device_bytes) if limit is not None)
            missing_bytes = self.reserved_bytes + _segment_bytes(size) - min(limits)
            raise OutOfReserve(size, self.reserved_bytes, max(missing_bytes, _SEGMENT_GRAIN))
        return block

    def _reserves(self, more_bytes: int) -> bool:
        """Whether the device has so much more, which is then reserved."""
        if self.device_bytes is not None and self.reserved_bytes + more_bytes > self.device_bytes:
            return False
        self.reserved_bytes += more_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    # Expandable segments --------------------------------------------------------------------------------

    def _expanded(self, pool: _FreeBlocks, size: int) -> CachedBlock | None:
        """A block of at least `size`, with as few more pages as it takes; what was mapped in vain stays."""
        block = _with_room(pool, size) or self._new_stretch(pool)
        if not block.mapped:
            mapped = self._map(pool, block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            following = block.after
            assert following is not None, "a block that can grow is followed by what has no memory yet"
            mapped = self._map(pool, following, min(size - block.size, following.size))
            if mapped is None:
                return None
            block = mapped
        pool.take(block)
        return block

    def _new_stretch(self, pool: _FreeBlocks) -> CachedBlock:
        self._stretches += 1
        block = CachedBlock(self._stretches * _ADDRESSES, _ADDRESSES, pool.small, True, mapped=False)
        pool.put(block)
        return block

    def _map(self, pool: _FreeBlocks, block: CachedBlock, size: int) -> CachedBlock | None:
        """Memory for the first `size` bytes of a block without; joined with its neighbours, in the pool."""
        pages = _up(size, pool.page)
        if not self._reserves(pages):
            return None
        pool.take(block)
        if pages < block.size:
            pool.put(_cut(block, pages))
        block.mapped = True
        block = self._joined(pool, block)
        pool.put(block)
        return block

    def _unmap(self, pool: _FreeBlocks, block: CachedBlock) -> None:
        """Give back the pages that lie within a free block."""
        begin = _up(block.address, pool.page)
        end = (block.address + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.take(block)
        if end < block.address + block.size:
            pool.put(_cut(block, end - block.address))
        if block.address < begin:
            first, block = block, _cut(block, begin - block.address)
            pool.put(first)
        self.reserved_bytes -= block.size
        block.mapped = False
        block = self._joined(pool, block)
        if block.before is not None or block.after is not None:  # else the whole segment is gone
            pool.put(block)

    def _joined(self, pool: _FreeBlocks, block: CachedBlock) -> CachedBlock:
        """`block` with its free neighbours of the same kind, which are no longer in the pool."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free and neighbour.mapped == block.mapped:
                pool.take(neighbour)
                first, second = sorted((block, neighbour), key=lambda one: one.address)
                block = _merged(first, second)
        return block


def cached(graph: Graph, schedule: Schedule, steps: int = 3, *, expandable: bool = False) -> Reserve:
    """Replay `schedule` through the caching allocator, `steps` times in a row as in training.

    The first step warms the cache; the figures are those of the last. Values that outlive the step are
    given back between steps (gradients set to None). Workspaces are taken after the op's outputs.
    """
    allocator = CachingAllocator(expandable=expandable)
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


def _allocated(allocator: CachingAllocator, size: int) -> CachedBlock | None:
    return allocator.allocate(size) if size else None


def _segment_bytes(size: int) -> int:
    """What a request of that size takes where it gets a segment of its own."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _LARGE else _up(size, _SEGMENT_GRAIN)


def _with_room(pool: _FreeBlocks, size: int) -> CachedBlock | None:
    """The first block, by address, from which on `size` bytes are free, with memory or without."""
    for _, block in pool.unmapped:
        before = block.before
        start = before if before is not None and before.free else block
        room = 0
        following: CachedBlock | None = start
        while room < size and following is not None and following.free:
            room += following.size
            following = following.after
        if room >= size:
            return start
    return None


def _cut(block: CachedBlock, size: int) -> CachedBlock:
    """What is left of `block` beyond `size`, as a block of its own."""
    rest = CachedBlock(
        block.address + size, block.size - size, block.small, block.expandable, True, block.mapped
    )
    rest.before, rest.after = block, block.after
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    return rest


def _merged(first: CachedBlock, second: CachedBlock) -> CachedBlock:
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


def _up(size: int, grain: int) -> int:
    return -(-size // grain) * grain
