"""The step at any batch: captured and profiled at two small ones, and scaled from there to all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch

from lowtide.cost.price import with_costs_by_rule
from lowtide.ir.graph import Graph
from lowtide.planner.batch_family import DoesNotScale, Family, check_same_sizes, family_of, with_costs_of
from lowtide.planner.largest import largest_that
from lowtide.planner.on_card import timed_for
from lowtide.planner.ops import StepBudget
from lowtide.text.card import Card
from lowtide.trace.dry_run import Trace
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import Example, Loss

MOST = 1 << 20  # larger batches are not looked for
_SMALLEST = 4  # for a single sample, kernels of their own are chosen
_QUICK_SECONDS = 2.0  # a step that takes no longer is profiled at the answer too: lines are rough for times
_PART = 64  # of the batch that fits, roughly, a sample is this part: its kernels are those of large batches


@dataclass(frozen=True)
class Batch:
    """What a step on some number of samples is given, and how its output becomes a loss."""

    example: Example
    loss: Loss | None = None


BatchOf: TypeAlias = Callable[[int], Batch | Example]
Telling: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class AnyBatch:
    """A step of training on any number of samples: `spec_of(batch)`."""

    spec_of: Callable[[int], StepSpec]
    multiple_of: int
    device: str | torch.device | None
    profile: bool
    telling: Telling | None
    card: Card | None = None  # what the memory is, if it is no peak's

    @property
    def by_rule(self) -> bool:
        """Whether nothing can be profiled: the device is not here."""
        return str(self.device).startswith("cuda") and not torch.cuda.is_available()

    def tell(self, what: str) -> None:
        if self.telling is not None:
            self.telling(what)


class Steps:
    """The step at any batch: scaled from two samples, or captured. `lines` are None once they do not hold."""

    def __init__(self, asked: AnyBatch, memory_bytes: int) -> None:
        self.asked = asked
        self.unit = asked.multiple_of
        self.seen: set[int] = set()
        self.notes: list[str] = []
        self._made: dict[int, StepBudget] = {}
        self._real: dict[int, StepBudget] = {}
        runs_ops = asked.profile and not asked.by_rule
        rough = self._lines_from(_SMALLEST * self.unit, asked.profile and not runs_ops)
        self.device = rough.small.plain.graph.device
        self.lines: Lines | None = rough
        if runs_ops:
            self.lines = self._lines_from(self._worth_profiling(rough, memory_bytes), profile=True)
        self.sampled = self.lines.batches
        self.notes += self.lines.small.plain.graph.notes

    def predicted(self, batch: int) -> StepBudget:
        """The step as lines tell it; without lines, as it is captured."""
        if self.lines is None:
            return self.captured(batch)
        if batch not in self._made:
            self._made[batch] = Predicted(
                self.lines.small.spec, lines=self.lines, batch=batch, card=self.asked.card
            )
        return self._made[batch]

    def captured(self, batch: int) -> StepBudget:
        """The step as it is captured at that batch. Where there are lines, DoesNotScale if it is off them."""
        if batch not in self._real:
            self.asked.tell(f"capturing the step at batch {batch}")
            spec = self._noted(batch)
            if self.lines is None:
                self._real[batch] = Captured(spec, card=self.asked.card)
            else:
                expected = self.predicted(batch)
                estimated = self.asked.profile and self._is_long(expected)
                spec = replace(spec, profile=self.asked.profile and not estimated)
                self._real[batch] = Captured(
                    spec, expected=expected, estimated=estimated, card=self.asked.card
                )
        return self._real[batch]

    def _is_long(self, step: StepBudget) -> bool:
        """Whether running the ops of a step would take long. On CUDA it never does."""
        if self.device.startswith("cuda"):
            return False
        return sum(op.seconds for op in step.plain.graph.ops) > _QUICK_SECONDS

    def abandon_lines(self, reason: DoesNotScale) -> None:
        """From now on every step is captured."""
        self.notes.append(f"the step does not scale along a line, so each batch was captured: {reason}")
        self.lines = None
        self._real.clear()

    def _lines_from(self, batch: int, profile: bool) -> Lines:
        """The lines through a batch and its double."""
        self.asked.tell(f"running the step at batch {batch} and {2 * batch} on fake tensors")
        small, large = (Captured(replace(self._noted(size), profile=profile)) for size in (batch, 2 * batch))
        return Lines(small, large, (batch, 2 * batch), profile and self.asked.by_rule)

    def _worth_profiling(self, rough: Lines, memory_bytes: int) -> int:
        """A batch whose ops are quick to run, and yet large enough to tell of those at the largest."""

        def fits(count: int) -> bool:
            return rough.plain_at(self.unit * count).peak_bytes <= memory_bytes

        try:
            part = largest_that(fits, MOST // self.unit) // _PART
        except DoesNotScale:
            return rough.batches[0]
        return self.unit * max(_SMALLEST, 1 << part.bit_length() >> 1)

    def _noted(self, batch: int) -> StepSpec:
        self.seen.add(batch)
        return self.asked.spec_of(batch)


@dataclass(frozen=True, kw_only=True)
class Captured(StepBudget):
    """A step that is captured. Where one is `expected`, it has to be that, with its costs if `estimated`."""

    expected: StepBudget | None = None
    estimated: bool = False

    @cached_property
    def plain(self) -> Trace:
        """The dry run, checked."""
        trace = super().plain
        if self.expected is None:
            return trace
        if trace.schedule != self.expected.plain.schedule:
            raise DoesNotScale("values are given back in another order")
        return replace(trace, graph=self._checked(trace.graph, self.expected.plain.graph))

    @cached_property
    def graph(self) -> Graph:
        """The captured step, checked."""
        graph = super().graph
        return graph if self.expected is None else self._checked(graph, self.expected.graph)

    def _checked(self, captured: Graph, expected: Graph) -> Graph:
        check_same_sizes(expected, captured)
        return with_costs_of(captured, expected) if self.estimated else captured


@dataclass(frozen=True)
class Lines:
    """Two samples of a step, and the steps on the lines through them."""

    small: Captured
    large: Captured
    batches: tuple[int, int]
    by_rule: bool  # workspaces are known by rule, and the rules know them at every batch
    along: str = "batch"
    beside: tuple[Captured, int] | None = None  # one more, which tells what kernels round up

    @cached_property
    def _plain(self) -> Family:
        found = self._through(lambda step: step.plain.graph)
        others = (self.large, *([] if self.beside is None else [self.beside[0]]))
        if any(other.plain.schedule != self.small.plain.schedule for other in others):
            raise DoesNotScale("values are given back in another order")
        return found

    @cached_property
    def _graph(self) -> Family:
        return self._through(lambda step: step.graph)

    def _through(self, graph_of: Callable[[Captured], Graph]) -> Family:
        found = family_of(graph_of(self.small), graph_of(self.large), self.batches, self.along)
        if self.beside is None:
            return found
        step, batch = self.beside
        return found.told_by(graph_of(step), batch)

    def plain_at(self, batch: int) -> Trace:
        """The dry run at that batch."""
        return Trace(self.priced(self._plain.at(batch)), self.small.plain.schedule)

    def graph_at(self, batch: int) -> Graph:
        """The captured step at that batch."""
        return self.priced(self._graph.at(batch))

    def priced(self, graph: Graph) -> Graph:
        """With the costs that rules know, where those count."""
        return with_costs_by_rule(graph) if self.by_rule else graph


@dataclass(frozen=True, kw_only=True)
class Predicted(StepBudget):
    """A step that was never captured."""

    lines: Lines
    batch: int

    def priced(self, graph: Graph) -> Graph:
        """Nothing is run for it: slices take their part of what lines tell, or what the rules say."""
        return timed_for(self.card, self.lines.priced(graph))

    @cached_property
    def plain(self) -> Trace:
        """The dry run, as it would be."""
        trace = self.lines.plain_at(self.batch)
        return replace(trace, graph=timed_for(self.card, trace.graph))

    @cached_property
    def graph(self) -> Graph:
        """The captured step, as it would be."""
        return timed_for(self.card, self.lines.graph_at(self.batch))
