"""The worst step of an epoch: which length peaks highest, and which do not fit, before the first step.

sample   the step is run on fake tensors at two lengths, and at a third that is not round
scale    every extent at every other length follows along a line, and so does the peak
settle   the step is run on fake tensors at the worst length, and at the longest that a plan makes fit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from lowtide.cost.profile import Progress
from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.ir.graph import Phase
from lowtide.planner.batch import memory_bytes_of
from lowtide.planner.batch_family import DoesNotScale
from lowtide.planner.batch_steps import Batch, Telling
from lowtide.planner.largest import largest_that
from lowtide.planner.length_steps import LengthSteps
from lowtide.planner.lengths import Lengths, counted_lengths
from lowtide.planner.on_card import card_to_json
from lowtide.solvers import default_method, is_scheduler, schedulers
from lowtide.solvers.method import Scheduler
from lowtide.text.budget import LOWEST, Budget
from lowtide.text.card import Card
from lowtide.text.table import Table
from lowtide.text.units import format_bytes
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import Example, Loss, Updates, declared, optimizer_name

ExampleOf = Callable[[int], Batch | Example]
_Found = TypeVar("_Found")
_MOST_SHOWN = 8


@dataclass(frozen=True)
class LengthPeak:
    """The step at one length. Whether it `fits` is None where no memory was named.

    `peak_bytes` is what the device's allocator will say that the step held as it is written; where a card was
    named, all that a training takes of it. `op` runs when most is held, in the `phase`.
    `fits_planned` says whether a plan keeps it within the memory.
    """

    length: int
    samples: int
    peak_bytes: int
    op: str
    phase: str
    fits: bool | None = None
    fits_planned: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as JSON can hold it."""
        return {
            "length": self.length,
            "samples": self.samples,
            "predicted_peak_bytes": self.peak_bytes,
            "op": self.op,
            "phase": self.phase,
            "fits": self.fits,
            "fits_planned": self.fits_planned,
        }


