"""A graph's memory as a lesson, in text: the graph, its backward, the planner's walk, what it all saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from lowtide.arena.buffers import alignment_of
from lowtide.arena.tags import How
from lowtide.ir.graph import Op
from lowtide.lesson.lesson import Lesson, Scene
from lowtide.lesson.phrasing import shape_text, short
from lowtide.report.text.console import console, shown
from lowtide.report.text.tables import cut, made_to_fit
from lowtide.text.names import listed
from lowtide.text.rounding import unit_for
from lowtide.text.table import Table
from lowtide.text.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.execute.trials import Trial

_PIPED_WIDTH = 140  # the walk has six columns, two of them with lists
_LONGEST_LIST = 20  # of numbers: of tags in the box, of ops with the same reason


def print_lesson(
    title: str,
    lesson: Lesson,
    trials: Sequence[Trial] = (),
    *,
    steps: int | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Print to stdout all that there is to tell; of long tables the first and last `steps` rows each."""
    page = console(_PIPED_WIDTH)
    page.print(Text(title, style="bold"))
    _section(page, "Given", _given(lesson), steps)
    _section(page, "The graph", _forward(lesson), steps)
    if lesson.backward:
        _section(page, "Extended by the backward", _backward(lesson), steps)
        page.print(Text(cut(_kept(lesson), page.width), style="dim"))
    _section(page, "The walk: counters, tags, and the box of free tags", _walk(lesson), steps)
    _section(page, "Who shares with whom", _tags(lesson), steps)
    _section(page, "Which ops cannot be done in place, and why", _obstacles(lesson), steps)
    _section(page, "What it takes", _totals(lesson), None)
    page.print(Text(_distance(lesson)))
    if trials:
        _section(page, "The same, run", _trials(trials), None)
        alignment = alignment_of(lesson.graph.device)
        page.print(
            Text(
                f"in an arena that is run, each value begins at a multiple of {alignment} bytes", style="dim"
            )
        )
    for note in notes:
        page.print(Text(f"note: {note}", style="dim"))


def _section(page: Console, heading: str, table: Table, steps: int | None) -> None:
    """A heading and its table; nothing for a table without rows."""
    if not table.rows:
        return
    page.print()
    page.print(Text(heading, style="bold"))
    page.print(shown(made_to_fit(table, page.width, steps)))


# The graph ------------------------------------------------------------------------------------------------


def _given(lesson: Lesson) -> Table:
    values = [lesson.graph.values[value] for value in lesson.given]
    rows = [
        (
            value.name,
            _shapes(lesson, [value.id]),
            f"{value.bytes:,}",
            numbers_text(lesson, value.id),
            value.role.value,
        )
        for value in values
    ]
    return Table(("value", "shape", "bytes", "=", ""), tuple(rows), numbers=frozenset({2}))


def _forward(lesson: Lesson) -> Table:
    rows = [
        (*_op_cells(lesson, op), "kept for the backward" if lesson.kept.intersection(op.creates) else "")
        for op in lesson.forward
    ]
    return Table(("#", "op", "shape", "bytes", "=", ""), tuple(rows), numbers=frozenset({0, 3}))


def _backward(lesson: Lesson) -> Table:
    rows = [(*_op_cells(lesson, op), _needs(lesson, op)) for op in lesson.backward]
    titles = ("#", "op", "shape", "bytes", "=", "needs of the forward")
    return Table(titles, tuple(rows), numbers=frozenset({0, 3}))


def _op_cells(lesson: Lesson, op: Op) -> tuple[str, ...]:
    return (
        _number(op.id),
        lesson.words.equation(op),
        _shapes(lesson, op.creates),
        f"{sum(lesson.graph.values[value].bytes for value in op.creates):,}",
        "; ".join(filter(None, (numbers_text(lesson, value) for value in op.creates))),
    )


def _number(op: int) -> str:
    """Ops are counted from 1, as turns are."""
    return str(op + 1)


def _shapes(lesson: Lesson, values: Sequence[int]) -> str:
    """The shape of the first value, and whether there are more."""
    first = [shape_text(lesson.words.shape(value)) for value in values[:1]]
    return ", ".join([*first, *(["…"] if len(values) > 1 else [])])


def numbers_text(lesson: Lesson, value: int) -> str:
    """'0.693', or '[1, 2, 3, …]' for a value of more; nothing where the graph was not run."""
    numbers = lesson.numbers.get(value, ())
    shape = lesson.words.shape(value)
    texts = [_number_text(number) for number in numbers]
    if not shape or not numbers:
        return "".join(texts)
    return f"[{', '.join(texts)}{', …' if len(numbers) < math.prod(shape) else ''}]"


def _number_text(number: float) -> str:
    if number and not 0.001 <= abs(number) < 1e6:
        return f"{number:.3g}"
    return f"{number:.3f}".rstrip("0").rstrip(".")


def _needs(lesson: Lesson, op: Op) -> str:
    """What an op of the backward needs of the forward, and who made it."""
    told = [f"{lesson.graph.values[value].name} ({_source(lesson, value)})" for value in lesson.needs(op)]
    return ", ".join(told) or "nothing"


def _source(lesson: Lesson, value: int) -> str:
    maker = lesson.graph.creator.get(value)
    return "given" if maker is None else f"result of {short(lesson.graph.ops[maker])}"


