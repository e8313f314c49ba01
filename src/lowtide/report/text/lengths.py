"""The lengths of an epoch as text: the worst, what does not fit, and a few shapes to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from lowtide.report.text.console import PAGE, console, shown

if TYPE_CHECKING:
    from lowtide.planner.shape_classes import ShapeClasses
    from lowtide.planner.worst import Epoch


def print_epoch(title: str, epoch: Epoch, shapes: ShapeClasses | None, notes: Sequence[str] = ()) -> None:
    """Print what was found to stdout."""
    page = console(PAGE)
    page.print(Text(title, style="bold"))
    for line in epoch.summary():
        page.print(Text(line))
    page.print()
    page.print(shown(epoch.table()))
    if shapes is not None:
        page.print()
        page.print(Text(shapes.title, style="bold"))
        page.print()
        page.print(shown(shapes.table()))
    page.print()
    page.print(Text(epoch.how_found(), style="dim"))
    for note in (*epoch.notes, *(shapes.notes if shapes is not None else ()), *notes):
        page.print(Text(f"note: {note}", style="dim"))