@dataclass(frozen=True)
class Epoch:
    """Every length of an epoch, predicted, and the worst of them.

    `lengths` has every length that comes, the shortest first.
    `sampled` are the lengths that everything was scaled from, `captured` all at which the step was traced,
    `scaled` whether the others were told along lines. `notes` say what went otherwise.
    """

    model: str
    device: str
    lengths: tuple[LengthPeak, ...]
    memory_bytes: int | None
    sampled: tuple[int, ...]
    captured: tuple[int, ...]
    scaled: bool
    card: Card | None = None
    optimizer: str | None = None
    accumulate: int = 1
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> LengthPeak:
        """The length that peaks highest."""
        return max(self.lengths, key=lambda each: each.peak_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether all lengths fit as the step is written; None where no memory was named."""
        return None if self.memory_bytes is None else all(each.fits for each in self.lengths)

    @property
    def samples(self) -> int:
        """How many samples the epoch has."""
        return sum(each.samples for each in self.lengths)

    @property
    def too_long(self) -> tuple[LengthPeak, ...]:
        """The lengths that do not fit as the step is written."""
        return tuple(each for each in self.lengths if each.fits is False)

    @property
    def too_long_planned(self) -> tuple[LengthPeak, ...]:
        """Those among them that do not fit with a plan either."""
        return tuple(each for each in self.lengths if each.fits_planned is False)

    def __str__(self) -> str:
        return "\n".join([*self.summary(), "", str(self.table()), *(f"note: {note}" for note in self.notes)])

    def summary(self) -> list[str]:
        """The worst length, and what does not fit, in sentences."""
        worst = self.worst
        found = [
            f"worst is length {worst.length}: {format_bytes(worst.peak_bytes)}, in the {worst.phase} at "
            f"{worst.op}",
        ]
        if self.memory_bytes is None:
            return found
        memory = format_bytes(self.memory_bytes) if self.card is None else str(self.card)
        if self.fits:
            return [*found, f"all {len(self.lengths)} lengths fit in {memory}"]
        return [
            *found,
            f"do not fit in {memory}: {self._listed(self.too_long)}",
            f"nor with a plan: {self._listed(self.too_long_planned)}",
        ]

    def how_found(self) -> str:
        """Which lengths were traced, in words."""
        captured = ", ".join(map(str, self.captured))
        if not self.scaled:
            return f"traced at length {captured}"
        sampled = ", ".join(map(str, self.sampled))
        return f"traced at length {captured}; all others are scaled from {sampled}"

    def table(self) -> Table:
        """A row for each length, or for some of them and the worst."""
        rows = [self._row(each) for each in self._shown()]
        titles = ("length", "samples", "peak", "as it is", "with a plan")
        shown = len(titles) if self.memory_bytes is not None else 3
        return Table(titles[:shown], tuple(row[:shown] for row in rows), numbers=frozenset(range(3)))

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "model": self.model,
            "device": self.device,
            "optimizer": self.optimizer,
            "accumulate": self.accumulate,
            "memory_bytes": self.memory_bytes,
            "card": None if self.card is None else card_to_json(self.card),
            "fits": self.fits,
            "worst": self.worst.to_json(),
            "lengths": [each.to_json() for each in self.lengths],
            "samples": self.samples,
            "samples_too_long": sum(each.samples for each in self.too_long),
            "samples_too_long_planned": sum(each.samples for each in self.too_long_planned),
            "sampled": list(self.sampled),
            "captured": list(self.captured),
            "scaled": self.scaled,
            "notes": list(self.notes),
        }

    def _listed(self, lengths: tuple[LengthPeak, ...]) -> str:
        if not lengths:
            return "none"
        samples = sum(each.samples for each in lengths)
        first, last = lengths[0].length, lengths[-1].length
        which = f"length {first}" if len(lengths) == 1 else f"{len(lengths)} lengths from {first} to {last}"
        return f"{which}, {samples:,} of {self.samples:,} samples ({100 * samples / self.samples:.1f} %)"

    def _shown(self) -> list[LengthPeak]:
        """Lengths that are spread evenly, the last one that fits, and the worst."""
        last = len(self.lengths) - 1
        places = {last * part // max(1, _MOST_SHOWN - 1) for part in range(_MOST_SHOWN)}
        edges = [
            place
            for place, (one, after) in enumerate(zip(self.lengths, self.lengths[1:], strict=False))
            if (one.fits, one.fits_planned) != (after.fits, after.fits_planned)
        ]
        places |= {*edges, self.lengths.index(self.worst)}
        return [self.lengths[place] for place in sorted(places)]

    def _row(self, each: LengthPeak) -> tuple[str, ...]:
        verdicts = ("fits" if fits else "does not fit" for fits in (each.fits, each.fits_planned))
        return (f"{each.length:,}", f"{each.samples:,}", format_bytes(each.peak_bytes), *verdicts)


def worst(
    model: nn.Module,
    lengths: Lengths,
    example_of: ExampleOf,
    *,
    memory: str | int | Card | None = None,
    length_key: str | None = None,
    loss: Loss | None = None,
    optimizer: Updates | None = None,
    accumulate: int = 1,
    device: str | torch.device | None = None,
    profile: bool = True,
    method: str | Scheduler | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    telling: Telling | None = None,
) -> Epoch:
    """The length at which training peaks highest, and which of an epoch's lengths do not fit in `memory`.

    `lengths` are a list, a histogram {length: samples}, or a dataset, with the `length_key` under which a
    sample has its length or its tokens. `example_of(n)` is a batch of samples of that length:
    `lambda n: torch.empty(8, n, dtype=torch.long, device="meta")`. Only its shapes matter, so tensors on meta
    do, but what a model decides by numbers, masks say, needs them. A batch of several lengths is as long as
    its longest sample. Where the loss depends on the batch as well, return `Batch(example, loss)`. The step,
    `optimizer`, `accumulate`, `device` and `profile` are as in `lowtide.plan`.

    A `memory` of "24GiB card", a name ("rtx4090") or a `lowtide.Card` is all that a card has, as in
    `lowtide.largest_batch`.

    Nothing is trained and nothing can run out of memory. The step is traced at two lengths, or three, and
    scaled to all others; the worst is traced as it is, and has to be what was told. With a `memory` the
    longest that a plan makes fit is searched, captured and planned there.
    A step whose ops change with its length (a loop over the tokens) is traced at every length that comes.

    Raises:
        BadRequest: there are no lengths, one of them is none, the model has no positions for one, or the step
            does not scale and there are too many lengths to trace each.
        CannotTrace, CannotCapture: as in `lowtide.plan`.
    """
    counts = counted_lengths(lengths, length_key)
    asked = Budget.parse(memory)
    memory_bytes = None if memory is None else memory_bytes_of(asked)
    chosen = method or default_method(asked if asked.is_given else Budget.parse(LOWEST))
    if not is_scheduler(chosen):
        raise BadRequest(
            f"{chosen} plans layers, and lengths are planned op by op. These do: {', '.join(schedulers())}."
        )

    def spec_of(length: int) -> StepSpec:
        found = example_of(length)
        at = found if isinstance(found, Batch) else Batch(found)
        example, whole = declared(at.example, at.loss or loss)
        return StepSpec(model, example, whole, optimizer, accumulate, device, profile, name, progress)

    steps = LengthSteps(spec_of, list(counts), telling)
    peaks = along_lines(steps, lambda: _peaks(steps, counts, asked.card))
    if memory_bytes is not None:
        fitting = along_lines(steps, lambda: _fitting(steps, peaks, chosen, asked.card or memory_bytes))
        peaks = [_judged(each, memory_bytes, fitting) for each in peaks]
    return Epoch(
        model=name or type(model).__name__,
        device=steps.captured(max(peaks, key=_need).length).plain.graph.device,
        lengths=tuple(peaks),
        memory_bytes=memory_bytes,
        card=asked.card,
        sampled=steps.sampled if steps.lines is not None else (),
        captured=tuple(sorted(steps.seen)),
        scaled=steps.lines is not None,
        optimizer=optimizer_name(optimizer),
        accumulate=accumulate,
        notes=tuple(steps.notes),
    )


def along_lines(steps: LengthSteps, find: Callable[[], _Found]) -> _Found:
    """What is found along lines; from captures alone, if the steps turn out to be on none."""
    if steps.lines is None:
        return find()
    try:
        return find()
    except DoesNotScale as reason:
        steps.abandon_lines(reason)
    return find()


def _peaks(steps: LengthSteps, counts: Mapping[int, int], card: Card | None) -> list[LengthPeak]:
    """Every length's peak. The worst, and the longest, are traced as they are."""
    _ = steps.captured(max(counts)).plain
    found = [_peak(steps, length, samples, card) for length, samples in counts.items()]
    _ = steps.captured(max(found, key=_need).length).plain
    return found


def _peak(steps: LengthSteps, length: int, samples: int, card: Card | None) -> LengthPeak:
    step = steps.predicted(length)
    step = step if card is None else step.on(card)
    running = step.plain.timeline.peak_op
    op = "what is always there" if running is None else running.label
    phase = Phase.FORWARD if running is None else running.phase
    return LengthPeak(length, samples, step.plain_needed_bytes, op, phase.value)


def _need(each: LengthPeak) -> int:
    return each.peak_bytes


def _fitting(
    steps: LengthSteps, peaks: list[LengthPeak], method: str | Scheduler, memory: int | Card
) -> frozenset[int]:
    """The lengths that a plan makes fit; those that peak lower than one that fits are taken to fit."""
    most_bytes = memory.memory_bytes if isinstance(memory, Card) else memory
    too_long = sorted((each for each in peaks if each.peak_bytes > most_bytes), key=_need)

    def fits(count: int) -> bool:
        try:
            steps.predicted(too_long[count - 1].length).solve(method, memory)
        except InfeasibleBudget:
            return False
        return True

    if not too_long:
        return frozenset()
    found = largest_that(fits, len(too_long), len(too_long))
    if found:
        _ = steps.captured(too_long[found - 1].length).graph
    return frozenset(each.length for each in too_long[:found])


def _judged(each: LengthPeak, memory_bytes: int, fitting: frozenset[int]) -> LengthPeak:
    fits = each.peak_bytes <= memory_bytes
    return replace(each, fits=fits, fits_planned=fits or each.length in fitting)
