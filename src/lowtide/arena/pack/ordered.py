"""Buffers placed one by one, in a given order, each in the tightest gap between those already there.

With the order "largest first" this is greedy by size (Pisarchyk and Lee, arXiv 2001.03288). In the order of
birth it is what an allocator does that knows no future: best fit over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.arena.buffers import Buffer

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Buffers as columns."""

    sizes: Ints
    firsts: Ints
    stops: Ints

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Spans:
        table = np.array([(b.bytes, b.first, b.stop) for b in buffers], dtype=np.int64).reshape(-1, 3)
        return cls(*(np.ascontiguousarray(column) for column in table.T))

    def __len__(self) -> int:
        return len(self.sizes)

    def top(self, offsets: Ints) -> int:
        """How high buffers at these offsets reach."""
        return int((offsets + self.sizes).max(initial=0))


def placed_in_order(spans: Spans, order: Ints) -> Ints:
    """The offset of every buffer, when they are placed in this order.

    Each takes the smallest gap that holds it between the buffers placed before that are needed at a common
    step, the lowest of several; if there is none, the place above the highest of them. O(n²), in numpy.
    """
    count = len(spans)
    offsets = np.zeros(count, dtype=np.int64)
    sizes, firsts, stops = spans.sizes.tolist(), spans.firsts.tolist(), spans.stops.tolist()
    # Those placed so far, the lowest first: where they begin and end, and from when to when they are needed.
    lows, highs = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    begins, ends = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    for placed, number in enumerate(order.tolist()):
        size, first, stop = sizes[number], firsts[number], stops[number]
        met = ((begins[:placed] < stop) & (ends[:placed] > first)).nonzero()[0]
        offset = _tightest(lows.take(met), highs.take(met), size)
        offsets[number] = offset
        here = int(lows[:placed].searchsorted(offset))
        for column, entry in ((lows, offset), (highs, offset + size), (begins, first), (ends, stop)):
            column[here + 1 : placed + 1] = column[here:placed]
            column[here] = entry
    return offsets


def _tightest(lows: Ints, highs: Ints, size: int) -> int:
    """The lowest of the smallest gaps of at least `size` between these, lowest first; or above them all."""
    if not len(lows):
        return 0
    tops = np.maximum.accumulate(highs)
    gaps = lows
    gaps[1:] -= tops[:-1]
    wide = (gaps >= size).nonzero()[0]
    if not len(wide):
        return int(tops[-1])
    best = int(wide[gaps.take(wide).argmin()])
    return int(tops[best - 1]) if best else 0
