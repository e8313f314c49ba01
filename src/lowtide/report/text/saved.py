"""What a step keeps for the backward, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from lowtide.report.text.console import console, shown
from lowtide.report.text.terminal import asked

if TYPE_CHECKING:
    from lowtide.trace.saved_report import Saved

_PIPED_WIDTH = 140  # six columns, two of them with module paths


def print_saved(saved: Saved, sizes: Mapping[str, int], notes: Sequence[str] = ()) -> None:
    """Print to stdout what is kept, the largest first, and which modules made it."""
    page = console(_PIPED_WIDTH)
    page.print(Text(f"{asked(saved.model, sizes, None, saved.device)}: kept for the backward", style="bold"))
    for table in saved.tables():
        page.print()
        page.print(shown(table))
    page.print()
    for line in filter(None, [saved.there_anyway()]):
        page.print(line)
    for note in (*saved.notes, *notes):
        page.print(Text(f"note: {note}", style="dim"))
