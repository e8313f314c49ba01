"""When memory is needed: from a graph and a schedule to buffers, each with a size and a span of steps.

    Birth    one making of a value: a value that is recomputed is born again
    Buffer   a place that has to be found in the arena, for one birth or for several, one after the other,
             where ops write over their inputs

Resident values are not in the arena, nor is what lies on other devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.arena.in_place import TakeOver
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule
from lowtide.ir.walk import walk

CUDA_ALIGNMENT = 512  # what PyTorch's CUDA allocator aligns to; libraries choose their kernels by less
CPU_ALIGNMENT = 64  # what PyTorch's CPU allocator aligns to: a cache line, the widest vector


@dataclass(frozen=True, slots=True, order=True)
class Birth:
    """A value as it is computed for the `time`-th time, counted from 0."""

    value: int
    time: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """`bytes` that are needed while steps `first` up to, not including, `stop` of the schedule run.

    `births` are what it carries, one after the other: each but the first was written over the one before.
    """

    id: int
    bytes: int
    first: int
    stop: int
    births: tuple[Birth, ...]


def alignment_of(device: str) -> int:
    """What offsets and sizes on `device` ('cpu', 'cuda', 'cuda:0') are multiples of."""
    return CUDA_ALIGNMENT if device.partition(":")[0] == "cuda" else CPU_ALIGNMENT


def aligned(count: int, alignment: int) -> int:
    """`count` bytes rounded up to the alignment."""
    return -(-count // alignment) * alignment


def buffers_of(
    graph: Graph, schedule: Schedule, take_overs: Iterable[TakeOver] = (), alignment: int = 1
) -> tuple[Buffer, ...]:
    """What has to be held for `schedule`, in the order in which it is first needed. Ids are positions.

    A value is needed from the compute that makes it, inputs and outputs together, until the schedule frees
    it; what is never freed, as the graph's outputs, is needed to the end. Sizes are rounded up to
    `alignment`. A result that takes over an input's memory lives on in the input's buffer.

    The schedule has to be one that `simulate` accepts, and the take-overs those of `lowtide.arena.in_place`.
    """
    return _Ledger(graph, take_overs, alignment).read(schedule)


def live_bytes(buffers: Sequence[Buffer]) -> npt.NDArray[np.int64]:
    """The bytes needed at each step, from step 0 to the last at which anything is."""
    change = np.zeros(max((buffer.stop for buffer in buffers), default=0) + 1, dtype=np.int64)
    for buffer in buffers:
        change[buffer.first] += buffer.bytes
        change[buffer.stop] -= buffer.bytes
    return np.cumsum(change)[:-1]


def largest_live_bytes(buffers: Sequence[Buffer]) -> int:
    """What no arena can be smaller than: the most that is needed at one step."""
    return int(live_bytes(buffers).max(initial=0))


class _Ledger:
    """Buffers as they are opened, handed on and closed."""

    def __init__(self, graph: Graph, take_overs: Iterable[TakeOver], alignment: int) -> None:
        self.graph = graph
        self.alignment = alignment
        self.overwritten = {(over.position, over.output): over.input for over in take_overs}
        self.times: dict[int, int] = {}
        self.births: list[list[Birth]] = []
        self.spans: list[tuple[int, int]] = []
        self.holding: dict[int, int] = {}  # the buffer that each live value is in

    def read(self, schedule: Schedule) -> tuple[Buffer, ...]:
        for event in walk(self.graph, schedule):
            for value in event.born:
                if self.graph.values[value].device == self.graph.device:
                    self.bear(value, event.position)
            for value in event.died:
                self.close(value, event.position)
        for value in tuple(self.holding):
            self.close(value, len(schedule))
        return tuple(
            Buffer(
                number,
                aligned(self.graph.values[births[0].value].bytes, self.alignment),
                *span,
                tuple(births),
            )
            for number, (births, span) in enumerate(zip(self.births, self.spans, strict=True))
        )

    def bear(self, value: int, position: int) -> None:
        birth = Birth(value, self.times.get(value, 0))
        self.times[value] = birth.time + 1
        source = self.overwritten.get((position, value))
        if source is None:
            self.holding[value] = len(self.births)
            self.births.append([birth])
            self.spans.append((position, position))
        else:
            self.holding[value] = self.holding.pop(source)
            self.births[self.holding[value]].append(birth)

    def close(self, value: int, position: int) -> None:
        """What was taken over, or is not in the arena, has no buffer to close."""
        if (number := self.holding.pop(value, None)) is not None:
            self.spans[number] = (self.spans[number][0], position)
