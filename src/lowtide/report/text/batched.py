"""The largest batches as text: as the step is written and with a plan, predicted and, if it was, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from lowtide.report.text.console import PAGE, console, per_cent, shown
from lowtide.text.rounding import unit_for
from lowtide.text.table import Table
from lowtide.text.units import format_bytes

if TYPE_CHECKING:
    from lowtide.cost.measure import Reading
    from lowtide.planner.batch import LargestBatch
    from lowtide.planner.batch_search import Reached

_UNKNOWN = "unknown"


def print_largest_batch(
    title: str,
    answer: LargestBatch,
    measured: Mapping[str, Reading] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Print both answers to stdout. `measured` has a reading for each row that was run, by its name."""
    page = console(PAGE)
    where = f"on {answer.card}" if answer.card else f"in {format_bytes(answer.memory_bytes)}"
    page.print(Text(f"{title}: the largest batch {where}", style="bold"))
    page.print()
    page.print(shown(_table(answer, measured or {})))
    page.print()
    page.print(Text(_found(answer), style="dim"))
    for note in notes:
        page.print(Text(f"note: {note}", style="dim"))


def _table(answer: LargestBatch, measured: Mapping[str, Reading]) -> Table:
    unit = unit_for(answer.memory_bytes)
    of = "of memory" if answer.card is None else "of card"
    titles = ["step", "batch", f"peak {unit.name}", of, "samples/s", "extra time"]
    if measured:
        titles += [f"measured {unit.name}", "samples/s"]
    rows = []
    for name, reached in (("plain", answer.plain), ("planned", answer.planned)):
        cells = [name, *_cells(reached, answer)]
        if measured:
            cells += _measured_cells(reached, measured.get(name), answer.memory_bytes)
        rows.append(tuple(cells))
    return Table(tuple(titles), tuple(rows), numbers=frozenset(range(1, len(titles))))


def _cells(reached: Reached | None, answer: LargestBatch) -> list[str]:
    if reached is None:
        return ["none", *[""] * 4]
    memory_bytes = answer.memory_bytes
    taken_bytes = reached.peak_bytes if answer.card is None else reached.promised_bytes
    speed, extra = reached.samples_per_second, reached.extra_seconds_ratio
    return [
        f"{reached.batch:,}",
        unit_for(memory_bytes).text(reached.peak_bytes),
        per_cent(taken_bytes / memory_bytes),
        _UNKNOWN if speed is None else _speed(speed),
        _UNKNOWN if extra is None else per_cent(extra, signed=True),
    ]


def _measured_cells(reached: Reached | None, reading: Reading | None, memory_bytes: int) -> list[str]:
    if reached is None or reading is None:
        return ["", ""]
    return [unit_for(memory_bytes).text(reading.peak_bytes), _speed(reached.batch / reading.seconds)]


def _speed(samples_per_second: float) -> str:
    return f"{samples_per_second:,.3g}" if samples_per_second < 100 else f"{samples_per_second:,.0f}"


def _found(answer: LargestBatch) -> str:
    """How the answer was found, in words."""
    if not answer.scaled:
        return f"captured at batch {_listed(answer.captured)}"
    reached = dict.fromkeys(one.batch for one in (answer.plain, answer.planned) if one is not None)
    return (
        f"captured at batch {_listed(answer.sampled)}, scaled from there, and checked by a capture at batch "
        f"{_listed(tuple(reached))}"
    )


def _listed(batches: Sequence[int]) -> str:
    *others, last = map(str, batches)
    return f"{', '.join(others)} and {last}" if others else last
