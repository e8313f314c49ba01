"""A schedule in words: what it saves and costs, and what it does with each module.

turn        where the forward is over: nothing but recomputation and backward ops follow
kept        made by the forward and held at the turn
recomputed  held at the turn if nothing ran twice, and not held there by this schedule
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from lowtide.ir.bounds import least_peak_bytes
from lowtide.ir.graph import Graph, Op, Phase
from lowtide.ir.schedule import Schedule, straight
from lowtide.ir.simulate import allocator_of, simulate
from lowtide.ir.walk import walk
from lowtide.solvers.tiled_summary import counted, families, family_table, signed_seconds
from lowtide.text.names import ranges, together, unnumbered, without_middle
from lowtide.text.rounding import Unit, unit_for
from lowtide.text.table import Table, lined_up
from lowtide.text.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.solvers.solution import GraphSolution

_ROWS = 24
_LONGEST_NAME = 40
_LONGEST_OP = 48
_ROOT = "(outside of any module)"
_PROOF = {
    "optimal": "proven: the method finds nothing better",
    "feasible": "not proven to be the best",
}


@dataclass(frozen=True, slots=True)
class Share:
    """One call of a module: what of it is held at the turn, and what of it runs again.

    `plain_bytes` are held at the turn if nothing is recomputed. The schedule holds `kept_bytes` there, and
    gives up `recomputed_bytes` of the plain ones. Kept can be what plainly would not be: a value that
    others are recomputed from.
    """

    module: str
    call: int
    plain_bytes: int = 0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    ops_again: int = 0
    seconds_again: float = 0.0


class Fact(NamedTuple):
    """A line of a summary."""

    what: str
    figure: str
    remark: str


def explained(solution: GraphSolution, plain_peak_bytes: int | None = None) -> str:
    """The summary of a solution and what it does with each module, as plain text."""
    title = f"{solution.graph.name}, on {solution.graph.device}"
    facts = lined_up(summary(solution, plain_peak_bytes), frozenset([1]))
    remark = f"{solution.remark}\n\n" if solution.remark else ""
    found = families(solution.graph)
    slices = f"{family_table(found)}\n\n" if found else ""
    return f"{title}\n{facts}\n\n{remark}{slices}{share_table(solution)}"


def summary(solution: GraphSolution, plain_peak_bytes: int | None = None) -> tuple[Fact, ...]:
    """What a schedule saves, what it costs and how good it is.

    It is compared with the plain peak: the given one, or the solution's own, or that of the graph with
    everything kept.
    """
    graph = solution.graph
    plain, remark = plain_peak_bytes or solution.plain_peak_bytes, "as it is written"
    if plain is None:
        whole = graph if graph.tiled is None else graph.tiled.plain
        plain, remark = simulate(whole, straight(whole)).peak_bytes, "with everything kept"
    saved = plain - solution.peak_bytes
    unit = unit_for(plain)
    facts = [
        Fact("plain peak", _exact(plain, unit), remark),
        Fact("planned peak", _exact(solution.peak_bytes, unit), _running(solution.timeline.peak_op)),
        Fact("saved", _exact(saved, unit), _per_cent(saved, plain)),
        _extra_time(solution),
        *_slices(solution),
    ]
    if solution.budget_bytes is not None:
        spare = format_bytes(solution.budget_bytes - solution.peak_bytes)
        facts.append(Fact("budget", _exact(solution.budget_bytes, unit), f"{spare} to spare"))
    least = _running(least_peak_bytes(graph)[1])
    return (
        *facts,
        Fact("lower bound", _exact(solution.lower_bound_bytes, unit), f"any schedule holds that {least}"),
        Fact("status", solution.status.value, _proof(solution)),
        Fact("method", "", f"{solution.method}, in {format_seconds(solution.planning_seconds)}"),
    )


def shares(solution: GraphSolution) -> tuple[Share, ...]:
    """What becomes of each call of a module, those that hold or give up most first.

    Kept bytes sum to what the replay holds at the turn beside what is resident, ops and seconds to the
    solution's own.
    """
    graph = solution.graph
    held = allocator_of(graph.device).held
    plain, kept = (held_at_turn(graph, schedule) for schedule in (straight(graph), solution.schedule))
    found: dict[tuple[str, int], list[Share]] = {}

    def add(op: Op, share: Share) -> None:
        found.setdefault((op.module, op.call), []).append(share)

    for value in plain | kept:
        op, count = graph.ops[graph.creator[value]], held(graph.counted_bytes(value))
        part = (count * (value in plain), count * (value in kept), count * (value not in kept))
        add(op, Share(op.module, op.call, *part))
    for number, times in solution.recomputed.items():
        op = graph.ops[number]
        add(op, Share(op.module, op.call, ops_again=times, seconds_again=times * op.seconds))
    sums = (_joined(parts) for parts in found.values())
    return tuple(sorted((s for s in sums if s.plain_bytes or s.kept_bytes or s.ops_again), key=_size))


def held_at_turn(graph: Graph, schedule: Schedule) -> frozenset[int]:
    """What the step itself has made and holds when the forward is over."""
    alive: set[int] = set()
    for event in islice(walk(graph, schedule), turn_of(graph, schedule)):
        alive.update(event.born)
        alive.difference_update(event.died)
    return frozenset(alive)


def turn_of(graph: Graph, schedule: Schedule) -> int:
    """The step from which on nothing but recomputation and backward ops run.

    A forward op that waits until after the first backward op (statistics being written back) is late, and
    does not move it.
    """
    turn = 0
    done: set[int] = set()
    for event in walk(graph, schedule):
        if event.op is None:
            turn += turn == event.position  # what the op before it leaves behind belongs to the forward
        elif event.op.phase is Phase.BACKWARD:
            break
        elif event.op.id not in done:
            done.add(event.op.id)
            turn = event.position + 1
    return turn


def share_table(solution: GraphSolution, most: int = _ROWS) -> Table:
    """Modules that are treated alike in one row. The printed figures add up to the printed totals."""
    found = shares(solution)
    groups = _alike(found)
    hidden = [share for group in groups[most:] for share in group]
    shown = [*groups[:most], *([hidden] if hidden else [])]
    often = Counter(share.module for share in found)
    names = [_name(group, often) for group in groups[:most]]
    if hidden:
        names.append(f"… {len(groups) - most} more rows")
    parts, total = [_joined(group) for group in shown], _joined(found)
    unit, clock = unit_for(max(total.plain_bytes, total.kept_bytes)), _clock(total.seconds_again)
    columns = [  # a title, the cells, the total
        ("module", names, "held when the forward is over"),
        ("calls", [f"{len(group)}" for group in shown], f"{len(found)}"),
        _sizes(f"plain {unit.name}", unit, [part.plain_bytes for part in parts]),
        _sizes("kept", unit, [part.kept_bytes for part in parts]),
        _sizes("recomputed", unit, [part.recomputed_bytes for part in parts]),
        ("ops again", [f"{part.ops_again:,}" for part in parts], f"{total.ops_again:,}"),
    ]
    if solution.seconds:
        columns.append(_sizes(clock.name, clock, [_nanoseconds(part.seconds_again) for part in parts]))
    titles, cells, totals = zip(*columns, strict=True)
    rows = tuple(zip(*cells, strict=True))
    return Table(titles, rows, totals, numbers=frozenset(range(1, len(columns))))


# Rows -----------------------------------------------------------------------------------------------


def _alike(found: Iterable[Share]) -> list[list[Share]]:
    """Calls of which as much is kept, given up and run again, and that differ in a number alone."""
    groups: dict[object, list[Share]] = {}
    for share in found:
        figures = (share.plain_bytes, share.kept_bytes, share.recomputed_bytes, share.ops_again)
        groups.setdefault((unnumbered(share.module), figures), []).append(share)
    return sorted(groups.values(), key=lambda group: _size(_joined(group)))


def _name(group: Sequence[Share], often: Mapping[str, int]) -> str:
    modules = list(dict.fromkeys(share.module for share in group))
    name = together(modules) or _ROOT
    if len(modules) == 1 and len(group) < often[modules[0]]:  # other calls of it are treated otherwise
        name = f"{name}, calls {ranges([share.call for share in group])}"
    return without_middle(name, _LONGEST_NAME)


def _joined(parts: Sequence[Share]) -> Share:
    return Share(
        module=parts[0].module if parts else "",
        call=parts[0].call if parts else 0,
        plain_bytes=sum(part.plain_bytes for part in parts),
        kept_bytes=sum(part.kept_bytes for part in parts),
        recomputed_bytes=sum(part.recomputed_bytes for part in parts),
        ops_again=sum(part.ops_again for part in parts),
        seconds_again=math.fsum(part.seconds_again for part in parts),
    )


def _size(share: Share) -> tuple[int, int, str, int]:
    """What sorts the largest first."""
    return -share.recomputed_bytes - share.kept_bytes, -share.ops_again, share.module, share.call


def _sizes(title: str, unit: Unit, counts: Sequence[int]) -> tuple[str, list[str], str]:
    return title, unit.column(counts), unit.text(sum(counts))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _clock(seconds: float) -> Unit:
    """What times that sum to `seconds` are counted in."""
    if seconds >= 10:
        return Unit("s", 10**9, 2)
    return Unit("ms", 10**6, 2) if seconds >= 1e-3 else Unit("µs", 10**3, 1)


# Facts ----------------------------------------------------------------------------------------------


def _exact(count: int, unit: Unit) -> str:
    return f"{unit.text(count)} {unit.name}"


def _per_cent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _running(op: Op | None) -> str:
    return "before the first op" if op is None else f"at {without_middle(op.label, _LONGEST_OP)}"


def _extra_time(solution: GraphSolution) -> Fact:
    count = sum(solution.recomputed.values())
    ops = f"{count:,} ops run again" if count != 1 else "1 op runs again"
    if not solution.seconds:
        return Fact("extra time", "unknown", ops)
    part = _per_cent(solution.extra_seconds, solution.seconds)
    return Fact("extra time", format_seconds(solution.extra_seconds), f"{part} of the step; {ops}")


def _slices(solution: GraphSolution) -> Iterator[Fact]:
    """What slices take beyond what their ops took at once, where there are any."""
    found = families(solution.graph)
    if not found:
        return
    if not solution.seconds:
        yield Fact("slices", "unknown", counted(found))
        return
    extra = math.fsum(family.extra_seconds or 0.0 for family in found)
    part = _per_cent(extra, solution.seconds - extra)
    yield Fact("slices", signed_seconds(extra), f"{part} of the plain step; {counted(found)}")


def _proof(solution: GraphSolution) -> str:
    known, least = _PROOF[solution.status.value], solution.least_extra_seconds
    if solution.status == "optimal" or not least:
        return known
    return f"{known}; within the budget it takes at least {format_seconds(least)}"
