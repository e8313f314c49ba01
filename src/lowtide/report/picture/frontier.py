"""What memory costs in time: schedules of one graph within many budgets, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.text import Text

from lowtide.errors import BadRequest
from lowtide.ir.bounds import least_peak_bytes
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.report.picture.plot import painted, unit_of, write_picture
from lowtide.report.text.console import PAGE, console, per_cent, shown
from lowtide.solvers.solution import GraphSolution
from lowtide.text.names import without_middle
from lowtide.text.rounding import unit_for
from lowtide.text.table import Table
from lowtide.text.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
)  # Okabe and Ito's, as in the other pictures
_MARKS = ("o", "s", "^", "D", "v")
_TEXT = 9
_MARGIN = 0.06  # beside the points, as a part of what they span
_LONGEST_OP = 40
_NOTHING = "–"


class FrontierPoint(NamedTuple):
    """A schedule: what it holds, and what it adds: per cent of the step, or ops where no times are known."""

    peak_bytes: int
    added: float
    method: str


def print_frontier(title: str, solutions: Sequence[GraphSolution], notes: Sequence[str] = ()) -> None:
    """Print schedules of one graph to stdout, from the one that holds most to the one that holds least."""
    plain_bytes = _plain_bytes(solutions)
    page = console(PAGE)
    page.print(Text(title, style="bold"))
    page.print()
    page.print(shown(_table(solutions, plain_bytes)))
    page.print()
    op = least_peak_bytes(solutions[0].graph)[1]
    where = "" if op is None else f" at {without_middle(op.label, _LONGEST_OP)}"
    page.print(
        Text(f"lower bound: {format_bytes(solutions[0].lower_bound_bytes)}, held by any schedule{where}")
    )
    for note in notes:
        page.print(Text(f"note: {note}", style="dim"))


def draw_frontier(title: str, solutions: Sequence[GraphSolution], path: Path) -> None:
    """Draw peak against extra time of schedules of one graph, and write the picture to `path` (.png, .svg).

    The line is what a budget buys: within it no schedule of these adds less. Left of the lower bound there
    is nothing. Where no times are known, ops that run again stand for them.

    Raises:
        MissingExtra: matplotlib is not installed.
        BadFile: the picture cannot be written.
    """
    write_picture(frontier_picture(title, solutions, path.suffix.lower().removeprefix(".")), path)


def frontier_picture(title: str, solutions: Sequence[GraphSolution], kind: str) -> bytes:
    """The same as a file of `kind` ('png' or 'svg')."""
    plain_bytes = _plain_bytes(solutions)
    bound_bytes = solutions[0].lower_bound_bytes
    points = points_of(solutions)

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        unit = unit_of(plain_bytes)
        _draw_bought(axes, points, plain_bytes, unit)
        _draw_points(axes, points, unit)
        _draw_ends(axes, plain_bytes, bound_bytes, unit)
        axes.set_title(title, loc="left", weight="bold", pad=12)
        axes.set_xlabel(f"peak ({unit[0]})")
        axes.set_ylabel(
            "extra time of a step (%)" if _timed(solutions) else "ops run again (no times are known)"
        )
        axes.legend(loc="upper right", frameon=False)

    return painted(kind, (10, 5.4), paint)


def points_of(solutions: Iterable[GraphSolution]) -> list[FrontierPoint]:
    """A point a schedule, in the order in which they are given."""
    solutions = list(solutions)
    timed = _timed(solutions)
    return [
        FrontierPoint(
            solution.peak_bytes,
            100 * solution.extra_seconds_ratio if timed else float(sum(solution.recomputed.values())),
            solution.method,
        )
        for solution in solutions
    ]


def best(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    """Those than which no other holds less and adds no more: from the lowest peak to the least added."""
    found: list[FrontierPoint] = []
    for point in sorted(points):
        if not found or point.added < found[-1].added:
            found.append(point)
    return found


# The table ------------------------------------------------------------------------------------------


def _table(solutions: Sequence[GraphSolution], plain_bytes: int) -> Table:
    unit = unit_for(plain_bytes)
    everything = (_NOTHING, unit.text(plain_bytes), per_cent(1.0), "0", "+0.0 %", "0", "optimal", "keep-all")
    ordered = sorted(solutions, key=lambda solution: (-solution.peak_bytes, solution.extra_seconds))
    timed = _timed(solutions)
    rows = [
        (
            _NOTHING if solution.budget_bytes is None else unit.text(solution.budget_bytes),
            unit.text(solution.peak_bytes),
            per_cent(solution.peak_bytes / plain_bytes),
            format_seconds(solution.extra_seconds) if timed else "unknown",
            per_cent(solution.extra_seconds_ratio, signed=True) if timed else _NOTHING,
            f"{sum(solution.recomputed.values()):,}",
            solution.status.value,
            solution.method,
        )
        for solution in ordered
    ]
    return Table(
        titles=(
            f"budget {unit.name}",
            f"peak {unit.name}",
            "of plain",
            "extra time",
            "of the step",
            "ops again",
            "status",
            "method",
        ),
        rows=(everything, *rows),
        numbers=frozenset(range(6)),
    )


# The picture ----------------------------------------------------------------------------------------


def _draw_bought(
    axes: Axes, points: Sequence[FrontierPoint], plain_bytes: int, unit: tuple[str, int]
) -> None:
    """What the least time within a budget is, for every budget between the lowest peak and the plain one."""
    steps = best([*points, FrontierPoint(plain_bytes, 0.0, "")])
    ends = [*steps, FrontierPoint(max(plain_bytes, steps[-1].peak_bytes), steps[-1].added, "")]
    axes.step(
        [point.peak_bytes / unit[1] for point in ends],
        [point.added for point in ends],
        where="post",
        color="0.6",
        linewidth=1.2,
        label="the least within a budget",
        zorder=2,
    )


def _draw_points(axes: Axes, points: Sequence[FrontierPoint], unit: tuple[str, int]) -> None:
    for number, method in enumerate(dict.fromkeys(point.method for point in points)):
        own = [point for point in points if point.method == method]
        axes.scatter(
            [point.peak_bytes / unit[1] for point in own],
            [point.added for point in own],
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKS[number % len(_MARKS)],
            label=method,
            zorder=3,
        )


def _draw_ends(axes: Axes, plain_bytes: int, bound_bytes: int, unit: tuple[str, int]) -> None:
    """Keep-all, the lower bound, and the shade of what no schedule reaches; room on both sides."""
    plain, bound = plain_bytes / unit[1], bound_bytes / unit[1]
    axes.scatter(
        [plain],
        [0],
        marker="*",
        s=110,
        color="black",
        label=f"keep-all {format_bytes(plain_bytes)}",
        zorder=4,
    )
    axes.axvline(
        bound,
        color="0.35",
        linestyle=(0, (2, 2)),
        linewidth=1.2,
        label=f"lower bound {format_bytes(bound_bytes)}",
        zorder=1,
    )
    room = _MARGIN * (plain - bound) or 1
    axes.axvspan(bound - room, bound, color="0.93", linewidth=0, zorder=0)
    axes.set_xlim(bound - room, max(plain, axes.dataLim.x1) + room)
    axes.set_ylim(bottom=-_MARGIN * (axes.dataLim.y1 or 1), top=(1 + 2 * _MARGIN) * (axes.dataLim.y1 or 1))
    whole = plain or 1
    shares = axes.secondary_xaxis(
        "top", functions=(partial(np.multiply, 100 / whole), partial(np.multiply, whole / 100))
    )
    shares.xaxis.set_major_formatter("{x:.0f} %")
    shares.set_xlabel("of keep-all", size=_TEXT, color="0.35", labelpad=7)
    shares.tick_params(labelsize=_TEXT, colors="0.35")
    shares.spines["top"].set_visible(False)


def _plain_bytes(solutions: Sequence[GraphSolution]) -> int:
    """The peak with everything kept."""
    if not solutions:
        raise BadRequest(
            "there is no schedule to show: give the solutions of a graph within several budgets."
        )
    graph = solutions[0].graph
    return simulate(graph, straight(graph)).peak_bytes


def _timed(solutions: Sequence[GraphSolution]) -> bool:
    return any(solution.seconds for solution in solutions)
