"""Methods side by side as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from lowtide.report.text.console import PAGE, console, per_cent
from lowtide.text.names import listed
from lowtide.text.rounding import Unit, unit_for
from lowtide.text.units import format_bytes

if TYPE_CHECKING:
    from lowtide.planner.compare import Comparison, Row

_NOTHING = "–"
_CHECKPOINTS = 34  # letters; fewer where measured columns need the room
_CHECKPOINTS_BESIDE_MEASURED = 19


def print_comparison(title: str, comparison: Comparison, notes: Sequence[str] = ()) -> None:
    """Print a comparison to stdout: a row a method, then what went wrong, then the bounds."""
    page = console(PAGE)
    page.print(Text(f"{title}: {comparison.layers} layers", style="bold"))
    page.print()
    page.print(_table(comparison))
    page.print()
    for row in comparison.rows:
        if row.problem is not None:
            problem = Text(f"{row.method}: ", style="bold").append(row.problem, style="not bold")
            page.print(problem, soft_wrap=False)
    page.print(f"lower bound: {format_bytes(comparison.lower_bound_bytes)}, for any plan of these layers")
    if comparison.budget_bytes is not None:
        page.print(f"budget: {format_bytes(comparison.budget_bytes)}")
    for note in notes:
        page.print(Text(f"note: {note}", style="dim"))


def _table(comparison: Comparison) -> Table:
    unit = unit_for(comparison.rows[0].predicted_peak_bytes or 0)
    table = Table(box=None, pad_edge=False, header_style="underline")
    table.add_column("method")
    table.add_column(f"peak {unit.name}", justify="right")
    if comparison.measured:
        table.add_column("measured", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("extra time" if comparison.timed else "ops again", justify="right")
    if comparison.measured:
        table.add_column("measured", justify="right")
    table.add_column("status")
    table.add_column("checkpoints", no_wrap=True)
    for row in comparison.rows:
        table.add_row(*_cells(row, comparison, unit))
    return table


def _cells(row: Row, comparison: Comparison, unit: Unit) -> list[str | Text]:
    again = _part_added(row.extra_seconds_ratio) if comparison.timed else _number(row.recomputed_ops)
    measured = comparison.measured
    most = _CHECKPOINTS_BESIDE_MEASURED if measured else _CHECKPOINTS
    return [
        row.method,
        _bytes(row.predicted_peak_bytes, unit),
        *([_bytes(row.measured_peak_bytes, unit)] if measured else []),
        _NOTHING if row.ratio is None else f"{row.ratio:.3f}",
        again,
        *([_part_added(_less_one(row.measured_seconds_ratio))] if measured else []),
        row.status or Text("no plan", style="red"),
        listed(row.checkpoints, most) or ("keep all" if row.plan is not None else _NOTHING),
    ]


def _bytes(count: int | None, unit: Unit) -> str:
    return _NOTHING if count is None else unit.text(count)


def _number(count: int | None) -> str:
    return _NOTHING if count is None else f"{count:,}"


def _part_added(part: float | None) -> str:
    return _NOTHING if part is None else per_cent(part, signed=True)


def _less_one(ratio: float | None) -> float | None:
    return None if ratio is None else ratio - 1
