"""Packing: where in an arena each buffer goes.

    apart      every buffer at a place of its own: nothing is shared               O(n)
    tags       each tag of the lecture's planner at a place of its own            O(n log n)
    by-size    the largest first, each in the tightest gap                         O(n²)
    best-fit   in the order of birth, each in the tightest gap                     O(n²)
    auto       the best of several orders, repaired; exact for a handful           O(n²), a few times
    exact      branch and bound                                                    at most 200 buffers

To find the smallest arena is NP-hard; that the lower bound is met, where it is, is proof enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.arena.buffers import Buffer, largest_live_bytes
from lowtide.arena.pack.exact import smallest
from lowtide.arena.pack.improving import by_birth, by_size, improved
from lowtide.arena.pack.ordered import Ints, Spans, placed_in_order
from lowtide.arena.pack.tagged import placed_by_tags
from lowtide.errors import UnknownMethod

METHODS = ("apart", "tags", "by-size", "best-fit", "auto", "exact")
_HANDFUL = 60  # buffers that auto hands to the exact method where it missed the lower bound
_HANDFUL_NODES = 5_000


@dataclass(frozen=True)
class Placement:
    """The offset of each buffer, and the bytes that they reach up to.

    `proven` says that no placement of these buffers is smaller.
    """

    method: str
    offsets: tuple[int, ...]
    arena_bytes: int
    proven: bool


def pack(buffers: Sequence[Buffer], method: str = "auto") -> Placement:
    """Place `buffers` so that those needed at a common step do not overlap, in a small arena.

    Offsets are multiples of whatever all sizes are multiples of. The same buffers get the same offsets on any
    machine, however long it takes.

    Raises:
        UnknownMethod: there is no method of that name.
        BadRequest: the exact method was given too many buffers.
    """
    if method not in METHODS:
        raise UnknownMethod(method, METHODS)
    spans, bound = Spans.of(buffers), largest_live_bytes(buffers)
    offsets, complete = _offsets(buffers, spans, bound, method)
    arena = spans.top(offsets)
    return Placement(method, tuple(offsets.tolist()), arena, complete or arena == bound)


def _offsets(buffers: Sequence[Buffer], spans: Spans, bound: int, method: str) -> tuple[Ints, bool]:
    """The offsets by this method, and whether a search found that there are none better."""
    if method == "apart":
        return np.cumsum(spans.sizes) - spans.sizes, False
    if method == "tags":
        return placed_by_tags(buffers), False
    if method == "by-size":
        return placed_in_order(spans, by_size(spans)), False
    if method == "best-fit":
        return placed_in_order(spans, by_birth(spans)), False
    offsets = improved(spans, bound)
    if method == "exact":
        answer = smallest(spans, offsets, bound)
    elif len(spans) <= _HANDFUL:
        answer = smallest(spans, offsets, bound, _HANDFUL_NODES)
    else:
        return offsets, False
    return answer.offsets, answer.complete
