"""A graph that runs by a schedule of its own, whatever is planned around it: two ops, nothing to be decided.

Where steps begin alike and part later, what they have in common runs before anybody knows which of them it
will be. It cannot follow the plan of one, so it keeps as little as it can, and the rest of each is planned
around that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lowtide.aot.draw import Drawn
from lowtide.ir.graph import Graph, Op, Phase, Ref, Role, Tensor, Value
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import allocator_of, simulate
from lowtide.ir.walk import walk

TARGET = "lowtide.settled"


def settled(drawn: Drawn, schedule: Schedule) -> Drawn:
    """`drawn` with one op for all of its forward under `schedule`, and one for all of its backward.

    Values keep their numbers; those that neither come nor go weigh nothing. What the backward takes of these
    is one value more.
    """
    graph = drawn.graph
    handed = {value for value in (*drawn.made, *drawn.gradients) if value is not None}
    seen = handed | graph.outputs | set(graph.resident)
    forward, backward, alive = _halves(graph, schedule)
    kept = _bytes(graph, alive - seen)
    values = tuple(value if value.id in seen else replace(value, bytes=0) for value in graph.values)
    tensors = tuple(
        look if look.value in seen else replace(look, shape=(0,), stride=(1,), offset=0)
        for look in graph.tensors
    )
    held = Value(len(values), kept, Role.INTERMEDIATE, "kept for the backward", device=graph.device)
    look = Tensor(len(tensors), held.id, (kept,), (1,), 0, "uint8")
    looks = {each.value: each.id for each in reversed((*tensors, look)) if each.value in seen | {held.id}}
    made = forward.made & seen
    there = simulate(graph, schedule).resident_bytes + kept + _bytes(graph, made)
    ops = (
        forward.as_one(0, looks, reads=forward.read & seen, creates=made | {held.id}, there=there),
        backward.as_one(
            1,
            looks,
            reads=(backward.read & seen) | {held.id},
            creates=backward.made & seen,
            there=there + _bytes(graph, backward.made & seen),
        ),
    )
    whole = replace(graph, ops=ops, values=(*values, held), tensors=(*tensors, look), tiled=None)
    return replace(drawn, graph=whole)


@dataclass(frozen=True)
class _HalfRun:
    """What one half of a graph does under a schedule."""

    phase: Phase
    ops: tuple[Op, ...]  # as they run, those included that run again
    made: frozenset[int]  # for the first time
    peak_bytes: int

    @property
    def read(self) -> frozenset[int]:
        """What comes from outside."""
        return frozenset(value for op in self.ops for value in op.reads) - self.made

    def as_one(
        self,
        number: int,
        looks: Mapping[int, int],
        *,
        reads: Iterable[int],
        creates: Iterable[int],
        there: int,
    ) -> Op:
        """One op for all of it, which takes for a while what its peak is above what is `there`."""
        created, read = tuple(sorted(creates)), tuple(sorted(reads))
        changed = {value for op in self.ops for value in (*op.mutates, *op.updates)}
        mutates = tuple(sorted(value for value in changed - {*created} if value in looks))
        return Op(
            id=number,
            target=TARGET,
            args=tuple(Ref(looks[value]) for value in sorted({*read, *mutates})),
            kwargs=(),
            outputs=tuple(looks[value] for value in created),
            reads=read,
            creates=created,
            mutates=mutates,
            phase=self.phase,
            random=True,  # it is never run again
            workspace_bytes=max(0, self.peak_bytes - there),
            seconds=sum(op.seconds for op in self.ops),
        )


def _halves(graph: Graph, schedule: Schedule) -> tuple[_HalfRun, _HalfRun, set[int]]:
    """Forward and backward as they run, and what was made and is there between them."""
    events, done, last = list(walk(graph, schedule)), set[int](), -1
    for event in events:
        if event.op is not None and event.op.id not in done:
            done.add(event.op.id)
            last = event.position if event.op.phase is Phase.FORWARD else last
    while last + 1 < len(events) and events[last + 1].op is None:
        last += 1
    live = simulate(graph, schedule).live_bytes
    alive: set[int] = set()
    for event in events[: last + 1]:
        alive = (alive | {*event.born}) - {*event.died}
    halves = []
    for phase, part in ((Phase.FORWARD, events[: last + 1]), (Phase.BACKWARD, events[last + 1 :])):
        ops = tuple(event.op for event in part if event.op is not None)
        made = frozenset(value for op in ops if op.phase is phase for value in op.creates)
        peak = max((int(live[event.position]) for event in part), default=0)
        halves.append(_HalfRun(phase, ops, made, peak))
    return halves[0], halves[1], alive


def _bytes(graph: Graph, values: Iterable[int]) -> int:
    allocator = allocator_of(graph.device)
    return sum(allocator.held(graph.counted_bytes(value)) for value in values)
