"""The largest batch: how many samples a step can take within some memory, as it is and with a plan.

    sample   the step is captured and profiled at two small batches
    scale    every value, workspace and time follows from these along a line, at any batch
    search   the largest batch that fits is looked for among steps that were never captured
    settle   the step is captured at that batch. Where it is not what was expected, the search begins again

Nothing runs but the single ops of a profile, so there is nothing that could run out of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.cost.measure import Reading
from lowtide.cost.profile import Progress
from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.execute.apply import apply
from lowtide.planner.batch_search import PlainGoal, PlannedGoal, Reached, settled
from lowtide.planner.batch_steps import MOST, AnyBatch, Batch, BatchOf, Steps, Telling
from lowtide.planner.on_card import card_to_json
from lowtide.planner.real_step import RealStep
from lowtide.solvers import default_method, is_scheduler, schedulers
from lowtide.solvers.method import Scheduler
from lowtide.text.budget import LOWEST, Budget
from lowtide.text.card import Card
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import Loss, Updates, declared


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
    tiles: bool = False
    notes: tuple[str, ...] = ()
    card: Card | None = None

    def to_json(self) -> dict[str, Any]:
        """Everything but the plan itself, as JSON can hold it."""
        return {
            "model": self.model,
            "device": self.device,
            "optimizer": self.optimizer,
            "accumulate": self.accumulate,
            "memory_bytes": self.memory_bytes,
            "card": None if self.card is None else card_to_json(self.card),
            "time_limit": self.time_limit,
            "multiple_of": self.multiple_of,
            "tiles": self.tiles,
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
    memory: str | int | Card,
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
    tiles: bool = False,
) -> LargestBatch:
    """The largest batch that trains within `memory`, as the step is written and with a plan.

    `batch_of(n)` is an example of n samples: `lambda n: torch.empty(n, 3, 224, 224, device="meta")`. Only its
    shapes matter, so tensors on meta do. Where the loss depends on the batch as well, return
    `Batch(example, loss)`. The step, `optimizer`, `accumulate`, `device` and `profile` are as in
    `lowtide.plan`. Batches are multiples of `multiple_of`, and 2**20 at most.

    A `memory` of "24GiB card", a name ("rtx4090") or `lowtide.Card("24GiB", reserve="1GiB")` is all that a
    card has: batches are those at which a training, its first steps included, takes no more than that of it,
    with expandable segments on. Without that word it is what PyTorch calls allocated.

    With a `time_limit` of 1.2, a planned step takes 1.2 times as long as without recomputation, at most. With
    `tiles` stretches of it may run in slices, as in `lowtide.plan`: that counts as time it takes.

    Both answers have been captured at the batch that is given, and their promised bytes are within `memory`.
    At the next batch the search found nothing that fits. On a CPU, workspaces and times of steps that take
    more than two seconds are those of the two small batches that were profiled, scaled; otherwise, and on a
    GPU that is here, ops are run at the answer again. For a GPU that is not here times are estimates (see
    `lowtide.cost.roofline`).
    `progress(done, of)` is called while ops are profiled, `telling(text)` when something else begins.

    Raises:
        InfeasibleBudget: not even the smallest batch fits; the error carries the least that it needs.
        BadRequest: an argument makes no sense, or there are no times to hold a time limit against.
        CannotTrace, CannotCapture: as in `lowtide.plan`.
    """
    asked_for = Budget.parse(memory)
    card, memory_bytes = asked_for.card, memory_bytes_of(asked_for)
    chosen = method or default_method(asked_for)
    _check(chosen, time_limit, multiple_of)

    def spec_of(batch: int) -> StepSpec:
        found = batch_of(batch)
        at = found if isinstance(found, Batch) else Batch(found)
        example, whole = declared(at.example, at.loss or loss)
        return StepSpec(model, example, whole, optimizer, accumulate, device, profile, name, progress, tiles)

    asked = AnyBatch(spec_of, multiple_of, device, profile, telling, card)
    steps = Steps(asked, memory_bytes)
    plain = settled(steps, PlainGoal(memory_bytes, card), 1)
    goal = PlannedGoal(memory_bytes, card, method=chosen, time_limit=time_limit)
    planned = settled(steps, goal, plain.batch if plain else 1)
    if planned is None:
        _refuse_if_hopeless(steps, memory_bytes, chosen)
    return LargestBatch(
        model=name or type(model).__name__,
        device=steps.device,
        memory_bytes=memory_bytes,
        card=card,
        plain=plain,
        planned=planned,
        sampled=steps.sampled,
        captured=tuple(sorted(steps.seen)),
        scaled=steps.lines is not None,
        optimizer=optimizer if isinstance(optimizer, str | None) else type(optimizer).__name__,
        accumulate=accumulate,
        time_limit=time_limit,
        multiple_of=multiple_of,
        tiles=tiles,
        notes=(*steps.notes, *_remarks(steps, plain, planned, time_limit, tiles)),
    )


def measure_reached(
    reached: Reached, model: nn.Module, batch: Batch, *, optimizer: Updates | None, device: str | torch.device
) -> Reading:
    """Train `model` for real on `batch`, under the plan of `reached` if it has one, and measure a step.

    The model is trained, and keeps the plan. Gradients of the steps before are gone when it is measured.

    Raises:
        DeviceMissing: the device is not on this machine.
    """
    step = RealStep(StepSpec(model, batch.example, batch.loss, optimizer, device=device))
    _ = step.device  # is there, or is refused before the plan is put on
    if reached.solution is not None:
        apply(model, reached.solution)
    return step.measured(timed=1)


def memory_bytes_of(asked: Budget) -> int:
    """The size of a memory, or of a card. Raises BadRequest if it is none."""
    if asked.card is not None:
        return asked.card.memory_bytes
    if asked.bytes is None:
        raise BadRequest(
            f"the memory is {asked}, and it is a size: 24GiB, or '24GiB card' for all of a card."
        )
    return asked.bytes


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
    if smallest.card is not None:
        smallest.solve(method, smallest.card)
        return
    least = smallest.solve(method, LOWEST)
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
    steps: Steps, plain: Reached | None, planned: Reached | None, time_limit: float | None, tiles: bool
) -> list[str]:
    found = []
    if any(reached is not None and reached.batch + steps.unit > MOST for reached in (plain, planned)):
        found.append(f"batches larger than {MOST} were not looked for")
    if plain is not None and planned is not None and planned.batch <= plain.batch:
        found.append("a plan makes no larger batch fit: what is needed at the peak cannot be recomputed")
    if tiles and planned is not None and not planned.slices:
        found.append("nothing of the planned step runs in slices: nothing that can be cut makes it better")
    if planned is None:
        found.append(f"no plan is within the memory and {time_limit} times the time, at any batch")
    return found
