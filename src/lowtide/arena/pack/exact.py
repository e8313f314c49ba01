"""The smallest arena, by branch and bound: the yardstick for few buffers.

Buffers are placed from the bottom up, each as low as those below it allow: any layout can be pressed down
into one that is found so, if its buffers are taken in the order of their offsets. So it is enough to ask
which buffer comes next, with offsets that never fall. Three kinds of branches are cut off:

    too high    at some step, what is placed and what is still to be placed there exceed the best arena so far
    wasteful    another buffer would fit whole below the one that is taken: it could only move there later on
    same again  of buffers alike in size and span, another one was tried here
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lowtide.arena.pack.ordered import Ints, Spans
from lowtide.errors import BadRequest

MOST_BUFFERS = 200
_MOST_NODES = 200_000  # some ten seconds; a count, so that the answer does not depend on the machine


@dataclass(frozen=True)
class BestOffsets:
    """The best offsets that were found, and whether the search went to its end."""

    offsets: Ints
    complete: bool


def smallest(spans: Spans, start: Ints, lower_bound: int, most_nodes: int = _MOST_NODES) -> BestOffsets:
    """Offsets that reach no higher than any others, if the search is `complete`.

    It begins with the offsets `start`, and is over when it has met `lower_bound` or looked at `most_nodes`
    partial layouts.

    Raises:
        BadRequest: there are more than MOST_BUFFERS buffers.
    """
    if len(spans) > MOST_BUFFERS:
        raise BadRequest(
            f"the exact method places at most {MOST_BUFFERS} buffers, and there are {len(spans)}. "
            "Use auto, which says whether its layout is proven to be the smallest."
        )
    search = _Branching(spans, lower_bound, start.tolist(), spans.top(start), most_nodes)
    if search.best > lower_bound:
        search.descend(0, 0)
    complete = search.nodes_left > 0 or search.best == lower_bound
    return BestOffsets(np.array(search.best_offsets, dtype=np.int64), complete)


@dataclass
class _Branching:
    """One partial layout, changed in place on the way down and back up."""

    spans: Spans
    lower_bound: int
    best_offsets: list[int]
    best: int
    nodes_left: int
    offsets: list[int] = field(init=False)
    unplaced: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # Between two births live sets only shrink: one section of time per birth says all there is to say.
        begins = np.unique(self.spans.firsts)
        self.sizes: list[int] = self.spans.sizes.tolist()
        self.froms: list[int] = np.searchsorted(begins, self.spans.firsts).tolist()
        self.tos: list[int] = np.searchsorted(begins, self.spans.stops).tolist()
        self.heights = [0] * len(begins)
        self.offsets = [0] * len(self.sizes)
        self.unplaced = [one for one, size in enumerate(self.sizes) if size]  # the others fit anywhere
        self.rest = [0] * len(begins)  # bytes still to be placed
        for one in self.unplaced:
            for section in range(self.froms[one], self.tos[one]):
                self.rest[section] += self.sizes[one]

    def descend(self, floor: int, last: int) -> None:
        """Place what is left: nothing below `floor`, and at the floor nothing that comes before `last`."""
        if not self.unplaced:
            self.best, self.best_offsets = max(self.heights, default=0), list(self.offsets)
            return
        tried: set[tuple[int, int, int]] = set()
        for offset, one in self.choices(floor, last):
            alike = self.sizes[one], self.froms[one], self.tos[one]
            if self.best == self.lower_bound or alike in tried:
                continue
            tried.add(alike)
            self.nodes_left -= 1
            if self.nodes_left <= 0:
                return
            self.place_and_descend(one, offset)

    def choices(self, floor: int, last: int) -> list[tuple[int, int]]:
        """Offset and buffer for every one that may come next, the lowest first."""
        found = [(max(self.heights[self.froms[one] : self.tos[one]]), one) for one in self.unplaced]
        wasted = min(offset + self.sizes[one] for offset, one in found)
        return sorted(
            (offset, one) for offset, one in found if offset < wasted and (offset, one) >= (floor, last)
        )

    def place_and_descend(self, one: int, offset: int) -> None:
        span = slice(self.froms[one], self.tos[one])
        size, before = self.sizes[one], self.heights[span]
        self.heights[span] = [offset + size] * len(before)
        self.rest[span] = [rest - size for rest in self.rest[span]]
        where = self.unplaced.index(one)
        del self.unplaced[where]
        self.offsets[one] = offset
        if self.least(offset) < self.best:
            self.descend(offset, one)
        self.unplaced.insert(where, one)
        self.rest[span] = [rest + size for rest in self.rest[span]]
        self.heights[span] = before

    def least(self, floor: int) -> int:
        """What no completion of the partial layout is smaller than, if nothing goes below `floor` now."""
        pairs = zip(self.heights, self.rest, strict=True)
        return max(max(height, floor) + rest if rest else height for height, rest in pairs)
