"""A schedule of a captured graph as text: what it saves, what it costs, and what it does with each module."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from lowtide.report.text.console import PAGE, console, shown
from lowtide.solvers.solution import GraphSolution
from lowtide.solvers.summary import Fact, share_table, summary
from lowtide.solvers.tiled_summary import families, family_table

_EMPHASISED = "planned peak"


def print_schedule(
    title: str, solution: GraphSolution, plain_peak_bytes: int | None = None, notes: Sequence[str] = ()
) -> None:
    """Print a schedule to stdout. It is compared with `plain_peak_bytes`, or with everything kept."""
    page = console(PAGE)
    page.print(Text(title, style="bold"))
    page.print(_grid(summary(solution, plain_peak_bytes)))
    page.print()
    if found := families(solution.graph):
        page.print(shown(family_table(found)))
        page.print()
    page.print(shown(share_table(solution)))
    for note in notes:
        page.print(Text(f"note: {note}", style="dim"))


def _grid(facts: Sequence[Fact]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for fact in facts:
        style = "bold" if fact.what == _EMPHASISED else ""
        table.add_row(
            fact.what, Text(fact.figure, style=style), Text(fact.remark, style="dim", overflow="fold")
        )
    return table
