"""What a rehearsal has found, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.rehearsal.outcome import ActPeak, Ended, Rehearsed, Shortfall
from lowtide.text.rounding import unit_for
from lowtide.text.table import Table
from lowtide.text.units import format_bytes

_LONGEST_NAME = 80
_LEAST_PART = 0.01  # of what is allocated: who holds less is not shown


def told(found: Rehearsed) -> str:
    """Everything, as plain text."""
    parts = [headline(found), "", str(acts_table(found)), "", *verdict(found)]
    if found.shortfall is not None:
        parts += ["", str(held_table(found.shortfall)), "", str(holders_table(found.shortfall))]
    return "\n".join([*parts, *(f"note: {note}" for note in found.notes)])


def headline(found: Rehearsed) -> str:
    """What was rehearsed, in one line."""
    how = "replayed on the CPU" if found.replayed else "under a real cap"
    allowed = f"{format_bytes(found.allowed_bytes)} beside the CUDA context"
    return f"{found.card}, {allowed}, {found.steps} optimizer steps, {how}"


def acts_table(found: Rehearsed) -> Table:
    """A row for each part of the training."""
    unit = unit_for(max((act.reserved_bytes for act in found.acts), default=0))
    rows = tuple(
        (
            act.act.value,
            f"{act.times:,}",
            unit.text(act.allocated_bytes),
            unit.text(act.reserved_bytes),
            "yes" if act.fits else "no",
            _where(act),
        )
        for act in found.acts
    )
    titles = ("part", "times", f"allocated {unit.name}", f"reserved {unit.name}", "fits", "peak in")
    return Table(titles, rows, numbers=frozenset({1, 2, 3}))


def _where(act: ActPeak) -> str:
    if act.moment is None:
        return "what was there before"
    return f"{act.moment.doing}, {act.moment.line.partition(': `')[0]}"


def verdict(found: Rehearsed) -> Iterator[str]:
    """Whether it fits, and where it would not."""
    short = found.shortfall
    if short is None:
        spare = found.allowed_bytes - found.peak_reserved_bytes
        seen = "" if found.ended is Ended.WHOLE else f" ({found.ended})"
        yield f"fits: {format_bytes(spare)} to spare{seen}"
        return
    would = "would run" if found.replayed else "ran"
    yield f"{would} out of memory in {short.moment}, at {short.moment.op}"
    yield f"  {short.moment.line}"
    yield (
        f"  asked for {format_bytes(short.asked_bytes)} where {format_bytes(short.allocated_bytes)} were "
        f"allocated and {format_bytes(short.reserved_bytes)} reserved, of {format_bytes(found.allowed_bytes)}"
    )
    yield from _advice(found)


def _advice(found: Rehearsed) -> Iterator[str]:
    if found.other_segments_fit:
        switch = "False" if found.expandable else "True"
        yield f"  fits with PYTORCH_ALLOC_CONF=expandable_segments:{switch}"
    if found.replayed and not all(act.fits for act in found.acts):
        yield "  what came after that is shown as if there had been room for it"


def held_table(short: Shortfall) -> Table:
    """What was held then, by category."""
    unit = unit_for(short.allocated_bytes)
    held = {category: count for category, count in short.held.items() if count}
    rows = tuple(
        (category.value, text) for category, text in zip(held, unit.column(list(held.values())), strict=True)
    )
    return Table(("held then", unit.name), rows, ("total", unit.text(sum(held.values()))), frozenset({1}))


def holders_table(short: Shortfall) -> Table:
    """Who held most of it."""
    unit = unit_for(short.allocated_bytes)
    rows = tuple(
        (cut_short(holder.name), holder.category.value, f"{holder.tensors:,}", unit.text(holder.bytes))
        for holder in short.holders
        if holder.bytes >= _LEAST_PART * short.allocated_bytes
    )
    return Table(("held most by", "as", "tensors", unit.name), rows, numbers=frozenset({2, 3}))


def cut_short(name: str) -> str:
    """A name or a line, or the beginning of it."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
