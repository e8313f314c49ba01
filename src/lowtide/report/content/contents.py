"""What a report on a plan has to tell, gathered from the plan: figures, curves, layers, frontier and arena.

Nothing here is drawn: `page` makes a page of it, `snapshot` and `perfetto` export its curves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from lowtide.arena.layout import Layout, lay_out
from lowtide.chain.plan import Plan
from lowtide.chain.unroll import unrolled_graph, unrolled_schedule
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import EXACT, Bytes
from lowtide.report.content.curve import Curve
from lowtide.report.content.strip import Piece, strip_of
from lowtide.report.text.console import per_cent
from lowtide.report.text.planned import proof
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.solvers.summary import Fact, summary
from lowtide.text.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.cost.measure import Reading

FRONTIER, ARENA = "frontier", "arena"  # parts of a report that may be absent
_NO_FRONTIER = "No frontier was asked for."
_FRONTIER_OF_LAYERS = "This is a plan of layers, and a frontier is planned op by op: plan with --method auto."
_ARENA_OF_LAYERS = "The plan file holds layers, not ops, and it is results of ops that lie in an arena."
_NO_OPS = (
    "The plan file holds layers, not ops: the curves are of its chain, a forward and a backward a layer."
)
_KEPT = "The plain curve is the captured step with everything kept; as it is written the step peaks at {}."
_LARGER_BLOCKS = (
    "CUDA's allocator may hand out larger blocks than asked for: with them the plain step peaks at {}; its "
    "curve shows what is asked for."
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A curve that was measured: whose it is, and the bytes held after each of the allocator's events."""

    name: str
    peak_bytes: int
    predicted_bytes: int
    events: Bytes


@dataclass(frozen=True)
class Contents:
    """Everything that is told about one plan.

    The peaks are those that are promised: on CUDA with blocks that are larger than asked for. `absent` says,
    for a part that the plan has nothing to fill with, why. `about` names what made the plan.
    """

    title: str
    solution: Solution | GraphSolution
    facts: tuple[Fact, ...]
    plain: Curve
    planned: Curve
    plain_peak_bytes: int
    planned_peak_bytes: int
    strip: tuple[Piece, ...]
    frontier: tuple[GraphSolution, ...] = ()
    layout: Layout | None = None
    measured: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


def of_ops(
    solution: GraphSolution,
    plain: Curve | None = None,
    *,
    title: str = "",
    frontier: Sequence[GraphSolution] = (),
    notes: Sequence[str] = (),
) -> Contents:
    """The contents for a plan of ops. `plain` is the step as it is written, where it is known.

    Raises:
        MissingExtra, BadRequest: see `lay_out`.
    """
    graph = solution.graph
    whole = graph if graph.tiled is None else graph.tiled.plain
    shown = plain or Curve("plain", whole, straight(whole))
    plain_bytes = solution.plain_peak_bytes or shown.timeline.peak_bytes
    otherwise = _KEPT if plain is None else _LARGER_BLOCKS
    more = [] if plain_bytes == shown.timeline.peak_bytes else [otherwise.format(format_bytes(plain_bytes))]
    return Contents(
        title=title or f"{graph.name}, on {graph.device}",
        solution=solution,
        facts=_in_bytes(solution, plain_bytes),
        plain=shown,
        planned=Curve(f"planned by {solution.method}", graph, solution.schedule),
        plain_peak_bytes=plain_bytes,
        planned_peak_bytes=solution.peak_bytes,
        strip=strip_of(solution),
        frontier=tuple(frontier),
        layout=lay_out(graph, solution.schedule),
        notes=(*more, *notes),
        absent={} if frontier else {FRONTIER: _NO_FRONTIER},
    )


