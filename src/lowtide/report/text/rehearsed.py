"""What a rehearsal has found, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from lowtide.rehearsal.outcome import Ended
from lowtide.rehearsal.telling import acts_table, headline, held_table, holders_table, verdict
from lowtide.report.text.console import console, shown

if TYPE_CHECKING:
    from lowtide.rehearsal.outcome import Rehearsed

_PIPED_WIDTH = 140  # six columns, one of them with lines of code


def print_rehearsed(found: Rehearsed, script: str, failure: str = "") -> None:
    """Print to stdout what the parts of a training held, and where it would be out of memory."""
    page = console(_PIPED_WIDTH)
    page.print(Text(f"{script} on {headline(found)}", style="bold"))
    if failure or found.ended is not Ended.WHOLE:
        page.print(Text(failure or found.ended, style="bold red" if failure else "yellow"))
    page.print()
    page.print(shown(acts_table(found)))
    page.print()
    for line in verdict(found):
        page.print(Text(line, style="bold green" if found.fits else "bold red"))
    if found.shortfall is not None:
        for table in (held_table(found.shortfall), holders_table(found.shortfall)):
            page.print()
            page.print(shown(table))
    for note in found.notes:
        page.print(Text(f"note: {note}", style="dim"))
