"""The largest batch at which a step reaches a goal: to fit as it is written, or with a plan.

It is searched among steps that were never captured, and settled by a capture. Where that is not what was
expected, the search begins again with what it showed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.planner.batch_family import DoesNotScale
from lowtide.planner.batch_steps import MOST, Steps
from lowtide.planner.largest import largest_that
from lowtide.planner.ops import StepBudget
from lowtide.solvers import solve
from lowtide.solvers.method import Scheduler
from lowtide.solvers.solution import GraphSolution
from lowtide.text.budget import LOWEST
from lowtide.text.card import Card

_TRIES = 6
_NOTCHES = 64  # how finely the memory is divided in looking for a schedule within a time limit
_STRETCHES = 2  # how often the guess is improved: the best schedule is not the same at every batch


@dataclass(frozen=True)
class Reached:
    """A batch that fits, as a capture at that batch has shown.

    `peak_bytes` is what the step holds at its peak, `promised_bytes` what memory must hold for that to be
    safe (`lowtide.planner.promise`). `seconds` is the time of a step, None where ops were not timed.
    `solution` is the plan, for `lowtide.apply`; None for the step as it is written.
    """

    batch: int
    peak_bytes: int
    promised_bytes: int
    seconds: float | None
    solution: GraphSolution | None = field(default=None, repr=False)

    @property
    def samples_per_second(self) -> float | None:
        """How many samples are trained on in a second; None where ops were not timed."""
        return self.batch / self.seconds if self.seconds else None

    @property
    def extra_seconds_ratio(self) -> float | None:
        """Time added by recomputation and slices, as a part of the step without; None if it is not known."""
        if not self.seconds:
            return None
        return 0.0 if self.solution is None else _extra_ratio(self.solution)

    @property
    def slices(self) -> int:
        """How many stretches of the step run in slices."""
        tiled = None if self.solution is None else self.solution.graph.tiled
        return 0 if tiled is None else len(tiled.blocks)

    def to_json(self) -> dict[str, Any]:
        """The numbers, as JSON can hold them."""
        again = None if self.solution is None else sum(self.solution.recomputed.values())
        return {
            "batch": self.batch,
            "predicted_peak_bytes": self.peak_bytes,
            "promised_bytes": self.promised_bytes,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "extra_seconds_ratio": self.extra_seconds_ratio,
            "recomputed_ops": again,
            "stretches_in_slices": self.slices,
        }


def _extra_ratio(solution: GraphSolution) -> float:
    """Time added to the plain step, as a part of it."""
    tiled = solution.graph.tiled
    plain = solution.seconds if tiled is None else sum(op.seconds for op in tiled.plain.ops)
    return (solution.seconds + solution.extra_seconds) / plain - 1 if plain else 0.0


@dataclass(frozen=True)
class Goal(ABC):
    """What is to fit: in a peak of so many bytes, or on a card of so many, of which others hold some."""

    memory_bytes: int
    card: Card | None = None

    def on(self, step: StepBudget, memory_bytes: int) -> StepBudget:
        """The step on a card of that size, if it is a card that is to hold it."""
        return step if self.card is None else step.on(Card(memory_bytes, self.card.reserve_bytes))

    @abstractmethod
    def reached(self, step: StepBudget, batch: int, memory_bytes: int) -> Reached | None:
        """The step, if it fits in so much."""

    @abstractmethod
    def needed_bytes(self, step: StepBudget) -> int:
        """The least that the step needs."""

    def guess(self, steps: Steps, start: int) -> int:
        """A batch that may be the largest, from one that fits."""
        return start


def settled(steps: Steps, goal: Goal, start: int) -> Reached | None:
    """The largest batch that fits, captured there. `start` is one that is known to fit, or 1."""
    try:
        return _captured_where_predicted(steps, goal, start)
    except DoesNotScale as reason:
        steps.abandon_lines(reason)
    return _captured_where_predicted(steps, goal, start)


def _captured_where_predicted(steps: Steps, goal: Goal, start: int) -> Reached | None:
    """Search, capture, and search again with what the capture showed to be missing, or to be left over."""
    tried: dict[int, Reached | None] = {}
    guess, off_bytes = goal.guess(steps, start), 0
    while len(tried) < _TRIES:
        batch = max(steps.unit, _searched(steps, goal, guess, goal.memory_bytes - off_bytes))
        if batch in tried:
            break
        step = steps.captured(batch)
        tried[batch] = goal.reached(step, batch, goal.memory_bytes)
        found_off = goal.needed_bytes(step) - goal.needed_bytes(steps.predicted(batch))
        if found_off == off_bytes:
            break
        guess, off_bytes = batch, found_off
    best = max(filter(None, tried.values()), key=lambda reached: reached.batch, default=None)
    if best is None and steps.lines is not None and min(tried) > steps.unit:
        raise DoesNotScale(f"at batch {min(tried)}, which should fit, the captured step does not")
    return best


def _searched(steps: Steps, goal: Goal, guess: int, memory_bytes: int) -> int:
    """The largest batch that is predicted to fit; 0 if none is."""
    unit = steps.unit

    def fits(count: int) -> bool:
        batch = unit * count
        return goal.reached(steps.predicted(batch), batch, memory_bytes) is not None

    return unit * largest_that(fits, MOST // unit, guess // unit)


@dataclass(frozen=True)
class PlainGoal(Goal):
    """The step as it is written."""

    def reached(self, step: StepBudget, batch: int, memory_bytes: int) -> Reached | None:
        needed = self.on(step, memory_bytes).plain_needed_bytes
        if needed > memory_bytes:
            return None
        seconds = sum(op.seconds for op in step.plain.graph.ops)
        return Reached(batch, step.plain.peak_bytes, needed, seconds or None)

    def needed_bytes(self, step: StepBudget) -> int:
        return step.plain_needed_bytes


@dataclass(frozen=True)
class PlannedGoal(Goal):
    """The step with a plan, within the memory and the time limit."""

    method: str | Scheduler = field(kw_only=True)
    time_limit: float | None = field(kw_only=True)

    def reached(self, step: StepBudget, batch: int, memory_bytes: int) -> Reached | None:
        step = self.on(step, memory_bytes)
        try:
            solution = step.solve(self.method, memory_bytes if step.card is None else step.card)
        except InfeasibleBudget:
            return None
        if not self._in_time(solution):
            return None
        seconds = solution.seconds + solution.extra_seconds
        return Reached(batch, solution.peak_bytes, step.promised_bytes(solution), seconds or None, solution)

    def needed_bytes(self, step: StepBudget) -> int:
        return step.promised_bytes(step.solve(self.method, LOWEST))

    def guess(self, steps: Steps, start: int) -> int:
        """How far the leanest schedule without slices carries. Legal at some batch, it is so at all."""
        if steps.lines is None:
            return start
        steps.asked.tell("planning op by op")
        guess = max(start, steps.sampled[1])
        for _ in range(_STRETCHES):
            guess = max(steps.unit, self._stretched(steps, self._leanest(steps.predicted(guess))))
        return guess

    def _stretched(self, steps: Steps, solution: GraphSolution) -> int:
        def fits(count: int) -> bool:
            step = steps.predicted(steps.unit * count)
            there = replace(solution, graph=step.graph)
            return step.promised_bytes(there) <= self.memory_bytes

        return steps.unit * largest_that(fits, MOST // steps.unit)

    def _leanest(self, step: StepBudget) -> GraphSolution:
        """The schedule with the lowest peak, of those within the time limit."""
        lowest = solve(step.graph, self.method, LOWEST)
        if self._in_time(lowest):
            return lowest
        most_bytes = step.plain_peak_bytes

        def within(notches: int) -> GraphSolution:
            above_bytes = (most_bytes - lowest.peak_bytes) * (_NOTCHES - notches) // _NOTCHES
            return solve(step.graph, self.method, lowest.peak_bytes + max(0, above_bytes))

        return within(largest_that(lambda notches: self._in_time(within(notches)), _NOTCHES))

    def _in_time(self, solution: GraphSolution) -> bool:
        if self.time_limit is None:
            return True
        if not solution.seconds:
            raise BadRequest(
                f"there are no times to hold a time limit of {self.time_limit} against: no op was run. "
                "Leave out profile=False (--no-profile), or the time limit."
            )
        return _extra_ratio(solution) <= self.time_limit - 1
