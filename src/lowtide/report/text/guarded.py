"""A step held against what it may hold, or did hold, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from lowtide.planner.baseline import Judgement, Verdict
from lowtide.report.text.console import PAGE, console, shown
from lowtide.report.text.tables import made_to_fit
from lowtide.report.text.terminal import headline
from lowtide.text.rounding import unit_for
from lowtide.text.table import Table
from lowtide.text.units import format_bytes

if TYPE_CHECKING:
    from lowtide.planner.fit import Fit

_MODULES_SHOWN = 10
_STYLES = {Verdict.GREW: "bold red", Verdict.HELD: "bold green", Verdict.FELL: "bold green"}
_REFRESH = "it is lower than the baseline: write a new one with --write-baseline, so that it stays so"


def print_check(
    fit: Fit,
    sizes: Mapping[str, int],
    judgement: Judgement | None,
    written: Path | None,
    notes: Sequence[str] = (),
) -> None:
    """Print to stdout what was checked, how it went, and, where it went wrong, by whom."""
    page = console(PAGE)
    page.print(Text(headline(fit, sizes), style="bold"))
    page.print(Text(f"predicted peak: {format_bytes(fit.peak_bytes)}"))
    if fit.budget_bytes is not None and fit.margin_bytes is not None:
        page.print(_limit(fit.budget_bytes, fit.margin_bytes))
    tables = _held(fit) if fit.fits is False else ()
    if judgement is not None:
        page.print(Text(judgement.headline, style=_STYLES[judgement.verdict]))
        tables = (*tables, *(() if judgement.verdict is Verdict.HELD else judgement.tables))
    for table in tables:
        page.print()
        page.print(shown(made_to_fit(table, PAGE, None)))
    if tables:
        page.print()
    if written is not None:
        page.print(Text(f"written: {written}"))
    refresh = [_REFRESH] if judgement is not None and judgement.verdict is Verdict.FELL else []
    for note in (*refresh, *notes):
        page.print(Text(f"note: {note}", style="dim"))


def _limit(most_bytes: int, margin_bytes: int) -> Text:
    if margin_bytes >= 0:
        return Text(f"within {format_bytes(most_bytes)}: {format_bytes(margin_bytes)} to spare", "bold green")
    return Text(f"above {format_bytes(most_bytes)}: {format_bytes(-margin_bytes)} too much", "bold red")


def _held(fit: Fit) -> tuple[Table, ...]:
    """What is held at the peak: where there is no baseline, nobody knows what grew."""
    unit = unit_for(fit.peak_bytes)
    largest = list(fit.modules.items())[:_MODULES_SHOWN]
    categories = [(category.value, held) for category, held in fit.categories.items() if held]
    return tuple(
        Table(
            (title, f"at the peak {unit.name}"),
            tuple((name or "(the model itself, batch, loss)", unit.text(held)) for name, held in rows),
            numbers=frozenset({1}),
        )
        for title, rows in (("module", largest), ("held as", categories))
    )
