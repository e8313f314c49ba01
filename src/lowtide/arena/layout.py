"""Layouts: where in one arena each value of a step lives, and the referee that checks them.

    lay_out(graph, schedule)         lifetimes → in place where possible → packing → refereed Layout
    check(graph, schedule, layout)   the referee: replays the schedule and watches who writes where

An arena has to be as large as what is live at once at the fullest step: that is the lower bound, and every
layout says how far from it it is.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lowtide.arena.buffers import Birth, Buffer, alignment_of, buffers_of, live_bytes
from lowtide.arena.in_place import overwritable, take_overs
from lowtide.arena.pack import pack
from lowtide.errors import ArenaTooSmall, BadRequest, IllegalLayout
from lowtide.ir.graph import Graph, Op
from lowtide.ir.schedule import Event, Schedule, straight
from lowtide.ir.simulate import simulate
from lowtide.ir.walk import walk


@dataclass(frozen=True)
class Layout:
    """A place in an arena of `arena_bytes` for every buffer: `buffers[i]` begins at `offsets[i]`.

    `lower_bound_bytes` is what is live at once at the fullest step, results that are written over an input
    counted once: no arena for these buffers is smaller. `proven` says that none smaller than this one is
    possible; that may be so above the lower bound.
    """

    method: str
    alignment: int
    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    arena_bytes: int
    lower_bound_bytes: int
    proven: bool

    @property
    def ratio(self) -> float:
        """How many times the lower bound the arena is; 1 for an empty one."""
        return self.arena_bytes / self.lower_bound_bytes if self.lower_bound_bytes else 1.0

    @cached_property
    def buffer_of(self) -> Mapping[Birth, int]:
        """The buffer that each birth is in."""
        return {birth: buffer.id for buffer in self.buffers for birth in buffer.births}

    def offset_of(self, birth: Birth) -> int:
        """Where in the arena a value is written when it is computed for the `birth.time`-th time."""
        return self.offsets[self.buffer_of[birth]]


def lay_out(
    graph: Graph,
    schedule: Schedule | None = None,
    *,
    method: str = "auto",
    in_place: bool = True,
    alignment: int | None = None,
    arena_bytes: int | None = None,
) -> Layout:
    """Find a place for every value that `schedule` makes on the graph's device, in a small arena.

    The schedule is the straight one unless another is given. Offsets and sizes are multiples of `alignment`,
    by default the device's. With `in_place`, results are written over inputs where ops allow it and nobody
    else needs the input. Workspaces and what is resident are not in the arena.

    The layout has been refereed: no two values that are live at the same step overlap.

    Raises:
        UnknownMethod: there is no such method of packing.
        IllegalSchedule: the schedule cannot be executed.
        ArenaTooSmall: the layout does not fit in `arena_bytes`; the error carries what it needs.
        BadRequest: the alignment is not positive; the exact method was asked for too much.
        MissingExtra: the method needs a package that is not installed.
    """
    schedule = straight(graph) if schedule is None else schedule
    alignment = alignment_of(graph.device) if alignment is None else alignment
    if alignment < 1:
        raise BadRequest(f"an alignment of {alignment} bytes makes no sense; give 1 or more")
    simulate(graph, schedule)
    overs = take_overs(graph, schedule) if in_place else ()
    buffers = buffers_of(graph, schedule, overs, alignment)
    placement = pack(buffers, method)
    live = live_bytes(buffers)
    layout = Layout(
        method=placement.method,
        alignment=alignment,
        buffers=buffers,
        offsets=placement.offsets,
        arena_bytes=placement.arena_bytes,
        lower_bound_bytes=int(live.max(initial=0)),
        proven=placement.proven,
    )
    check(graph, schedule, layout)
    if arena_bytes is not None and layout.arena_bytes > arena_bytes:
        raise _too_small(graph, schedule, layout, arena_bytes, int(live.argmax()))
    return layout


def _too_small(graph: Graph, schedule: Schedule, layout: Layout, asked: int, fullest: int) -> ArenaTooSmall:
    fullest_at = schedule.steps[fullest].event(graph, fullest)
    out = next(
        buffer
        for buffer, offset in zip(layout.buffers, layout.offsets, strict=True)
        if offset + buffer.bytes > asked
    )
    return ArenaTooSmall(
        method=layout.method,
        asked_bytes=asked,
        needed_bytes=layout.arena_bytes,
        lower_bound_bytes=layout.lower_bound_bytes,
        fullest_op=_named(fullest_at),
        unplaced=f"'{graph.values[out.births[0].value].name}' ({out.bytes} bytes)",
    )


def _named(event: Event) -> str:
    return f"a step of kind '{event.step.kind}'" if event.op is None else _op_named(event.op)


def _op_named(op: Op) -> str:
    return f"op {op.id} ({op.label})"


# The referee ----------------------------------------------------------------------------------------------


def check(graph: Graph, schedule: Schedule, layout: Layout) -> None:
    """Replay `schedule`, which must be legal, and watch where `layout` puts what is written.

    It knows nothing of how buffers are found or packed: who is alive when, and who is read later, it finds
    out for itself. Nothing is returned; a layout that passes is safe to execute.

    Raises:
        IllegalLayout: a birth has no place, or more than one; a place is misaligned, too small or reaches out
            of the arena; two values that are alive at the same step overlap; a result is written over an
            input that is read later or that its op does not allow to be overwritten; a buffer's span, or the
            lower bound, is not what the replay finds.
    """
    referee = _Referee(graph, schedule, layout)
    for event in walk(graph, schedule):
        referee.bear(event)
        for value in event.died:
            referee.free(event.position, value)
    referee.finish()


class _Referee:
    """Who is alive, where, and who was there before."""

    def __init__(self, graph: Graph, schedule: Schedule, layout: Layout) -> None:
        self.graph = graph
        self.layout = layout
        self.length = len(schedule)
        self.last_touch = _last_touches(graph, schedule)
        self.seat, self.before = _seats(layout)
        self.times: dict[int, int] = {}
        self.alive: dict[int, Birth] = {}  # by value; those that were overwritten are gone
        self.floor: list[tuple[int, int, int]] = []  # what is taken: from, to, value; lowest first
        self.span: dict[int, tuple[int, int]] = {}  # of each buffer, as found
        self.live_bytes = self.most_bytes = 0

    def bear(self, event: Event) -> None:
        for value in event.born:
            if self.graph.values[value].device == self.graph.device:
                self._bear(event, value)
        self.most_bytes = max(self.most_bytes, self.live_bytes)

    def free(self, position: int, value: int) -> None:
        birth = self.alive.get(value)
        if birth is not None:
            self._leave(birth, position)

    def finish(self) -> None:
        for birth in tuple(self.alive.values()):
            self._leave(birth, self.length)
        for buffer in self.layout.buffers:
            for birth in buffer.births:
                if birth.time >= self.times.get(birth.value, 0):
                    raise IllegalLayout(f"buffer {buffer.id} is for {self._name(birth)}, which is never made")
            if self.span[buffer.id] != (buffer.first, buffer.stop):
                raise IllegalLayout(
                    f"buffer {buffer.id} claims to be needed at steps {buffer.first} to {buffer.stop}; "
                    f"the replay finds {self.span[buffer.id][0]} to {self.span[buffer.id][1]}"
                )
        if self.most_bytes != self.layout.lower_bound_bytes:
            raise IllegalLayout(
                f"the lower bound is given as {self.layout.lower_bound_bytes} bytes; "
                f"the replay finds at most {self.most_bytes} bytes live at once"
            )

    def _bear(self, event: Event, value: int) -> None:
        position = event.position
        birth = Birth(value, self.times.get(value, 0))
        self.times[value] = birth.time + 1
        number = self.seat.get(birth)
        if number is None:
            raise IllegalLayout(
                f"{self._name(birth)}, made by {_named(event)} at step {position}, has no place"
            )
        self._check_place(birth, number)
        if (source := self.before.get(birth)) is not None:
            self._check_take_over(event, birth, source)
            self._leave(source, position)
        self._enter(event, birth, number)

    def _check_place(self, birth: Birth, number: int) -> None:
        offset, size = self.layout.offsets[number], self.layout.buffers[number].bytes
        if size < self.graph.values[birth.value].bytes:
            raise IllegalLayout(
                f"{self._name(birth)} has {self.graph.values[birth.value].bytes} bytes, its buffer {size}"
            )
        if offset % self.layout.alignment:
            raise IllegalLayout(
                f"{self._name(birth)} is at {offset}, which is not a multiple of {self.layout.alignment}"
            )
        if offset < 0 or offset + size > self.layout.arena_bytes:
            raise IllegalLayout(
                f"{self._name(birth)} is at {offset} to {offset + size}, outside of the arena of "
                f"{self.layout.arena_bytes} bytes"
            )

    def _check_take_over(self, event: Event, birth: Birth, source: Birth) -> None:
        """`birth`, made at `event`, claims to be written over `source`."""
        position, op = event.position, event.op
        what = f"{_named(event)} at step {position} writes {self._name(birth)} over {self._name(source)}, "
        if self.alive.get(source.value) != source:
            raise IllegalLayout(f"{what}which is not alive then")
        if op is None or source.value not in overwritable(self.graph, op):
            raise IllegalLayout(
                f"{what}which it cannot: it must read each element before it writes the same one, and both "
                f"must be of equal size ({self._bytes(source)} and {self._bytes(birth)} bytes) and shape"
            )
        if op.outputs[0] is None or self.graph.tensors[op.outputs[0]].value != birth.value:
            raise IllegalLayout(f"{what}but only its first output may be")
        touched = self.last_touch[source]
        if touched is None:
            raise IllegalLayout(f"{what}which outlives the step ({self._bytes(source)} bytes)")
        if touched[0] > position:
            reader = _op_named(self.graph.ops[touched[1]])
            raise IllegalLayout(
                f"{what}which {reader} reads later, at step {touched[0]} ({self._bytes(source)} bytes)"
            )

    def _enter(self, event: Event, birth: Birth, number: int) -> None:
        position = event.position
        offset, size = self.layout.offsets[number], self.layout.buffers[number].bytes
        self.alive[birth.value] = birth
        self.live_bytes += size
        self.span.setdefault(number, (position, position))
        if not size:
            return
        entry = (offset, offset + size, birth.value)
        here = bisect.bisect(self.floor, entry)
        for low, high, value in self.floor[max(here - 1, 0) : here + 1]:
            if low < entry[1] and offset < high:
                other = self._name(self.alive[value])
                raise IllegalLayout(
                    f"{self._name(birth)} at {offset} to {entry[1]} and {other} at {low} to {high} overlap "
                    f"by {min(high, entry[1]) - max(low, offset)} bytes, and both are alive at step "
                    f"{position}, {_named(event)}"
                )
        self.floor.insert(here, entry)

    def _leave(self, birth: Birth, position: int) -> None:
        number = self.seat[birth]
        offset, size = self.layout.offsets[number], self.layout.buffers[number].bytes
        self.live_bytes -= size
        self.span[number] = (self.span[number][0], position)
        if size:
            del self.floor[bisect.bisect_left(self.floor, (offset, offset + size, birth.value))]
        del self.alive[birth.value]

    def _bytes(self, birth: Birth) -> int:
        return self.graph.values[birth.value].bytes

    def _name(self, birth: Birth) -> str:
        again = f" (made the {birth.time + 1}. time)" if birth.time else ""
        return f"'{self.graph.values[birth.value].name}'{again}"


def _seats(layout: Layout) -> tuple[dict[Birth, int], dict[Birth, Birth]]:
    """The buffer of each birth, and the birth that it is written over, as the layout claims."""
    if len(layout.buffers) != len(layout.offsets):
        raise IllegalLayout(f"there are {len(layout.buffers)} buffers and {len(layout.offsets)} offsets")
    seat: dict[Birth, int] = {}
    before: dict[Birth, Birth] = {}
    for number, buffer in enumerate(layout.buffers):
        if buffer.id != number:
            raise IllegalLayout(f"buffer {number} carries the id {buffer.id}; ids are positions")
        for index, birth in enumerate(buffer.births):
            if birth in seat:
                raise IllegalLayout(f"value {birth.value} has two places for its birth {birth.time}")
            seat[birth] = number
            if index:
                before[birth] = buffer.births[index - 1]
    return seat, before


def _last_touches(graph: Graph, schedule: Schedule) -> dict[Birth, tuple[int, int] | None]:
    """The last step and op to make, read or change each birth; None for what is never freed."""
    times: dict[int, int] = {}
    touched: dict[Birth, tuple[int, int] | None] = {}
    freed: set[Birth] = set()
    for position, _, op, born, died in walk(graph, schedule):
        for value in born:
            times[value] = times.get(value, -1) + 1
        for value in () if op is None else (*born, *op.reads, *op.mutates):
            if op is not None and value in times:
                touched[Birth(value, times[value])] = (position, op.id)
        freed.update(Birth(value, times[value]) for value in died if value in times)
    return {birth: touch if birth in freed else None for birth, touch in touched.items()}
