"""A curve as a memory snapshot for PyTorch's own viewer: as if its allocator had recorded the step.

The viewer reads pickles and nothing else. Only lists, dicts, words and numbers are written, and lowtide never
reads one. There are three segments: what is resident, the arena with what the step makes, and workspaces.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from lowtide.arena.buffers import Birth, aligned, alignment_of
from lowtide.arena.layout import lay_out
from lowtide.ir.graph import Op
from lowtide.ir.lives import Life
from lowtide.ir.walk import walk
from lowtide.report.content.curve import Curve

Record: TypeAlias = "dict[str, int | str | bool | list[Record]]"

_PROTOCOL = 4  # the newest that the viewer reads
_BASE = 0x7F00_0000_0000  # where devices have their memory, about
_SEGMENT = 1 << 21  # what segments are multiples of


def snapshot_bytes(curve: Curve) -> bytes:
    """The file that `python -m torch.cuda._memory_viz` and pytorch.org/memory_viz read."""
    return pickle.dumps(snapshot(curve), protocol=_PROTOCOL)


def snapshot(curve: Curve) -> dict[str, list[Record] | list[list[Record]]]:
    """Segments as they are when the step is over, and every allocation and free before.

    The running sum of allocations less frees peaks where the curve does. Every address is in its segment,
    and no two blocks that are alive at once overlap: a result is never written over an input here.
    """
    writer = _SnapshotWriter(curve)
    trace = list(writer.events())
    return {"segments": writer.segments(), "device_traces": [trace]}


@dataclass(frozen=True, slots=True)
class _LiveBlock:
    """A piece of memory that is allocated: where, how much, and who it is for."""

    address: int
    bytes: int
    frames: list[Record]


class _SnapshotWriter:
    """Writes down what an allocator would have done; `alive` are the blocks that nobody has freed yet."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self.layout = lay_out(curve.graph, curve.schedule, in_place=False)
        self.life = {Birth(life.value, life.time): life for life in curve.lives}
        self.alive: dict[int, _LiveBlock] = {}  # by value
        self.times: dict[int, int] = {}
        self.now_us = 0.0
        grain = alignment_of(curve.graph.device)
        resident = [aligned(self.life[Birth(value, 0)].bytes, grain) for value in curve.graph.resident]
        self.offset = dict(zip(curve.graph.resident, accumulate(resident, initial=0), strict=False))
        sizes = [
            sum(resident),
            self.layout.arena_bytes,
            max((op.workspace_bytes for op in curve.ops), default=0),
        ]
        self.sizes = [aligned(size, _SEGMENT) for size in sizes]
        self.bases = list(accumulate(self.sizes, initial=_BASE))[:3]

    def events(self) -> Iterator[Record]:
        for base, size in zip(self.bases, self.sizes, strict=True):
            if size:
                yield self._event("segment_alloc", _LiveBlock(base, size, []))
        for value in self.curve.graph.resident:
            yield from self._bear(value, self.bases[0] + self.offset[value], [])
        moment = 0
        for event in walk(self.curve.graph, self.curve.schedule):
            for value in event.died:
                yield from self._free(self.alive.pop(value, None))
            running = [] if event.op is None else [self._frame_of(event.op, moment)]
            yield from self._births(event.born, running)
            if event.op is not None:
                yield from self._compute(event.op, moment, running)
                moment += 1

    def segments(self) -> list[Record]:
        found = zip(self.bases, self.sizes, strict=True)
        return [self._segment(base, size) for base, size in found if size]

    def _frame_of(self, op: Op, moment: int) -> Record:
        return _frame(op.module, moment, f"{op.target} ({self.curve.phases[moment].value})")

    def _births(self, values: Iterable[int], running: list[Record]) -> Iterator[Record]:
        for value in values:
            birth = Birth(value, self.times.get(value, 0))
            self.times[value] = birth.time + 1
            if birth in self.layout.buffer_of:
                yield from self._bear(value, self.bases[1] + self.layout.offset_of(birth), running)

    def _compute(self, op: Op, moment: int, running: list[Record]) -> Iterator[Record]:
        if op.workspace_bytes:
            frames = [_frame(op.module, moment, "workspace"), *running]
            block = _LiveBlock(self.bases[2], op.workspace_bytes, frames)
            yield self._event("alloc", block)
            yield from self._free(block)
        self.now_us += op.seconds * 1e6

    def _bear(self, value: int, address: int, running: list[Record]) -> Iterator[Record]:
        life = self.life[Birth(value, max(self.times.get(value, 0) - 1, 0))]
        if life.bytes:
            self.alive[value] = _LiveBlock(address, life.bytes, [self._owner(life), *running])
            yield self._event("alloc", self.alive[value])

    def _owner(self, life: Life) -> Record:
        value = self.curve.graph.values[life.value]
        return _frame(value.module, self.curve.moment(life.first), f"{value.name} ({life.category.value})")

    def _free(self, block: _LiveBlock | None) -> Iterator[Record]:
        if block is not None:
            yield self._event("free_requested", block)
            yield self._event("free_completed", block)

    def _event(self, action: str, block: _LiveBlock) -> Record:
        return {
            "action": action,
            "addr": block.address,
            "size": block.bytes,
            "stream": 0,
            "time_us": round(self.now_us),
            "frames": block.frames,
        }

    def _segment(self, base: int, size: int) -> Record:
        inside = [block for block in self.alive.values() if base <= block.address < base + size]
        held = sum(block.bytes for block in inside)
        return {
            "device": 0,
            "address": base,
            "total_size": size,
            "allocated_size": held,
            "active_size": held,
            "requested_size": held,
            "stream": 0,
            "segment_type": "large",
            "is_expandable": False,
            "frames": [],
            "blocks": list(_blocks(base, size, sorted(inside, key=lambda block: block.address))),
        }


def _blocks(base: int, size: int, alive: Iterable[_LiveBlock]) -> Iterator[Record]:
    """All of a segment, from its first byte to its last: blocks, and what is free between them."""
    end = base
    for block in alive:
        if end < block.address:
            yield _piece(end, block.address - end, "inactive", [])
        yield _piece(block.address, block.bytes, "active_allocated", block.frames)
        end = block.address + block.bytes
    if end < base + size:
        yield _piece(end, base + size - end, "inactive", [])


def _piece(address: int, size: int, state: str, frames: list[Record]) -> Record:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _frame(module: str, moment: int, name: str) -> Record:
    """How the viewer names a line of code: here the file is a module, and the line the number of an op."""
    return {"filename": module or "(outside of any module)", "line": moment, "name": name}