def _kept(lesson: Lesson) -> str:
    made = [value for op in lesson.forward for value in op.creates]
    others = [value for value in made if value not in lesson.kept and value not in lesson.graph.outputs]
    kept_bytes = sum(lesson.graph.values[value].bytes for value in lesson.kept)
    told = f"kept for the backward: {len(lesson.kept)} of {len(made)} values, {format_bytes(kept_bytes)}"
    return f"{told}; not needed by it: {', '.join(lesson.names(others))}" if others else told


# The walk -------------------------------------------------------------------------------------------------


def _walk(lesson: Lesson) -> Table:
    rows = [row for number, scene in enumerate(lesson.scenes(), 1) for row in _turn(lesson, number, scene)]
    titles = ("turn", "op", "tag", "how", "counters after", "box")
    return Table(titles, tuple(rows), numbers=frozenset({0, 2}))


def _turn(lesson: Lesson, number: int, scene: Scene) -> list[tuple[str, ...]]:
    """One row for each result; what there is to tell of the whole turn is in the first."""
    values, turn = lesson.graph.values, scene.turn
    counters = ", ".join(f"{values[value].name} {count}" for value, count in turn.counters)
    box = "{" + listed(scene.box, _LONGEST_LIST) + "}"
    given = [(str(given.tag), _how(lesson, scene, given.value, given.how)) for given in turn.given] or [
        ("", "")
    ]
    further = [f"  and {values[given.value].name}" for given in turn.given[1:]]
    first = (str(number), lesson.words.equation(lesson.graph.ops[turn.op]), *given[0], counters, box)
    return [first, *(("", name, *cells, "", "") for name, cells in zip(further, given[1:], strict=True))]


def _how(lesson: Lesson, scene: Scene, value: int, how: How) -> str:
    if how is How.NEW:
        return "new"
    before = lesson.graph.values[scene.before[value]].name
    return f"in place of {before}" if how is How.IN_PLACE else f"shares with {before}"


def _tags(lesson: Lesson) -> Table:
    unit = unit_for(lesson.sharing.total_bytes)
    sizes = unit.column(lesson.sharing.tag_bytes)
    rows = [
        (str(tag.number), size, " → ".join(lesson.names(tag.values)))
        for tag, size in zip(lesson.tags, sizes, strict=True)
    ]
    totals = ("", unit.text(lesson.sharing.total_bytes), "in all")
    titles = ("tag", unit.name, "values in it, one after the other")
    return Table(titles, tuple(rows), totals, frozenset({0, 1}))


def _obstacles(lesson: Lesson) -> Table:
    """One row for each reason; ops that share it are listed by their numbers."""
    ops = lesson.graph.ops
    same: dict[tuple[str, str], list[int]] = {}
    for obstacle in lesson.obstacles:
        same.setdefault((short(ops[obstacle.op]), obstacle.reason), []).append(obstacle.op)
    rows = [
        (
            listed([number + 1 for number in numbers], _LONGEST_LIST),
            f"{lesson.words.result(ops[numbers[0]])} = {name}" if len(numbers) == 1 else name,
            reason,
        )
        for (name, reason), numbers in same.items()
    ]
    return Table(("#", "op", "because"), tuple(rows), numbers=frozenset({0}))


# What it takes --------------------------------------------------------------------------------------------


def _totals(lesson: Lesson) -> Table:
    naive_bytes, bound = lesson.totals[0].bytes, lesson.lower_bound_bytes
    unit = unit_for(naive_bytes)
    rows = [
        (total.name, unit.text(total.bytes), _times(naive_bytes, total.bytes), total.meaning)
        for total in lesson.totals
    ]
    fullest = lesson.fullest_op
    where = "" if fullest is None else f"live at once at {lesson.words.equation(fullest)}"
    rows.append(("lower bound", unit.text(bound), _times(naive_bytes, bound), where))
    return Table(("memory", unit.name, "less", ""), tuple(rows), numbers=frozenset({1, 2}))


def _times(whole: int, part: int) -> str:
    return f"{whole / part:.2f}×" if part else "–"


def _distance(lesson: Lesson) -> str:
    bound = lesson.lower_bound_bytes
    if not bound:
        return "nothing is made, so nothing is needed"
    sharing = lesson.sharing.total_bytes / bound
    proven = ", and no arena is smaller" if lesson.layout.proven else ""
    return f"of the lower bound: sharing {sharing:.3f}×, static {lesson.layout.ratio:.3f}×{proven}"


def _trials(trials: Sequence[Trial]) -> Table:
    rows = [
        (
            trial.memory.value,
            format_bytes(trial.held_bytes),
            str(trial.first.allocations),
            str(trial.later.allocations),
            format_seconds(trial.handing_seconds),
            format_seconds(trial.seconds),
            format_bytes(trial.later.wasted_bytes),
            format_bytes(trial.later.fragmented_bytes),
        )
        for trial in trials
    ]
    titles = (
        "memory",
        "held",
        "allocations",
        "in later steps",
        "time for them",
        "of a step",
        "wasted",
        "fragmented",
    )
    return Table(titles, tuple(rows), numbers=frozenset(range(1, 8)))
