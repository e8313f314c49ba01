"""Memory planned by counters and tags, as the lecture teaches it and nnvm did it; walked and written down.

After Chen et al., arXiv 1604.06174, section 3. Ops are walked in order. Every value has a counter of the
readers that it still waits for and a tag, which names the memory it is in.

    in place   the op may write over an input whose counter is 1: the result takes the input's tag
    shared     a counter that reaches 0 puts its tag into a box; a later result may take it from there
    new        otherwise

Which tag of the box: the smallest of those that are large enough but not more than `match_range` times what
is needed, else the largest of those that are smaller but not by more than that factor, which then grows.
The results of one op ask one after the other, the largest first. That is a heuristic in O(n log n): for
small arenas see `lowtide.arena.pack`.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lowtide.arena.buffers import Birth, aligned
from lowtide.arena.in_place import overwritable
from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Op
from lowtide.ir.schedule import Schedule
from lowtide.ir.walk import walk

MATCH_RANGE = 16  # nnvm's own default


class How(StrEnum):
    """How a value came by its tag."""

    NEW = "new"
    IN_PLACE = "in place"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Given:
    """A result and the tag that it was given; `tag_bytes` are the tag's from now on."""

    value: int
    tag: int
    how: How
    tag_bytes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One compute: what it was given, and how counters and box changed.

    `counters` are those of the values that it read or made, as they are after it; `freed` are the tags that
    went into the box, in this order.
    """

    position: int
    op: int
    given: tuple[Given, ...]
    counters: tuple[tuple[int, int], ...]
    freed: tuple[int, ...]


@dataclass(frozen=True)
class Sharing:
    """The tag of every birth, the bytes that each tag ends up with, and the walk that led there."""

    tags: Mapping[Birth, int]
    tag_bytes: tuple[int, ...]
    walk: tuple[Turn, ...]

    @property
    def total_bytes(self) -> int:
        """What all tags take together: each has a place of its own."""
        return sum(self.tag_bytes)

    def box_after(self, turn: int) -> tuple[int, ...]:
        """The free tags after that turn, the one that was freed first at the front."""
        box: dict[int, None] = {}
        for done in self.walk[: turn + 1]:
            for given in done.given:
                box.pop(given.tag, None)
            box.update(dict.fromkeys(done.freed))
        return tuple(box)

    def counters_after(self, turn: int) -> Mapping[int, int]:
        """The readers that each value waits for after that turn; values that wait for none are absent."""
        counters: dict[int, int] = {}
        for done in self.walk[: turn + 1]:
            counters.update(done.counters)
        return {value: count for value, count in counters.items() if count}


def share(
    graph: Graph,
    schedule: Schedule,
    *,
    in_place: bool = True,
    sharing: bool = True,
    match_range: int = MATCH_RANGE,
    alignment: int = 1,
) -> Sharing:
    """Give every value that `schedule` makes on the graph's device a tag.

    With neither `in_place` nor `sharing` every value has memory of its own. The walk counts readers and
    does not look at where the schedule frees: a tag goes into the box right after the last op that reads
    the value, or right after the one that makes it if nobody does. The graph's outputs keep their tags.
    Sizes are rounded up to `alignment`.

    The schedule has to be one that `simulate` accepts.

    Raises:
        BadRequest: `match_range` is less than 1.
    """
    if match_range < 1:
        raise BadRequest(f"a match range of {match_range} matches nothing; give 1 or more, or do not share")
    box = Box(match_range) if sharing else None
    counting = _TagWalk(graph, _reader_counts(graph, schedule), box, in_place=in_place, alignment=alignment)
    turns = [
        counting.turn(event.position, event.op) for event in walk(graph, schedule) if event.op is not None
    ]
    return Sharing(counting.tags, tuple(counting.tag_bytes), tuple(turns))


class Box:
    """Free tags, found by size."""

    def __init__(self, match_range: int = MATCH_RANGE) -> None:
        self.match_range = match_range
        self._free: list[tuple[int, int, int]] = []  # bytes, when it was put in, tag; smallest first
        self._puts = 0

    def put(self, tag: int, tag_bytes: int) -> None:
        """A tag is free."""
        bisect.insort(self._free, (tag_bytes, self._puts, tag))
        self._puts += 1

    def take(self, need: int) -> int | None:
        """A tag of about the size needed, which is no longer free then; None if there is none."""
        above = bisect.bisect_left(self._free, (need, 0, 0))
        if above < len(self._free) and self._free[above][0] <= need * self.match_range:
            return self._free.pop(above)[2]
        if above and self._free[above - 1][0] >= need // self.match_range:
            return self._free.pop(above - 1)[2]
        return None


class _TagWalk:
    """The state of the walk: counters and tags of what is alive, the box, and how large tags have become."""

    def __init__(
        self, graph: Graph, readers: Mapping[Birth, int], box: Box | None, *, in_place: bool, alignment: int
    ) -> None:
        self.graph = graph
        self.readers = readers
        self.box = box
        self.in_place = in_place
        self.alignment = alignment
        self.births: dict[int, int] = {}
        self.counter: dict[int, int] = {}
        self.tag: dict[int, int] = {}
        self.tags: dict[Birth, int] = {}
        self.tag_bytes: list[int] = []

    def turn(self, position: int, op: Op) -> Turn:
        made = [v for v in op.creates if self.graph.values[v].device == self.graph.device]
        read = [v for v in dict.fromkeys((*op.reads, *op.mutates)) if v in self.tag and v not in made]
        source = self.overwritten(op)
        heir = None if source is None or op.outputs[0] is None else self.graph.tensors[op.outputs[0]].value
        given: dict[int, Given] = {}
        for value in sorted(made, key=lambda v: -self.graph.values[v].bytes):
            given[value] = self.given(value, source if value == heir else None)
        freed = self.counted(read, made, source)
        counters = tuple((value, self.counter[value]) for value in (*read, *made))
        return Turn(position, op.id, tuple(given[value] for value in made), counters, tuple(freed))

    def overwritten(self, op: Op) -> int | None:
        """The input that the op's first result is written over."""
        if not self.in_place:
            return None
        return next((v for v in overwritable(self.graph, op) if self.counter[v] == 1), None)

    def given(self, value: int, source: int | None) -> Given:
        """A tag for a result: that of the input it overwrites, one from the box, or a new one."""
        need = aligned(self.graph.values[value].bytes, self.alignment)
        free = self.box.take(need) if source is None and self.box is not None else None
        if source is not None:
            tag, how = self.tag[source], How.IN_PLACE
        elif free is not None:
            tag, how = free, How.SHARED
            self.tag_bytes[tag] = max(self.tag_bytes[tag], need)
        else:
            tag, how = len(self.tag_bytes), How.NEW
            self.tag_bytes.append(need)
        birth = Birth(value, self.births.get(value, 0))
        self.births[value] = birth.time + 1
        self.tag[value] = self.tags[birth] = tag
        self.counter[value] = self.readers[birth]
        return Given(value, tag, how, self.tag_bytes[tag])

    def counted(self, read: list[int], made: list[int], source: int | None) -> list[int]:
        """One reader less for what was read; the tags of what waits for none go into the box."""
        for value in read:
            self.counter[value] -= 1
        freed = [self.tag[v] for v in (*read, *made) if not self.counter[v] and v != source]
        if self.box is not None:
            for tag in freed:
                self.box.put(tag, self.tag_bytes[tag])
        return freed


def _reader_counts(graph: Graph, schedule: Schedule) -> dict[Birth, int]:
    """How many computes read or change each birth; one more for what outlives the step."""
    latest: dict[int, Birth] = {}
    counts: dict[Birth, int] = {}
    for op in (graph.ops[number] for number in schedule.computed):
        for value in dict.fromkeys((*op.reads, *op.mutates)):
            if value in latest and value not in op.creates:
                counts[latest[value]] += 1
        for value in op.creates:
            latest[value] = Birth(value, latest[value].time + 1 if value in latest else 0)
            counts[latest[value]] = 0
    for value in graph.outputs & latest.keys():
        counts[latest[value]] += 1
    return counts
