"""Tables made to fit a page: no empty columns, no middle of many rows, words cut short."""

from __future__ import annotations

from dataclasses import replace

from lowtide.text.table import Table

_GAP = 2  # what rich puts between columns
_NARROWEST = 12  # what a column of words is cut to at most
_SHORTEST_CUT = 3  # hiding fewer rows than that takes as much room as showing them


def made_to_fit(table: Table, width: int, most_rows: int | None) -> Table:
    """The table, no wider than the page if words can be cut so far; numbers are left whole.

    Columns with nothing in them are left out. Of many rows, the first and last `most_rows` are shown each.
    """
    return _narrowed(_shortened(_without_empty(table), most_rows), width)


def cut(text: str, most: int) -> str:
    """`text`, or its beginning if it has more than `most` letters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _without_empty(table: Table) -> Table:
    places = [place for place in range(len(table.titles)) if any(row[place] for row in table.rows)]
    return Table(
        tuple(table.titles[place] for place in places),
        tuple(tuple(row[place] for place in places) for row in table.rows),
        tuple(table.totals[place] for place in places if table.totals),
        frozenset(number for number, place in enumerate(places) if place in table.numbers),
    )


def _shortened(table: Table, most_rows: int | None) -> Table:
    hidden = 0 if most_rows is None else len(table.rows) - 2 * most_rows
    if most_rows is None or hidden < _SHORTEST_CUT:
        return table
    told = ("…", f"… {hidden} more …", *[""] * len(table.titles))[: len(table.titles)]
    return replace(table, rows=(*table.rows[:most_rows], told, *table.rows[-most_rows:]))


def _narrowed(table: Table, width: int) -> Table:
    columns = zip(table.titles, *table.rows, *([table.totals] if table.totals else []), strict=True)
    widths = [max(map(len, column)) for column in columns]
    words = [place for place in range(len(widths)) if place not in table.numbers]
    while words and sum(widths) + _GAP * (len(widths) - 1) > width:
        widest = max(words, key=lambda place: widths[place])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    return replace(table, rows=tuple(tuple(map(cut, row, widths)) for row in table.rows))