def of_layers(
    solution: Solution,
    plain: Curve | None = None,
    planned: Curve | None = None,
    *,
    title: str = "",
    notes: Sequence[str] = (),
) -> Contents:
    """The contents for a plan of layers. The curves are dry runs of the model, or else those of the chain."""
    chain = solution.chain
    absent, layout, more = {FRONTIER: _FRONTIER_OF_LAYERS}, None, []
    if plain is None or planned is None:
        graph = unrolled_graph(chain)
        plain = Curve("plain", graph, unrolled_schedule(chain, Plan()), EXACT)
        planned = Curve(
            f"planned by {solution.method}", graph, unrolled_schedule(chain, solution.plan), EXACT
        )
        absent[ARENA] = _ARENA_OF_LAYERS
        more.append(_NO_OPS)
    else:
        layout = lay_out(planned.graph, planned.schedule)
    tried = solution.confirmation
    peaks = (plain.timeline.peak_bytes, planned.timeline.peak_bytes)
    if tried is not None:
        peaks = (tried.plain_peak_bytes, tried.peak_bytes)
    if layout is not None and peaks[0] != plain.timeline.peak_bytes:
        more.append(_LARGER_BLOCKS.format(format_bytes(peaks[0])))
    return Contents(
        title=title or chain.name,
        solution=solution,
        facts=_facts(solution, *peaks),
        plain=plain,
        planned=planned,
        plain_peak_bytes=peaks[0],
        planned_peak_bytes=peaks[1],
        strip=strip_of(solution),
        layout=layout,
        notes=(*more, *notes),
        absent=absent,
    )


def with_readings(contents: Contents, plain: Reading | None, planned: Reading | None) -> Contents:
    """The same, with what real steps held beside what was predicted; None: the device ran out of memory."""
    found, facts, notes = [], [], []
    predicted = (contents.plain_peak_bytes, contents.planned_peak_bytes)
    for curve, reading, expected in zip(
        (contents.plain, contents.planned), (plain, planned), predicted, strict=True
    ):
        if reading is None:
            notes.append(f"{curve.name}: the device ran out of memory when it was measured.")
            continue
        events = np.asarray(reading.timeline, dtype=np.int64)
        found.append(Measured(curve.name, reading.peak_bytes, expected, events))
        off = 100 * (expected / reading.peak_bytes - 1)
        remark = f"predicted {format_bytes(expected)}, {off:+.2f} %"
        facts.append(Fact(f"measured, {curve.name}", format_bytes(reading.peak_bytes), remark))
    return replace(
        contents,
        facts=(*contents.facts, *facts),
        measured=tuple(found),
        notes=(*notes, *contents.notes),
    )


def _in_bytes(solution: GraphSolution, plain_bytes: int) -> tuple[Fact, ...]:
    """The summary of a plan of ops, each size in the unit that suits it, as in the figures of a page."""
    sizes = {
        "plain peak": plain_bytes,
        "planned peak": solution.peak_bytes,
        "saved": plain_bytes - solution.peak_bytes,
        "budget": solution.budget_bytes or 0,
        "lower bound": solution.lower_bound_bytes,
    }
    return tuple(
        fact._replace(figure=format_bytes(sizes[fact.what])) if fact.what in sizes else fact
        for fact in summary(solution, plain_bytes)
    )


def _facts(solution: Solution, plain_bytes: int, peak_bytes: int) -> tuple[Fact, ...]:
    """As `summary` has them for a plan of ops. What a dry run confirmed comes before what the chain says."""
    tried = solution.confirmation
    if tried is not None:
        remark, seconds, extra = "in a dry run of the model", tried.plain_seconds, tried.extra_seconds
        again = f"{tried.recomputed_ops} ops"
    else:
        remark, seconds, extra = "of the chain of layers", solution.chain.seconds, solution.extra_seconds
        again = f"{solution.plan.recomputed_layers()} layers"
    saved = plain_bytes - peak_bytes
    timed = solution.chain.timed and seconds > 0
    part = f"{per_cent(extra / seconds)} of the step; " if timed else ""
    facts = [
        Fact("plain peak", format_bytes(plain_bytes), remark),
        Fact("planned peak", format_bytes(peak_bytes), remark),
        Fact("saved", format_bytes(saved), per_cent(saved / plain_bytes) if plain_bytes else ""),
        Fact("extra time", format_seconds(extra) if timed else "unknown", f"{part}{again} run again"),
    ]
    if solution.budget_bytes is not None:
        spare = format_bytes(solution.budget_bytes - peak_bytes)
        facts.append(Fact("budget", format_bytes(solution.budget_bytes), f"{spare} to spare"))
    lowest = format_bytes(solution.lower_bound_bytes)
    return (
        *facts,
        Fact("lower bound", lowest, "no plan for these layers peaks lower"),
        Fact("status", solution.status.value, proof(solution)),
        Fact("method", "", f"{solution.method}, in {format_seconds(solution.planning_seconds)}"),
    )
