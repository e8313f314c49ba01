"""The largest batch: how many samples a step can take within some memory, as it is and with a plan.

    sample   the step is captured and profiled at two small batches
    scale    every value, workspace and time follows from these along a line, at any batch
    search   the largest batch that fits is looked for among steps that were never captured
    settle   the step is captured at that batch. Where it is not what was expected, the search begins again

Nothing runs but the single ops of a profile, so there is nothing that could run out of memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lowtide.applying import apply
from lowtide.budgeting import StepBudget
from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.fitting import Progress
from lowtide.measurement import Reading, measure, present_device
from lowtide.sampling import MOST, Asked, Batch, BatchOf, Steps, Telling
from lowtide.scaling import DoesNotScale
from lowtide.searching import largest_that
from lowtide.solution import GraphSolution
from lowtide.solvers import default_method, is_scheduler, schedulers, solve
from lowtide.solvers.graphs import LOWEST
from lowtide.solvers.method import Scheduler
from lowtide.training import Loss, Updates, optimizer_of, training_step
from lowtide.units import parse_bytes

_TRIES = 6
_WARM_UP = 2  # libraries set themselves up in the first steps, and optimizers make their states
_NOTCHES = 64  # how finely the memory is divided in looking for a schedule within a time limit
_STRETCHES = 2  # how often the guess is improved: the best schedule is not the same at every batch


@dataclass(frozen=True)
class Reached:
    """A batch that fits, as a capture at that batch has shown.

    `peak_bytes` is what the step holds at its peak, `promised_bytes` what memory must hold for that to be
    safe (`StepBudget.promised_bytes`). `seconds` is the time of a step, None where ops were not timed.
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
        """Time added by recomputation, as a part of the step without; None where ops were not timed."""
        if not self.seconds:
            return None
        return 0.0 if self.solution is None else self.solution.extra_seconds_ratio

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
        }


