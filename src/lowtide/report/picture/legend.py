"""What is written beside the picture of a graph: the pieces of memory, what it all takes, and the signs."""

from __future__ import annotations

import textwrap

from lowtide.arena.tags import How
from lowtide.lesson.lesson import Lesson
from lowtide.report.picture.brush import Brush
from lowtide.text.names import without_middle
from lowtide.text.units import format_bytes

WIDTH_INCHES = 4.2
_ROWS = 14  # of the list of tags
_LINE = 0.24  # inches
_HEADING, _WORDS, _FIGURES = 10, 8.5, 7.5  # points
_NOTE_LETTERS = 48  # in a line
_MOST_LETTERS = 34  # of the values that a tag has
_SIGNS = {
    How.NEW: "new memory",
    How.IN_PLACE: "written over an input (thick arrow)",
    How.SHARED: "a free tag, taken from the box",
}


def height_inches(lesson: Lesson) -> float:
    """What the legend needs, title and margins included."""
    return _LINE * (min(len(lesson.tags), _ROWS + 1) + 19) + 0.9


def paint_legend(brush: Brush, lesson: Lesson, x: float, y: float, *, badges: bool, note: str) -> None:
    """The legend, with its upper left corner there; with `badges` it explains tags and counters of nodes."""
    y = _tags(brush, lesson, x, y)
    y = _totals(brush, lesson, x, y - 0.12)
    y = _signs(brush, x, y - 0.12, badges)
    for line in textwrap.wrap(note, _NOTE_LETTERS):
        y -= 0.2
        brush.text(x, y, line, _WORDS, style="italic")


def _tags(brush: Brush, lesson: Lesson, x: float, y: float) -> float:
    """The pieces of memory; of many the largest, which tell most."""
    brush.text(x, y, "memory: tag, bytes, what is in it", _HEADING, weight="bold")
    tags = lesson.tags
    if len(tags) > _ROWS:
        tags = tuple(sorted(tags, key=lambda tag: (-tag.bytes, tag.number)))
    for tag in tags[:_ROWS]:
        y -= _LINE
        brush.box(x + 0.15, y, 0.34, 0.18, tag.number)
        brush.text(x + 0.15, y, str(tag.number), _FIGURES, ha="center", weight="bold")
        brush.text(x + 1.12, y, format_bytes(tag.bytes), _WORDS, ha="right")
        names = without_middle(" → ".join(lesson.names(tag.values)), _MOST_LETTERS)
        brush.text(x + 1.22, y, names, _WORDS)
    if rest := tags[_ROWS:]:
        y -= _LINE
        several = f"{len(rest)} more tags" if len(rest) > 1 else "one more tag"
        brush.text(x, y, f"… {several}, {format_bytes(sum(tag.bytes for tag in rest))}", _WORDS)
    return y - 0.3


def _totals(brush: Brush, lesson: Lesson, x: float, y: float) -> float:
    brush.text(x, y, "what it takes", _HEADING, weight="bold")
    rows = [(total.name, total.bytes) for total in lesson.totals]
    rows.append(("lower bound", lesson.lower_bound_bytes))
    naive_bytes = rows[0][1]
    for name, count in rows:
        y -= _LINE
        brush.text(x, y, name, _WORDS)
        brush.text(x + 1.85, y, format_bytes(count), _WORDS, ha="right")
        if count and count != naive_bytes:
            brush.text(x + 1.97, y, f"{naive_bytes / count:.2f}× less", _WORDS)
    return y - 0.3


def _signs(brush: Brush, x: float, y: float, badges: bool) -> float:
    step, middle = 0.26, x + 0.17
    words = x + 0.48
    for how, meaning in _SIGNS.items():
        brush.box(middle, y, 0.36, 0.2, 9, how)
        brush.text(words, y, meaning, _WORDS)
        y -= step
    if not badges:
        return y
    brush.tag(middle, y, 1)
    brush.text(words, y, "number of the tag", _WORDS)
    brush.counter(middle, y - step, 2)
    brush.text(words, y - step, "counter: readers it waits for at first", _WORDS)
    brush.box(middle, y - 2 * step, 0.36, 0.2)
    brush.text(words, y - 2 * step, "given: no memory of the plan's", _WORDS)
    return y - 2 * step - 0.1
