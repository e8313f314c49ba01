"""A report as one HTML file to look at: no network, plotly's script inside, everything from the graph inert.

page.html   the frame, with a place for each part
page.css    colours for light and dark, and how parts flow on a phone
page.js     draws the figures from what `embedding` wrote down, and answers clicks and keys
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from string import Template

from lowtide.errors import MissingExtra
from lowtide.report.content.contents import ARENA, FRONTIER, Contents
from lowtide.report.page.embedding import embedded
from lowtide.solvers.summary import Fact
from lowtide.solvers.tiled_summary import families, family_table
from lowtide.text.documents import Json
from lowtide.text.units import format_bytes

_LARGE = ("plain peak", "planned peak", "saved", "extra time", "slices")  # what is read first
_COUNTED = (
    "Held is everything on the device that the step needs at that moment: parameters, buffers, optimizer "
    "state, gradients, the batch, activations, temporaries, and the workspace of the op that runs.",
    "Sizes are as the device's allocator rounds them. What the allocator keeps in reserve, and the device's "
    "own context, are not counted.",
    "An activation is made by the forward, or again by recomputation, and held while a backward op runs; "
    "whatever is not is a temporary.",
    "The arena holds what the step makes; what is resident, and workspaces, lie outside of it.",
)


def require_plotly() -> None:
    """Raise MissingExtra unless a page can be made."""
    if find_spec("plotly") is None:
        raise MissingExtra("plotly", "page", "a page to look at")


def page(contents: Contents) -> str:
    """The whole file.

    Raises:
        MissingExtra: plotly is not installed.
    """
    require_plotly()
    from plotly.offline import get_plotlyjs

    return Template(_part("page.html")).substitute(
        title=escape(contents.title),
        about=escape(", ".join(contents.about)),
        large=_cards(fact for fact in contents.facts if fact.what in _LARGE),
        small=_rows(fact for fact in contents.facts if fact.what not in _LARGE),
        slices=_slices(contents),
        without_frontier=escape(contents.absent.get(FRONTIER, "")),
        without_arena=escape(contents.absent.get(ARENA, "")),
        arena=escape(_arena(contents)),
        notes=_items((*contents.notes, *_COUNTED)),
        style=_part("page.css"),
        data=packed(embedded(contents)),
        plotly=get_plotlyjs(),
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def packed(document: Json) -> str:
    """JSON, compressed, in letters and digits: small, and no name in it is ever seen by a parser of HTML."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _cards(facts: Iterable[Fact]) -> str:
    return "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(figure)}</dd><dd class='remark'>{escape(remark)}</dd></div>"
        for what, figure, remark in facts
    )


def _rows(facts: Iterable[Fact]) -> str:
    return "".join(
        f"<tr><th scope='row'>{escape(what)}</th><td>{escape(figure)}</td><td>{escape(remark)}</td></tr>"
        for what, figure, remark in facts
    )


def _slices(contents: Contents) -> str:
    """What runs in slices, as a table; nothing where nothing does."""
    found = families(contents.planned.graph)
    if not found:
        return ""
    table = family_table(found)

    def row(cells: Sequence[str], tag: str) -> str:
        written = (
            f"<{tag}{' class=number' if place in table.numbers else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(written)}</tr>"

    rows = "".join(row(cells, "td") for cells in table.rows)
    return f"<table class='families'><thead>{row(table.titles, 'th')}</thead><tbody>{rows}</tbody></table>"


def _items(notes: Iterable[str]) -> str:
    return "".join(f"<li>{escape(note)}</li>" for note in notes)


def _arena(contents: Contents) -> str:
    layout = contents.layout
    if layout is None:
        return ""
    above = layout.arena_bytes - layout.lower_bound_bytes
    distance = (
        f"{format_bytes(above)} above it ({layout.ratio:.4f} times)" if above else "the arena is exactly that"
    )
    known = "; proven: none is smaller" if layout.proven else ""
    return (
        f"An arena of {format_bytes(layout.arena_bytes)}, packed by {layout.method}. At least "
        f"{format_bytes(layout.lower_bound_bytes)} is live at once: {distance}{known}."
    )