@dataclass(frozen=True)
class LargestBatch:
    """The largest batches that fit in some memory: of the step as it is written, and with a plan.

    `plain` is None if not even the smallest batch fits without a plan, `planned` if none fits within the
    time limit. `sampled` are the batches that everything was scaled from, `captured` all at which the step
    was traced, `scaled` whether the answer was found along lines. `notes` say what went otherwise.
    """

    model: str
    device: str
    memory_bytes: int
    plain: Reached | None
    planned: Reached | None
    sampled: tuple[int, ...]
    captured: tuple[int, ...]
    scaled: bool
    optimizer: str | None = None
    accumulate: int = 1
    time_limit: float | None = None
    multiple_of: int = 1
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything but the plan itself, as JSON can hold it."""
        return {
            "model": self.model,
            "device": self.device,
            "optimizer": self.optimizer,
            "accumulate": self.accumulate,
            "memory_bytes": self.memory_bytes,
            "time_limit": self.time_limit,
            "multiple_of": self.multiple_of,
            "plain": None if self.plain is None else self.plain.to_json(),
            "planned": None if self.planned is None else self.planned.to_json(),
            "sampled": list(self.sampled),
            "captured": list(self.captured),
            "scaled": self.scaled,
            "notes": list(self.notes),
        }


def largest_batch(
    model: nn.Module,
    batch_of: BatchOf,
    *,
    memory: str | int,
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
) -> LargestBatch:
    """The largest batch that trains within `memory`, as the step is written and with a plan.

    `batch_of(n)` is an example of n samples: `lambda n: torch.empty(n, 3, 224, 224, device="meta")`. Only its
    shapes matter, so tensors on meta do. Where the loss depends on the batch as well, return
    `Batch(example, loss)`. The step, `optimizer`, `accumulate`, `device` and `profile` are as in
    `lowtide.plan`. Batches are multiples of `multiple_of`, and 2**20 at most.

    With a `time_limit` of 1.2, a planned step takes 1.2 times as long as without recomputation, at most.

    Both answers have been captured at the batch that is given, and their promised bytes are within `memory`.
    At the next batch the search found nothing that fits. On a CPU, workspaces and times of steps that take
    more than two seconds are those of the two small batches that were profiled, scaled; otherwise, and on a
    GPU that is here, ops are run at the answer again. For a GPU that is not here times are estimates (see
    `lowtide.roofline`).
    `progress(done, of)` is called while ops are profiled, `telling(text)` when something else begins.

    Raises:
        InfeasibleBudget: not even the smallest batch fits; the error carries the least that it needs.
        BadRequest: an argument makes no sense, or there are no times to hold a time limit against.
        CannotTrace, CannotCapture: as in `lowtide.plan`.
    """
    chosen = method or default_method(memory)
    _check(chosen, time_limit, multiple_of)
    asked = Asked(
        model, batch_of, loss, optimizer, accumulate, multiple_of, device, profile, name, progress, telling
    )
    memory_bytes = parse_bytes(memory)
    steps = Steps(asked, memory_bytes)
    plain = _settled(steps, _Plain(memory_bytes), 1)
    planned = _settled(steps, _Planned(memory_bytes, chosen, time_limit), plain.batch if plain else 1)
    if planned is None:
        _refuse_if_hopeless(steps, memory_bytes, chosen)
    return LargestBatch(
        model=name or type(model).__name__,
        device=steps.device,
        memory_bytes=memory_bytes,
        plain=plain,
        planned=planned,
        sampled=steps.sampled,
        captured=tuple(sorted(steps.seen)),
        scaled=steps.lines is not None,
        optimizer=optimizer if isinstance(optimizer, str | None) else type(optimizer).__name__,
        accumulate=accumulate,
        time_limit=time_limit,
        multiple_of=multiple_of,
        notes=(*steps.notes, *_remarks(steps, plain, planned, time_limit)),
    )


def measure_reached(
    reached: Reached, model: nn.Module, batch: Batch, *, optimizer: Updates | None, device: str | torch.device
) -> Reading:
    """Train `model` for real on `batch`, under the plan of `reached` if it has one, and measure a step.

    The model is trained, and keeps the plan. Gradients of the steps before are gone when it is measured.

    Raises:
        DeviceMissing: the device is not on this machine.
    """
    where = present_device(device, "measure")
    if reached.solution is not None:
        apply(model, reached.solution)
    step = training_step(model, batch.example, batch.loss, optimizer_of(optimizer, model, where))

    def fresh_step() -> None:
        model.zero_grad(set_to_none=True)
        step()

    for _ in range(_WARM_UP):
        fresh_step()
    model.zero_grad(set_to_none=True)
    return measure(fresh_step, device=where, timed=1)


def _check(method: str | Scheduler, time_limit: float | None, multiple_of: int) -> None:
    if not is_scheduler(method):
        raise BadRequest(
            f"{method} plans layers, and the largest batch is planned op by op. "
            f"These do: {', '.join(schedulers())}."
        )
    if time_limit is not None and not time_limit >= 1:
        raise BadRequest(
            f"a time limit of {time_limit} cannot be kept: it is how many times as long a step may take as "
            "without recomputation. Give 1.2 for a fifth more."
        )
    if multiple_of < 1:
        raise BadRequest(f"a batch cannot be a multiple of {multiple_of}. Give a whole number of at least 1.")


def _refuse_if_hopeless(steps: Steps, memory_bytes: int, method: str | Scheduler) -> None:
    """Raise InfeasibleBudget if the smallest batch cannot be had at any price."""
    smallest = steps.captured(steps.unit)
    least = solve(smallest.graph, method, LOWEST)
    needed = smallest.promised_bytes(least)
    if needed > memory_bytes:
        running = least.timeline.peak_op
        raise InfeasibleBudget(
            least.method,
            memory_bytes,
            needed,
            "what is always there" if running is None else running.label,
            f"That is for a batch of {steps.unit}, the smallest. Give more memory, a smaller model, or an "
            "optimizer with less state.",
        )


def _remarks(
    steps: Steps, plain: Reached | None, planned: Reached | None, time_limit: float | None
) -> list[str]:
    found = []
    if any(reached is not None and reached.batch + steps.unit > MOST for reached in (plain, planned)):
        found.append(f"batches larger than {MOST} were not looked for")
    if plain is not None and planned is not None and planned.batch <= plain.batch:
        found.append("a plan makes no larger batch fit: what is needed at the peak cannot be recomputed")
    if planned is None:
        found.append(f"no plan is within the memory and {time_limit} times the time, at any batch")
    return found


# Searching and settling -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Goal(ABC):
    """What is to fit."""

    memory_bytes: int

    @abstractmethod
    def reached(self, step: StepBudget, batch: int, memory_bytes: int) -> Reached | None:
        """The step, if it fits in so much."""

    @abstractmethod
    def needed_bytes(self, step: StepBudget) -> int:
        """The least that the step needs."""

    def guess(self, steps: Steps, start: int) -> int:
        """A batch that may be the largest, from one that fits."""
        return start


def _settled(steps: Steps, goal: _Goal, start: int) -> Reached | None:
    """The largest batch that fits, captured there. `start` is one that is known to fit, or 1."""
    try:
        return _captured_where_predicted(steps, goal, start)
    except DoesNotScale as reason:
        steps.abandon_lines(reason)
    return _captured_where_predicted(steps, goal, start)


def _captured_where_predicted(steps: Steps, goal: _Goal, start: int) -> Reached | None:
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


def _searched(steps: Steps, goal: _Goal, guess: int, memory_bytes: int) -> int:
    """The largest batch that is predicted to fit; 0 if none is."""
    unit = steps.unit

    def fits(count: int) -> bool:
        batch = unit * count
        return goal.reached(steps.predicted(batch), batch, memory_bytes) is not None

    return unit * largest_that(fits, MOST // unit, guess // unit)


@dataclass(frozen=True)
class _Plain(_Goal):
    """The step as it is written."""

    def reached(self, step: StepBudget, batch: int, memory_bytes: int) -> Reached | None:
        needed = step.plain_peak_bytes
        if needed > memory_bytes:
            return None
        seconds = sum(op.seconds for op in step.plain.graph.ops)
        return Reached(batch, step.plain.peak_bytes, needed, seconds or None)

    def needed_bytes(self, step: StepBudget) -> int:
        return step.plain_peak_bytes


@dataclass(frozen=True)
class _Planned(_Goal):
    """The step with a plan, within the memory and the time limit."""

    method: str | Scheduler
    time_limit: float | None

    def reached(self, step: StepBudget, batch: int, memory_bytes: int) -> Reached | None:
        try:
            solution = step.solve(self.method, memory_bytes)
        except InfeasibleBudget:
            return None
        if not self._in_time(solution):
            return None
        seconds = solution.seconds + solution.extra_seconds
        return Reached(batch, solution.peak_bytes, step.promised_bytes(solution), seconds or None, solution)

    def needed_bytes(self, step: StepBudget) -> int:
        return step.promised_bytes(solve(step.graph, self.method, LOWEST))

    def guess(self, steps: Steps, start: int) -> int:
        """How far the leanest schedule carries. One that is legal at some batch is legal at every batch."""
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
        return solution.extra_seconds_ratio <= self.time_limit - 1
