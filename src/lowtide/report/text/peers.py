"""Ways to train a step side by side as text: what each was measured to hold and to take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from lowtide.planner.peer_ways import IN_ONE_PIECE, PeerKind
from lowtide.report.text.console import PAGE, console, shown
from lowtide.text.rounding import Unit, unit_for
from lowtide.text.table import Table
from lowtide.text.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.planner.peer_ways import PeerRow
    from lowtide.planner.peers import PeerComparison

_NOTHING = "–"
_MANY = 4  # labels in a line
_COMPILED = "compile 0.5 is torch.compile with an activation_memory_budget of 0.5"
_WITHIN = "a plan within another way is within the peak of that"


def print_peers(title: str, comparison: PeerComparison, notes: Sequence[str] = ()) -> None:
    """Print ways to train to stdout: a row each, then what went wrong, then how things are done."""
    page = console(PAGE)
    page.print(Text(title, style="bold"))
    page.print()
    page.print(shown(peers_table(comparison)))
    page.print()
    for labels, problem in _together(comparison.rows, problems):
        page.print(Text(f"{labels}: ", style="bold").append(problem, style="not bold"))
    for note in (*_legend(comparison.rows), *_remarks(comparison.rows), *notes):
        page.print(Text(f"note: {note}", style="dim"))
    if comparison.interrupted:
        page.print(Text("interrupted: not every way was tried", style="bold"))


def peers_table(comparison: PeerComparison) -> Table:
    """A row a way; what was not measured has dashes."""
    peaks = [row.reading.peak_bytes for row in comparison.rows if row.reading is not None]
    unit = unit_for(max(peaks, default=0))
    return Table(
        titles=("way to train", f"peak {unit.name}", "predicted", "a step", "of eager"),
        rows=tuple(_cells(row, unit) for row in _told(comparison.rows)),
        numbers=frozenset(range(1, 5)),
    )


def problems(row: PeerRow) -> Iterator[str]:
    """What is wrong with a row, if something is."""
    if row.problem is not None:
        yield row.problem
    if row.reading is not None and row.reading.difference is not None:
        yield f"it does not train as eager does: {row.reading.difference}"
    if row.within_budget is False and row.reading is not None and row.budget_bytes is not None:
        yield f"{format_bytes(row.reading.peak_bytes - row.budget_bytes)} over its budget"


def _told(rows: Sequence[PeerRow]) -> list[PeerRow]:
    """The rows but for plans with tiles that came out as those without."""
    return [row for row in rows if row.problem != IN_ONE_PIECE]


def _legend(rows: Sequence[PeerRow]) -> Iterator[str]:
    """What labels mean."""
    if any(row.kind is PeerKind.COMPILED for row in rows):
        yield _COMPILED
    if any(" within " in row.label for row in rows):
        yield _WITHIN


def _remarks(rows: Sequence[PeerRow]) -> Iterator[str]:
    """What is to be known of rows."""
    for labels, remark in _together(rows, lambda row: [row.remark] if row.remark else []):
        yield f"{labels}: {remark}"
    if whole := len(rows) - len(_told(rows)):
        yield f"within {whole} of the budgets nothing runs in slices, so that tiles change nothing"


def _together(
    rows: Sequence[PeerRow], said_of: Callable[[PeerRow], Iterable[str]]
) -> Iterator[tuple[str, str]]:
    """What is said of rows, once for all of which it is said."""
    labels: dict[str, list[str]] = {}
    for row in _told(rows):
        for said in said_of(row):
            labels.setdefault(said, []).append(row.label)
    for said, of in labels.items():
        yield ", ".join(of) if len(of) < _MANY else f"{of[0]} and {len(of) - 1} more", said


def _cells(row: PeerRow, unit: Unit) -> tuple[str, ...]:
    predicted = _NOTHING if row.predicted_peak_bytes is None else unit.text(row.predicted_peak_bytes)
    if row.reading is None:
        return row.label, _NOTHING, predicted, _NOTHING, _NOTHING
    reading = row.reading
    return (
        row.label,
        unit.text(reading.peak_bytes),
        predicted,
        format_seconds(reading.seconds),
        _NOTHING if reading.eager_seconds is None else f"{reading.seconds / reading.eager_seconds:.2f}×",
    )
