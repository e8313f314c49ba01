"""The lecture's tags as a layout: every tag has a place of its own, one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from lowtide.arena.buffers import Buffer
from lowtide.arena.pack.ordered import Ints
from lowtide.arena.tags import Box


def placed_by_tags(buffers: Sequence[Buffer]) -> Ints:
    """The offset of every buffer, if tags are shared by the rule of `lowtide.arena.tags`.

    Buffers ask for a tag when they are first needed, the largest first, and give it back when they no longer
    are. Tags that grow do so before anything is placed.
    """
    box = Box()
    tag_of = [0] * len(buffers)
    tag_bytes: list[int] = []
    ends = sorted(range(len(buffers)), key=lambda one: buffers[one].stop)
    over = 0
    for one in sorted(range(len(buffers)), key=lambda one: (buffers[one].first, -buffers[one].bytes)):
        while buffers[ends[over]].stop <= buffers[one].first:
            box.put(tag_of[ends[over]], tag_bytes[tag_of[ends[over]]])
            over += 1
        tag = box.take(buffers[one].bytes)
        if tag is None:
            tag = len(tag_bytes)
            tag_bytes.append(0)
        tag_bytes[tag] = max(tag_bytes[tag], buffers[one].bytes)
        tag_of[one] = tag
    places = [0, *accumulate(tag_bytes)]
    return np.array([places[tag] for tag in tag_of], dtype=np.int64)
