"""Tables before anyone has decided how to show them: as plain text here, in colour by a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GAP = "  "


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under titles, and what they add up to. Columns in `numbers` are set to the right."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    totals: tuple[str, ...] = ()
    numbers: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return lined_up([self.titles, *self.rows, *([self.totals] if self.totals else [])], self.numbers)


def lined_up(rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """`rows` as lines of text, with each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return _GAP.join(cells).rstrip()

    return "\n".join(map(line, rows))
