"""A few shapes for an epoch of many lengths: which lengths to pad to, and how many samples of each fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lowtide.cost.profile import Progress
from lowtide.planner.batch import LargestBatch, largest_batch, memory_bytes_of
from lowtide.planner.batch_steps import Batch, Telling
from lowtide.planner.by_classes import chosen_classes
from lowtide.planner.lengths import Lengths, counted_lengths
from lowtide.solvers.method import Scheduler
from lowtide.text.budget import Budget
from lowtide.text.card import Card
from lowtide.text.table import Table
from lowtide.text.units import format_bytes
from lowtide.trace.step import Example, Loss, Updates

ShapeOf: TypeAlias = Callable[[int, int], Batch | Example]
_FULL = 0.95  # of the memory, which a batch of the right size should hold


@dataclass(frozen=True)
class ShapeClass:
    """One length that samples are padded to, and the largest batches of it that fit.

    `lengths` are those that are padded to it, `samples` how many samples have one of them, `padding` the part
    of its tokens that is padding. `batches` are the largest, as it is and with a plan.
    """

    length: int
    lengths: int
    samples: int
    padding: float
    batches: LargestBatch

    @property
    def full(self) -> float:
        """The part of the memory that the larger of its batches needs; 0 where none fits."""
        reached = self.batches.planned or self.batches.plain
        return reached.promised_bytes / self.batches.memory_bytes if reached else 0.0

    def to_json(self) -> dict[str, Any]:
        """The numbers, as JSON can hold them."""
        return {
            "length": self.length,
            "lengths": self.lengths,
            "samples": self.samples,
            "padding": self.padding,
            "full": self.full,
            "batches": self.batches.to_json(),
        }


@dataclass(frozen=True)
class ShapeClasses:
    """Few shapes to train on: each is planned and compiled once."""

    classes: tuple[ShapeClass, ...]
    memory_bytes: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths to pad to, for `lowtide.padded` and `lowtide.optimize(classes=…)`."""
        return tuple(each.length for each in self.classes)

    @property
    def padding(self) -> float:
        """The part of all tokens that is padding."""
        held = sum(each.length * each.samples for each in self.classes)
        return sum(each.padding * each.length * each.samples for each in self.classes) / held

    @property
    def notes(self) -> tuple[str, ...]:
        """What went otherwise than it should."""
        partly = [each for each in self.classes if each.full < _FULL]
        told = [
            f"length {each.length} holds {100 * each.full:.1f} % of the memory: one sample more does not fit"
            for each in partly
        ]
        return (*told, *dict.fromkeys(note for each in self.classes for note in each.batches.notes))

    @property
    def title(self) -> str:
        """How many, within what, and what they waste."""
        return (
            f"{len(self.classes)} classes within {format_bytes(self.memory_bytes)}, "
            f"{100 * self.padding:.1f} % of the tokens padding"
        )

    def __str__(self) -> str:
        return "\n".join([self.title, "", str(self.table()), *(f"note: {note}" for note in self.notes)])

    def table(self) -> Table:
        """A row for each class."""
        titles = ("pad to", "lengths", "samples", "padding", "batch", "batch with a plan", "memory full")
        return Table(titles, tuple(map(_row, self.classes)), numbers=frozenset(range(len(titles))))

    def to_json(self) -> dict[str, Any]:
        """The numbers, as JSON can hold them."""
        return {
            "memory_bytes": self.memory_bytes,
            "padding": self.padding,
            "classes": [each.to_json() for each in self.classes],
            "notes": list(self.notes),
        }


def shape_classes(
    model: nn.Module,
    lengths: Lengths,
    example_of: ShapeOf,
    *,
    memory: str | int | Card,
    classes: int | Sequence[int] | None = None,
    length_key: str | None = None,
    loss: Loss | None = None,
    time_limit: float | None = None,
    optimizer: Updates | None = None,
    accumulate: int = 1,
    multiple_of: int = 1,
    device: str | torch.device | None = None,
    profile: bool = True,
    method: str | Scheduler | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    telling: Telling | None = None,
) -> ShapeClasses:
    """Few lengths to pad an epoch's samples to, and for each the largest batch that trains within `memory`.

    `classes` says how many at most (4 by default), or which. So many are chosen that the least of the tokens
    is padding (`lowtide.best_classes`). `example_of(batch, length)` is so many samples of one length. The
    other arguments are as in `lowtide.worst`, and in `lowtide.largest_batch`, which is asked for each class.

    Raises:
        InfeasibleBudget: not even one sample of a class fits; the error carries the least that it needs.
        BadRequest, CannotTrace, CannotCapture: as in `lowtide.worst` and `lowtide.largest_batch`.
    """
    counts = counted_lengths(lengths, length_key)
    memory_bytes = memory_bytes_of(Budget.parse(memory))
    chosen = chosen_classes(counts, classes)

    def batches_of(length: int) -> LargestBatch:
        return largest_batch(
            model,
            partial(_of_length, example_of, length),
            memory=memory,
            loss=loss,
            time_limit=time_limit,
            optimizer=optimizer,
            accumulate=accumulate,
            multiple_of=multiple_of,
            device=device,
            profile=profile,
            method=method,
            name=name,
            progress=progress,
            telling=telling,
        )

    below = (0, *chosen)
    found = tuple(
        _class(counts, shorter, length, batches_of(length))
        for shorter, length in zip(below, chosen, strict=False)
        if any(shorter < each <= length for each in counts)
    )
    return ShapeClasses(found, memory_bytes)


def _of_length(example_of: ShapeOf, length: int, batch: int) -> Batch | Example:
    return example_of(batch, length)


def _class(counts: Mapping[int, int], shorter: int, length: int, batches: LargestBatch) -> ShapeClass:
    within = {each: samples for each, samples in counts.items() if shorter < each <= length}
    samples = sum(within.values())
    tokens = sum(each * count for each, count in within.items())
    return ShapeClass(length, len(within), samples, 1 - tokens / (samples * length), batches)


def _row(each: ShapeClass) -> tuple[str, ...]:
    plain, planned = each.batches.plain, each.batches.planned
    return (
        f"{each.length:,}",
        f"{each.lengths:,}",
        f"{each.samples:,}",
        f"{100 * each.padding:.1f} %",
        f"{plain.batch:,}" if plain else "none",
        f"{planned.batch:,}" if planned else "none",
        f"{100 * each.full:.1f} %",
    )
