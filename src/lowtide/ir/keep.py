"""A set of values to keep, turned into a schedule: what is not kept is recomputed in the backward.

    forward   the ops before the first one of another phase
    kept      stays from its op to the last op that needs it
    segment   ops whose values are not kept, joined where one reads what the other makes

No op of a segment reads what another segment makes, so each can be recomputed from kept and resident
values alone. An op that makes several values keeps all of them or none: computing it again would make
all of them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Phase
from lowtide.ir.recomputable import repeatable
from lowtide.ir.schedule import Schedule, in_order


def keep_only(graph: Graph, kept: AbstractSet[int], *, is_part: bool = False) -> Schedule:
    """A step that holds no more of the forward than `kept` when the backward begins to need it.

    The forward runs in graph order; every value is freed after the last op that touches it, and one
    that is not kept after the last forward op that does. When a backward op reads a value that is gone,
    its whole segment is recomputed first, in graph order, less the ops that no backward op depends on;
    what that makes is freed after its last use. So an op runs at most twice.

    Two things differ from the letter of `kept`:

    * What `droppable` leaves out is kept too, and so is what is made together with something kept.
    * The segment that the backward begins in is not given up if the forward ends in it, with every other
      segment over before it began: it would be recomputed at once. Unless the graph `is_part` of a step:
      then others run before its backward begins.

    Keeping everything is `straight(graph)`.

    Raises:
        BadRequest: `kept` names a value that the forward does not create.
    """
    if strange := set(kept) - forward_values(graph):
        raise BadRequest(
            f"cannot keep value {min(strange)}: the forward of {graph.name} does not create it. "
            "Name values that forward ops create; resident ones are there anyway."
        )
    parts = segments(graph, kept)
    wanted_by, needed = _wanted(graph, parts)
    if wanted_by and not is_part:
        _leave_last(parts, wanted_by)
    again = [[op for op in part if op in needed] if n in wanted_by else [] for n, part in enumerate(parts)]

    turn = _turn(graph)
    order = list(range(turn))
    for op in range(turn, len(graph.ops)):
        for number in sorted(wanted_by):
            if wanted_by[number] == op:
                order.extend(again[number])
        order.append(op)
    return in_order(graph, order)


def forward_values(graph: Graph) -> frozenset[int]:
    """What the forward creates."""
    return frozenset(value for op in graph.ops[: _turn(graph)] for value in op.creates)


def droppable(graph: Graph) -> frozenset[int]:
    """The forward ops that may be computed a second time, with the same result."""
    turn = _turn(graph)
    return frozenset(op for op in repeatable(graph) if op < turn)


def segments(graph: Graph, kept: AbstractSet[int]) -> tuple[tuple[int, ...], ...]:
    """The ops to recompute if `kept` is kept, joined where one reads what the other makes; in graph order."""
    dropped = [op for op in sorted(droppable(graph)) if kept.isdisjoint(graph.ops[op].creates)]
    leader = {op: op for op in dropped}

    def leader_of(op: int) -> int:
        while leader[op] != op:
            leader[op] = op = leader[leader[op]]
        return op

    for op in dropped:
        for maker in makers(graph, op):
            if maker in leader:
                leader[leader_of(maker)] = leader_of(op)
    found: dict[int, list[int]] = {}
    for op in dropped:
        found.setdefault(leader_of(op), []).append(op)
    return tuple(sorted(map(tuple, found.values())))


def makers(graph: Graph, op: int) -> set[int]:
    """The ops that make what `op` reads."""
    return {graph.creator[value] for value in graph.ops[op].reads if value in graph.creator}


def _turn(graph: Graph) -> int:
    """Where the forward is over."""
    return next((op.id for op in graph.ops if op.phase is not Phase.FORWARD), len(graph.ops))


def _wanted(graph: Graph, parts: Sequence[Sequence[int]]) -> tuple[dict[int, int], set[int]]:
    """For each segment to recompute the first backward op that reads from it; and the ops they depend on."""
    segment_of = {op: number for number, part in enumerate(parts) for op in part}
    wanted_by: dict[int, int] = {}
    needed: set[int] = set()
    for op in range(_turn(graph), len(graph.ops)):
        for maker in makers(graph, op) & segment_of.keys():
            wanted_by.setdefault(segment_of[maker], op)
            needed.add(maker)
    for op in sorted(segment_of, reverse=True):
        if op in needed:
            needed |= makers(graph, op) & segment_of.keys()
    return wanted_by, needed


def _leave_last(parts: Sequence[Sequence[int]], wanted_by: dict[int, int]) -> None:
    """Do not recompute the segment that the backward begins in, if the forward ends in it."""
    first = min(wanted_by, key=lambda number: (wanted_by[number], -number))
    if all(parts[other][-1] < parts[first][0] for other in wanted_by if other != first):
        del wanted_by[first]
