"""The step at any length: captured at two lengths, and scaled from there to all others.

One more capture, at a length that is not round, tells what kernels round up. A step on a single token is of
its own kind (nothing attends to anything before it), and a few lengths are each captured as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

import torch

from lowtide.errors import BadRequest
from lowtide.planner.batch_family import DoesNotScale
from lowtide.planner.batch_steps import Captured, Lines, Predicted, Telling
from lowtide.planner.ops import StepBudget
from lowtide.trace.spec import StepSpec

_FEW = 3  # lengths, for which lines would save nothing
_ROUND = 128  # what kernels round up to is no more than that
_MOST_CAPTURED = 64  # lengths, where they do not scale


class LengthSteps:
    """The step at each of some lengths. `lines` are None where all of them are captured."""

    def __init__(
        self, spec_of: Callable[[int], StepSpec], lengths: Sequence[int], telling: Telling | None
    ) -> None:
        self._spec_of = spec_of
        self._lengths = lengths
        self._telling = telling
        self.notes: list[str] = []
        self.seen: set[int] = set()
        self._real: dict[int, StepBudget] = {}
        self.sampled = sampled_lengths(lengths)
        self.lines = self._lines_through(self.sampled) if self.sampled else None

    @property
    def spec(self) -> StepSpec:
        """The step that is asked about, at its longest."""
        return self._spec_of(self._lengths[-1])

    def predicted(self, length: int) -> StepBudget:
        """The step as lines tell it; where there are none, as it is captured."""
        if self.lines is None or length == 1:
            return self.captured(length)
        return Predicted(self.lines.small.spec, lines=self.lines, batch=length)

    def captured(self, length: int) -> StepBudget:
        """The step as it is captured there. Where there are lines, DoesNotScale if it is off them."""
        if length not in self._real:
            spec = self._noted(length)
            if self.lines is None or length == 1:
                self._real[length] = Captured(spec)
            else:
                estimated = spec.profile and not self._on_cuda(spec)
                spec = replace(spec, profile=spec.profile and not estimated)
                self._real[length] = Captured(spec, expected=self.predicted(length), estimated=estimated)
        return self._real[length]

    def abandon_lines(self, reason: DoesNotScale) -> None:
        """From now on every length is captured.

        Raises:
            BadRequest: those are too many.
        """
        if len(self._lengths) > _MOST_CAPTURED:
            raise BadRequest(
                f"the step does not scale with its length ({reason}), so each length has to be captured, and "
                f"{len(self._lengths)} are too many for that. Ask about {_MOST_CAPTURED} at most: those that "
                "lengths are padded to (lowtide.best_classes), or the longest."
            )
        self.notes.append(f"the step does not scale with its length, so each was captured: {reason}")
        self.lines = None
        self._real.clear()

    def _lines_through(self, sampled: Sequence[int]) -> Lines:
        small, large, *beside = (self._sample(length, place < 2) for place, length in enumerate(sampled))
        by_rule = self._on_cuda(small.spec) and not torch.cuda.is_available()
        third = (beside[0], sampled[2]) if beside else None
        batches = (sampled[0], sampled[1])
        return Lines(small, large, batches, small.spec.profile and by_rule, "length", third)

    def _sample(self, length: int, with_costs: bool) -> Captured:
        spec = self._noted(length)
        profile = spec.profile and (with_costs or self._on_cuda(spec))
        return Captured(replace(spec, profile=profile))

    @staticmethod
    def _on_cuda(spec: StepSpec) -> bool:
        """Whether ops are quick to profile: elsewhere that is done for two lengths alone."""
        if spec.device is not None:
            return str(spec.device).startswith("cuda")
        return any(parameter.is_cuda for parameter in spec.model.parameters())

    def _noted(self, length: int) -> StepSpec:
        self.seen.add(length)
        if self._telling is not None:
            self._telling(f"running the step at length {length} on fake tensors")
        return self._spec_of(length)


def sampled_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Two round lengths to scale from, and one that is no rounder than `lengths` are, where these are not.

    None where there are so few that each had better be captured.
    """
    if len(lengths) <= _FEW:
        return ()
    longest = max(lengths)
    unit = min(_ROUND, 1 << (longest // 2).bit_length() - 1)
    large = longest // unit * unit
    common = gcd(unit, *lengths)
    beside = () if common == unit else (unit + common,)
    return (unit * max(1, large // unit // 2), large, *beside)
