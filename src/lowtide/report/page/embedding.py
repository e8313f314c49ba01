"""The contents of a report as data that the page's script draws: columns of numbers, and a list of words.

Every life of a value is a row: what is alive at a moment, by module and by category, and so every curve, is
added up from them in the browser. Moments are computes, numbered from 0; times are whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lowtide.arena.buffers import Birth
from lowtide.arena.layout import Layout
from lowtide.ir.graph import Phase
from lowtide.ir.lives import Life
from lowtide.ir.simulate import CATEGORIES, Category
from lowtide.report.content.contents import Contents, Measured
from lowtide.report.content.curve import Curve
from lowtide.report.content.strip import Piece
from lowtide.report.picture.plot import COLOURS, coarse
from lowtide.solvers.solution import GraphSolution
from lowtide.text.documents import Json

_PHASES = tuple(Phase)
_ON_DARK = {Category.BUFFERS: "#C4C4C4"}  # black would not be seen
_MOST_EVENTS = 1200  # of a measured curve: about what a screen can show


def embedded(contents: Contents) -> dict[str, Json]:
    """The document that page.js reads."""
    words = _Words()
    timed = contents.plain.timed and contents.planned.timed
    return {
        "budget": contents.solution.budget_bytes,
        "timed": timed,
        "categories": [category.value for category in CATEGORIES],
        "colours": [COLOURS[category] for category in CATEGORIES],
        "coloursOnDark": [_ON_DARK.get(category, COLOURS[category]) for category in CATEGORIES],
        "phases": [phase.value for phase in _PHASES],
        "curves": [_curve(curve, words) for curve in (contents.plain, contents.planned)],
        "frontier": _frontier(contents),
        "strip": _columns(_piece(piece) for piece in contents.strip),
        "arena": None if contents.layout is None else _arena(contents.planned, contents.layout),
        "measured": [_measured(found) for found in contents.measured],
        "words": list(words.number),
    }


class _Words:
    """Names, each written down once."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}

    def __getitem__(self, word: str) -> int:
        return self.number.setdefault(word, len(self.number))


def _columns(rows: Iterable[dict[str, Json]]) -> dict[str, Json]:
    """Rows of the same keys as a list for each key."""
    found: dict[str, Json] = {}
    for row in rows:
        for key, item in row.items():
            column = found.setdefault(key, [])
            assert isinstance(column, list)
            column.append(item)
    return found


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _curve(curve: Curve, words: _Words) -> dict[str, Json]:
    return {
        "name": curve.name,
        "peak": curve.timeline.peak_bytes,
        "peakMoment": curve.peak_moment,
        "ops": _columns(
            {
                "target": words[op.target.rsplit(".", 1)[0]],
                "module": words[op.module],
                "phase": _PHASES.index(phase),
                "time": _nanoseconds(op.seconds),
                "workspace": op.workspace_bytes,
            }
            for op, phase in zip(curve.ops, curve.phases, strict=True)
        ),
        "lives": _columns(_life(life, curve, words) for life in _seen(curve)),
        "slices": _columns(
            {"name": words[tile.where], "count": tile.count, "of": tile.extent, "first": first, "stop": stop}
            for tile, first, stop in curve.slices
        ),
    }


def _seen(curve: Curve) -> list[Life]:
    """The lives that hold something at some moment."""
    return [life for life in curve.lives if life.bytes and curve.moment(life.first) < curve.moment(life.stop)]


def _life(life: Life, curve: Curve, words: _Words) -> dict[str, Json]:
    value = curve.graph.values[life.value]
    return {
        "name": words[value.name],
        "module": words[value.module],
        "category": CATEGORIES.index(life.category),
        "bytes": life.bytes,
        "first": curve.moment(life.first),
        "stop": curve.moment(life.stop),
    }


def _piece(piece: Piece) -> dict[str, Json]:
    return {
        "name": piece.name,
        "kept": piece.kept_bytes,
        "recomputed": piece.recomputed_bytes,
        "again": piece.runs_again,
        "time": _nanoseconds(piece.seconds_again),
    }


def _frontier(contents: Contents) -> Json:
    if not contents.frontier or not isinstance(contents.solution, GraphSolution):
        return None
    return {
        "points": [_point(solution) for solution in contents.frontier],
        "chosen": _point(contents.solution),
        "lowerBound": contents.solution.lower_bound_bytes,
        "time": _nanoseconds(contents.solution.seconds),
    }


def _point(solution: GraphSolution) -> dict[str, Json]:
    return {
        "peak": solution.peak_bytes,
        "time": _nanoseconds(solution.extra_seconds),
        "again": sum(solution.recomputed.values()),
        "status": solution.status.value,
    }


# The arena --------------------------------------------------------------------------------------------


def _arena(curve: Curve, layout: Layout) -> Json:
    number = {Birth(life.value, life.time): place for place, life in enumerate(_seen(curve))}
    spots = (spot for spot in _spots(curve, layout) if spot[0] in number)
    return {
        "bytes": layout.arena_bytes,
        "lowerBound": layout.lower_bound_bytes,
        "spots": _columns(
            {"life": number[birth], "offset": offset, "bytes": count, "stop": curve.moment(stop)}
            for birth, offset, count, stop in spots
        ),
    }


def _spots(curve: Curve, layout: Layout) -> Iterator[tuple[Birth, int, int, int]]:
    """Each birth with its offset, its bytes and the step it ends at: when another is written over it."""
    begun = {Birth(life.value, life.time): life.first for life in curve.lives}
    for buffer, offset in zip(layout.buffers, layout.offsets, strict=True):
        stops = [*(begun[birth] for birth in buffer.births[1:]), buffer.stop]
        for birth, stop in zip(buffer.births, stops, strict=True):
            yield birth, offset, buffer.bytes, stop


# What was measured ------------------------------------------------------------------------------------


def _measured(found: Measured) -> dict[str, Json]:
    """No more points than can be seen: each stands for several events, and shows the one that holds most."""
    edges, fullest = coarse(found.events, _MOST_EVENTS)
    return {
        "name": found.name,
        "predicted": found.predicted_bytes,
        "events": len(found.events),
        "at": edges[:-1].tolist(),
        "bytes": found.events[fullest].tolist(),
    }
