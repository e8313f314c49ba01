"""Training on many lengths by few plans: classes are planned ahead, and what is between them follows these.

ahead    a batch of each class is planned for before the first step; the budget is settled on the worst
exact    inputs of a class run by its plan
between  shorter inputs run the same ops on smaller values: the schedule of a class is replayed on their
         own graph, and followed if it keeps the budget there. They are captured, but nothing is searched
beyond   what follows no class is planned for as it comes, and that is told, or it is refused
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import nn

from lowtide.errors import BadRequest, CannotApply
from lowtide.execute.circumstances import circumstances
from lowtide.execute.identity import described_inputs
from lowtide.execute.ops_forward import MOST_PLANS
from lowtide.execute.padding import class_of
from lowtide.planner.batch_family import DoesNotScale, check_same_structure
from lowtide.planner.batch_steps import Batch, BatchOf
from lowtide.planner.ladder import AnySolution, Ladder
from lowtide.planner.lengths import Lengths, best_classes, counted_lengths
from lowtide.planner.ops import StepBudget
from lowtide.solvers.solution import GraphSolution
from lowtide.text.budget import Budget
from lowtide.trace.losses import LossOfAnyBatch, learn_of_loss
from lowtide.trace.spec import SpecOf, StepSpec
from lowtide.trace.step import Arguments, Example, Loss, arguments, declared, targets_wanted

_CLASSES = 4  # where nobody says how many


@dataclass(frozen=True)
class Foreseen:
    """What will come: `inputs_of(length, args, kwargs)` is a batch of a class, and its loss if it has one.

    `args` and `kwargs` are what the model has met first, () and {} where it has met nothing.
    """

    classes: tuple[int, ...]
    inputs_of: Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[Arguments, Loss | None]]


class Searching(Protocol):
    """Plans by search; what a budget means is settled by the first step that is planned."""

    @property
    def spec_of(self) -> SpecOf: ...

    @property
    def budget(self) -> Budget: ...

    def ladder(self, spec: StepSpec) -> Ladder: ...

    def searched(self, ladder: Ladder) -> AnySolution: ...


@dataclass
class ByClasses:
    """Plans for the classes ahead, and for other inputs as they are met."""

    anew: Searching
    ahead: Foreseen
    refuses: bool  # what follows no class
    plans: list[AnySolution] = field(default_factory=list)  # of the classes, the worst first
    loss: Loss | None = None  # of the worst, for inputs whose own loss nobody has
    has_told: bool = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AnySolution:
        if not self.plans:
            self.plan_ahead(model, args, kwargs)
        inputs = circumstances(model, args, kwargs)
        for plan in self.plans:
            if isinstance(plan, GraphSolution) and plan.inputs == inputs:
                return plan
        spec = self.anew.spec_of(model, Arguments(args, kwargs))
        ladder = self.anew.ladder(replace(spec, loss=self.loss))
        return self._following(ladder) or self._beyond(ladder, args, kwargs)

    def plan_ahead(self, model: nn.Module, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        """Plan for every class, the worst first."""
        ladders = [self._ladder(model, length, args, dict(kwargs or {})) for length in self.ahead.classes]
        ladders.sort(key=lambda ladder: -ladder.step.plain_peak_bytes)
        self.plans = [self.anew.searched(ladder) for ladder in ladders]  # all of them, or none
        self.loss = ladders[0].spec.loss

    def _ladder(self, model: nn.Module, length: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ladder:
        example, loss = self.ahead.inputs_of(length, args, kwargs)
        spec = self.anew.spec_of(model, example)
        if loss is not None:
            spec = replace(spec, loss=LossOfAnyBatch(loss))
        return self.anew.ladder(spec)

    def _following(self, ladder: Ladder) -> AnySolution | None:
        """By the schedule of a class, if one keeps the budget on the graph of these inputs."""
        plans = [plan for plan in self.plans if isinstance(plan, GraphSolution)]
        if len(plans) < len(self.plans):  # of layers, which are planned without a graph
            return None
        card = self.anew.budget.card
        step = ladder.step if card is None else ladder.step.on(card)
        found = best_following(step, plans, self._budget_bytes(step, plans))
        if found is not None:
            learn_of_loss(ladder.spec.loss, ladder.step.plain)
        return found

    def _budget_bytes(self, step: StepBudget, plans: Sequence[GraphSolution]) -> int:
        """What may be held: as much as the budget says, and without one as the worst class does."""
        if step.card is not None:
            return step.left_bytes
        return self.anew.budget.bytes or max(map(step.promised_bytes, plans))

    def _beyond(self, ladder: Ladder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AnySolution:
        known = ", ".join(map(str, sorted(self.ahead.classes)))
        what = ", ".join(described_inputs(args, kwargs))
        if self.refuses:
            raise CannotApply(
                f"no plan for a class of lengths ({known}) can be followed for these inputs: {what}. Choose "
                'classes from all lengths that come, or have new inputs planned for: on_new_shape="plan".'
            )
        if not self.has_told:
            self.has_told = True
            warnings.warn(
                f"lowtide: no plan for a class of lengths ({known}) can be followed for these inputs "
                f"({what}). They are planned for now, under the same budget; so are others from now on.",
                stacklevel=2,
            )
        return self.anew.searched(ladder)


def best_following(
    step: StepBudget, plans: Sequence[GraphSolution], budget_bytes: int
) -> GraphSolution | None:
    """The schedule of one of `plans` that adds the least time to `step` within the budget; None if none does.

    Each is replayed on the graph of the step itself, so what it peaks at is no guess.
    """
    fitting = []
    for plan in plans:
        try:
            check_same_structure(plan.graph, step.graph)
        except DoesNotScale:
            continue
        found = step.following(plan, budget_bytes)
        if step.keeps(found, budget_bytes):
            fitting.append(found)
    return min(fitting, key=lambda each: (each.extra_seconds, sum(each.recomputed.values())), default=None)


def ahead_of(
    example: Example | BatchOf | Foreseen | None,
    lengths: Lengths | None,
    length_key: str | None,
    classes: int | Sequence[int] | None,
    loss: Loss | None,
    target: Any,
) -> Foreseen | None:
    """What will come, if that is said: by `lengths` and a function of a length, or by who knows the batches.

    Raises:
        BadRequest: what is said does not go together.
    """
    if isinstance(example, Foreseen):
        return example
    if lengths is None:
        if classes is not None or length_key is not None:
            raise BadRequest("classes are chosen from lengths, and there are none. Give lengths=[…] as well.")
        if callable(example):
            raise BadRequest(
                "the example is a function, and nobody says of which lengths. Give lengths=[…] as well, or a "
                "batch as the example."
            )
        return None
    if not callable(example):
        raise BadRequest(
            "with lengths the example is a function: example(n) is a batch of length n. For batches whose "
            'second extent is a length: lambda n: torch.empty(8, n, dtype=torch.long, device="meta").'
        )
    if target is not None:
        raise BadRequest(
            "a target is that of one batch. With lengths, have example(n) return it too: (ids, labels)."
        )
    chosen = chosen_classes(counted_lengths(lengths, length_key), classes)
    return Foreseen(chosen, partial(_made, example, loss))


def chosen_classes(counts: Mapping[int, int], classes: int | Sequence[int] | None) -> tuple[int, ...]:
    """The classes that are named, or so many that are best.

    Raises:
        BadRequest: the longest fits in none, or they are more than plans are held for.
    """
    wanted = _CLASSES if classes is None else classes
    named = tuple(sorted(wanted)) if isinstance(wanted, Sequence) else best_classes(counts, wanted)
    if len(named) > MOST_PLANS:
        raise BadRequest(f"{len(named)} classes are too many: plans are held for {MOST_PLANS}. Choose fewer.")
    class_of(max(counts), named)
    return named


def _made(
    example_of: BatchOf, loss: Loss | None, length: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Arguments, Loss | None]:
    """A batch of a length, whatever has been met."""
    found = example_of(length)
    at = found if isinstance(found, Batch) else Batch(found)
    example, whole = declared(at.example, at.loss or loss)
    is_of_batch = at.loss is not None or targets_wanted(loss)
    return Arguments(*arguments(example)), whole if is_of_batch else None
