"""Where reports are printed, and text made to fit there."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lowtide.text.table import Table

PAGE = 100  # columns of a page: what tables are made to fit in


def console(piped_width: int) -> Console:
    """Stdout: as wide as the terminal, or `piped_width` where there is none to ask."""
    found = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    if not found.is_terminal:
        found.width = piped_width
    return found


def per_cent(part: float, signed: bool = False) -> str:
    """'12.3 %', or '+12.3 %'."""
    return f"{100 * part:{'+' if signed else ''}.1f} %"


def shown(table: Table) -> RichTable:
    """A table as it is shown everywhere: titles underlined, totals bold; on a narrow page words give way."""
    found = RichTable(
        box=None,
        pad_edge=False,
        show_footer=bool(table.totals),
        header_style="underline",
        footer_style="bold",
    )
    totals = table.totals or ("",) * len(table.titles)
    for place, (title, total) in enumerate(zip(table.titles, totals, strict=True)):
        number = place in table.numbers
        widest = max(map(len, [title, total, *(row[place] for row in table.rows)]))
        found.add_column(
            title,
            total,
            justify="right" if number else "left",
            no_wrap=True,
            min_width=widest if number else None,
        )
    for row in table.rows:
        found.add_row(*map(Text, row))
    return found
