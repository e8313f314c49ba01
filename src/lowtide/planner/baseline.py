"""A guard against growth: the peak of a step, kept in a file, and what has changed since.

A baseline says what was held at the peak, by category and by module, and of which step that is true. Two of
the same step can be compared; of another step, the comparison is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from lowtide.errors import BadRequest
from lowtide.text.budget import Budget
from lowtide.text.documents import Json, Reader, Unexpected, read_document, understanding, write_document
from lowtide.text.rounding import Unit, unit_for
from lowtide.text.table import Table
from lowtide.text.units import format_bytes

_KIND = "baseline"
_MOST_ROWS = 12
_ROOT = "(the model itself, batch, loss)"  # what no submodule owns


class Source(StrEnum):
    """Where a peak was learnt."""

    PREDICTED = "predicted"
    MEASURED = "measured"


class Verdict(StrEnum):
    """What became of the peak."""

    GREW = "grew"  # by more than the tolerance
    HELD = "held"
    FELL = "fell"  # by more than the tolerance


@dataclass(frozen=True)
class Baseline:
    """The peak of one step, what it was made of, and which step it was.

    `categories` and `modules` each sum to `peak_bytes`; both are empty where the peak was measured.
    """

    model: str
    device: str
    optimizer: str | None
    inputs: tuple[str, ...]  # what the model was called with, as `float32[8, 16]`
    sizes: Mapping[str, int]
    source: Source
    peak_bytes: int
    categories: Mapping[str, int]
    modules: Mapping[str, int]
    lowtide_version: str
    torch_version: str


@dataclass(frozen=True)
class Change:
    """What a module or category held at the peak, before and now."""

    name: str
    before_bytes: int
    after_bytes: int

    @property
    def bytes(self) -> int:
        """By how much it grew."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class Judgement:
    """A step held against its baseline. `str` of it says everything, as plain text."""

    before: Baseline
    after: Baseline
    tolerance_bytes: int
    modules: tuple[Change, ...] = field(repr=False)  # those that changed, what grew most first
    categories: tuple[Change, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def growth_bytes(self) -> int:
        """By how much the peak grew."""
        return self.after.peak_bytes - self.before.peak_bytes

    @property
    def verdict(self) -> Verdict:
        """What became of the peak."""
        if abs(self.growth_bytes) <= self.tolerance_bytes:
            return Verdict.HELD
        return Verdict.GREW if self.growth_bytes > 0 else Verdict.FELL

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        was, now = format_bytes(self.before.peak_bytes), format_bytes(self.after.peak_bytes)
        part = 100 * self.growth_bytes / self.before.peak_bytes
        allowed = f"tolerance {format_bytes(self.tolerance_bytes)}"
        return f"the {self.after.source} peak {self.verdict}: {was} → {now} ({part:+.2f} %, {allowed})"

    @property
    def tables(self) -> tuple[Table, ...]:
        """What changed at the peak, by module and by category."""
        unit = unit_for(max(self.before.peak_bytes, self.after.peak_bytes))
        named = (("module", self.modules), ("held as", self.categories))
        return tuple(_table(title, changes, unit) for title, changes in named if changes)

    def __str__(self) -> str:
        return "\n\n".join([self.headline, *map(str, self.tables), *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The verdict and what it rests on, as JSON can hold it."""
        return {
            "verdict": self.verdict.value,
            "baseline_peak_bytes": self.before.peak_bytes,
            "growth_bytes": self.growth_bytes,
            "tolerance_bytes": self.tolerance_bytes,
            "modules": [_change_to_json(change) for change in self.modules],
            "categories": [_change_to_json(change) for change in self.categories],
        }


def judge(before: Baseline, after: Baseline, tolerance: str | int = 0) -> Judgement:
    """Hold a step against its baseline. `tolerance` is a part of the old peak, "2%", or bytes, "10MiB".

    Raises:
        BadRequest: they are not of the same step, or the tolerance cannot be read.
    """
    _refuse_others(before, after)
    versions = (
        ("lowtide", before.lowtide_version, after.lowtide_version),
        ("torch", before.torch_version, after.torch_version),
    )
    changed = [version for version in versions if version[1] != version[2]]
    notes = tuple(f"the baseline is from {name} {was}, and this is {now}" for name, was, now in changed)
    return Judgement(
        before,
        after,
        tolerance_bytes(tolerance, before.peak_bytes),
        _changes(before.modules, after.modules),
        _changes(before.categories, after.categories),
        notes,
    )


def tolerance_bytes(tolerance: str | int, peak_bytes: int) -> int:
    """The bytes by which a peak may differ.

    Raises:
        BadRequest: it is neither a part nor a size.
    """
    if str(tolerance).strip().removesuffix("%").strip() == "0":
        return 0
    try:
        found = Budget.parse(tolerance).bytes_of(peak_bytes)
    except BadRequest:
        found = None
    if found is None:
        raise BadRequest(f"cannot read '{tolerance!s:.60}' as a tolerance. Write 2% or 10MiB.")
    return found


def _refuse_others(before: Baseline, after: Baseline) -> None:
    pairs = {
        "model": (before.model, after.model),
        "device": (before.device, after.device),
        "optimizer": (before.optimizer or "none", after.optimizer or "none"),
        "sizes": (_said(before.sizes), _said(after.sizes)),
        "inputs": (", ".join(before.inputs), ", ".join(after.inputs)),
        "peak": (before.source.value, after.source.value),
    }
    other = [f"{what} {was} instead of {now}" for what, (was, now) in pairs.items() if was != now]
    if other:
        raise BadRequest(
            f"the baseline is of another step: {'; '.join(other)}. "
            "Check the step that it was written for, or write a new one."
        )


def _said(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(sizes.items())) or "none"


# Changes --------------------------------------------------------------------------------------------------


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    found = (Change(name, before.get(name, 0), after.get(name, 0)) for name in {**before, **after})
    return tuple(sorted((one for one in found if one.bytes), key=lambda one: (-one.bytes, one.name)))


def _table(title: str, changes: Sequence[Change], unit: Unit) -> Table:
    shown, hidden = changes[:_MOST_ROWS], changes[_MOST_ROWS:]
    rest = Change(
        f"{len(hidden)} others",
        sum(change.before_bytes for change in hidden),
        sum(change.after_bytes for change in hidden),
    )
    rows = [*shown, *([rest] if hidden else [])]
    return Table(
        (title, f"before {unit.name}", "now", "difference"),
        tuple(_cells(row, unit) for row in rows),
        numbers=frozenset({1, 2, 3}),
    )


def _cells(row: Change, unit: Unit) -> tuple[str, ...]:
    sign = "+" if row.bytes > 0 else "−" if row.bytes else ""
    return (
        row.name or _ROOT,
        unit.text(row.before_bytes),
        unit.text(row.after_bytes),
        f"{sign}{unit.text(abs(row.bytes))}",
    )


def _change_to_json(change: Change) -> dict[str, Any]:
    return {"name": change.name, "before_bytes": change.before_bytes, "after_bytes": change.after_bytes}


# Files ----------------------------------------------------------------------------------------------------


def save_baseline(baseline: Baseline, path: str | os.PathLike[str]) -> None:
    """Write `baseline` to `path`, so that a reader sees the old file or the whole new one.

    Raises:
        BadFile: the file cannot be written.
    """
    fields: dict[str, Json] = {
        "model": baseline.model,
        "device": baseline.device,
        "optimizer": baseline.optimizer,
        "inputs": list(baseline.inputs),
        "sizes": dict(baseline.sizes),
        "source": baseline.source.value,
        "peak_bytes": baseline.peak_bytes,
        "categories": dict(baseline.categories),
        "modules": dict(baseline.modules),
        "lowtide_version": baseline.lowtide_version,
        "torch_version": baseline.torch_version,
    }
    write_document(path, _KIND, fields)


def load_baseline(path: str | os.PathLike[str], how_to_write: str) -> Baseline:
    """Read what `save_baseline` wrote. `how_to_write` is told where there is no file yet.

    Raises:
        BadRequest: there is no such file.
        BadFile: the file is damaged, cut off, not a baseline of lowtide's, or of another schema.
    """
    if not Path(path).exists():
        raise BadRequest(f"there is no baseline '{path}' yet. {how_to_write}")
    document = read_document(path, _KIND, [field.name for field in fields(Baseline)])
    with understanding(path):
        return _baseline_from_json(Reader(document, _KIND))


def _baseline_from_json(entry: Reader) -> Baseline:
    baseline = Baseline(
        model=entry["model"].of(str),
        device=entry["device"].of(str),
        optimizer=entry["optimizer"].optional(str),
        inputs=entry["inputs"].many(lambda item: item.of(str)),
        sizes=_counts(entry["sizes"]),
        source=entry["source"].choice(Source),
        peak_bytes=entry["peak_bytes"].of(int),
        categories=_counts(entry["categories"]),
        modules=_counts(entry["modules"]),
        lowtide_version=entry["lowtide_version"].of(str),
        torch_version=entry["torch_version"].of(str),
    )
    for what, parts in (("categories", baseline.categories), ("modules", baseline.modules)):
        if (parts and sum(parts.values()) != baseline.peak_bytes) or baseline.peak_bytes <= 0:
            raise Unexpected(f"its peak is {baseline.peak_bytes} bytes, and its {what} do not add up to that")
    return baseline


def _counts(entry: Reader) -> dict[str, int]:
    return {name: entry[name].of(int) for name in entry.of(dict)}
