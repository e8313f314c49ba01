"""Orders in which buffers are placed, and how an order is improved: the method "auto".

At the fullest step the lower bound leaves no room for a hole. So some orders begin with what is live then;
the others are the usual ones: by size, by area (size times duration), by duration, by birth. An order that
misses the lower bound is repaired: what sticks out above it moves up by a quarter of its rank, and all is
placed again. That goes on until the bound is met or the passes are used up, whose number depends on how
many buffers there are and on nothing else: the same buffers always get the same places.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lowtide.arena.pack.ordered import Ints, Spans, placed_in_order

_MOST_PASSES = 100
_LEAST_PASSES = 3
_WORK = 400_000_000  # comparisons of two buffers: about a second; a pass compares each with all before it
_PASS_OVERHEAD = 2_000  # what placing one buffer costs besides, in comparisons
_REPAIRS = 12  # of one order, before the next one's turn
_SHARE_KEPT = 0.75  # of the rank of what sticks out: halving it undid more than it mended


def by_size(spans: Spans) -> Ints:
    """The largest first; of equals the one that is needed first."""
    return np.lexsort((spans.firsts, -spans.sizes))


def by_birth(spans: Spans) -> Ints:
    """As they are asked for, the largest first where several are at once."""
    return np.lexsort((-spans.sizes, spans.firsts))


def improved(spans: Spans, lower_bound: int) -> Ints:
    """The offsets of the best of several orders, repaired for as long as it pays."""
    search = _Search(spans, lower_bound)
    tried = [(search.tried(order), number, order) for number, order in enumerate(_orders(spans))]
    for _, _, order in sorted(tried, key=lambda trial: trial[:2]):
        search.repair(order)
    return search.offsets


def _orders(spans: Spans) -> Iterator[Ints]:
    """The most promising first: of many buffers only a few orders are tried."""
    durations = spans.stops - spans.firsts
    fullest = _fullest(spans)
    away = ~((spans.firsts <= fullest) & (fullest < spans.stops))  # not live at the fullest step
    yield by_size(spans)
    for key in (-spans.stops, -durations, spans.firsts, -spans.sizes):
        yield np.lexsort((-spans.sizes, np.where(away, 0, key), away))
    yield np.lexsort((spans.firsts, -spans.sizes * durations))
    yield np.lexsort((-spans.sizes, -durations))
    yield by_birth(spans)


def _fullest(spans: Spans) -> int:
    """The first step at which the most is live."""
    change = np.zeros(int(spans.stops.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(change, spans.firsts, spans.sizes)
    np.subtract.at(change, spans.stops, spans.sizes)
    return int(np.cumsum(change).argmax())


class _Search:
    """The best offsets so far, and how many passes are left."""

    def __init__(self, spans: Spans, lower_bound: int) -> None:
        self.spans = spans
        self.lower_bound = lower_bound
        work = max(1, len(spans) * (len(spans) + _PASS_OVERHEAD))
        self.passes_left = min(_MOST_PASSES, max(_LEAST_PASSES, _WORK // work))
        self.offsets = self.last = np.cumsum(spans.sizes) - spans.sizes  # one above the other
        self.top = spans.top(self.offsets)

    @property
    def done(self) -> bool:
        return self.top == self.lower_bound or not self.passes_left

    def tried(self, order: Ints) -> int:
        """How high the buffers reach, placed in this order; no placing, and no news, when all is done."""
        if self.done:
            return self.top
        self.passes_left -= 1
        self.last = placed_in_order(self.spans, order)
        top = self.spans.top(self.last)
        if top < self.top:
            self.top, self.offsets = top, self.last
        return top

    def repair(self, order: Ints) -> None:
        """Place in this order, move up what sticks out, and again."""
        for _ in range(_REPAIRS):
            self.tried(order)
            if self.done:
                return
            sticks_out = (self.last + self.spans.sizes > self.lower_bound)[order]
            ranks = np.arange(len(order), dtype=np.float64)
            ranks[sticks_out] = _SHARE_KEPT * ranks[sticks_out] - 0.5  # before the one whose rank it takes
            order = order[np.argsort(ranks, kind="stable")]
