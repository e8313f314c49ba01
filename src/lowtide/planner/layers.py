"""Plans of layers, tried out: trace, cut, solve, apply, trace again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from lowtide.chain.chain import Chain
from lowtide.chain.cuts import Granularity, RecordedStep
from lowtide.chain.plan import Plan
from lowtide.chain.sizes import chain_of
from lowtide.cost.profile import Progress
from lowtide.errors import RAISE_OR_CUT, BadRequest, CannotApply, InfeasibleBudget
from lowtide.execute.apply import apply, set_aside
from lowtide.execute.identity import fingerprint, inputs_of
from lowtide.ir.graph import Op, Phase, Role, short_name
from lowtide.ir.training_reserve import AllocatedRun
from lowtide.planner.around import Around
from lowtide.planner.on_card import Beside, Training, card_refusal, check_on_card
from lowtide.planner.promise import allocated_bytes, numbers_bytes, promised_bytes, solved_within
from lowtide.solvers import refuse_lowest, solve
from lowtide.solvers.method import Method
from lowtide.solvers.solution import Confirmation, Solution
from lowtide.text.budget import Budget
from lowtide.text.card import Card
from lowtide.trace.dry_run import Trace
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import Example, Loss, Updates, arguments
from lowtide.trace.training import trace_training

_TAKES_MEMORY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True)
class Rehearsal:
    """A model, a batch and a step over them: everything that plans for it are made and tried with.

    The plain step is traced once, and each plan is tried once, whatever is asked afterwards.
    """

    model: nn.Module
    example: Example
    loss: Loss | None = None
    optimizer: Updates | None = None
    device: str | torch.device | None = None
    profile: bool = True
    name: str | None = None
    progress: Progress | None = None
    accumulate: int = 1
    _tried: dict[tuple[tuple[int, ...], Plan], Confirmation] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, spec: StepSpec, **more: Any) -> Self:
        """A rehearsal of that step; `more` is what a kind of rehearsal wants besides."""
        return cls(
            spec.model,
            spec.example,
            spec.loss,
            spec.optimizer,
            spec.device,
            spec.profile,
            spec.name,
            spec.progress,
            spec.accumulate,
            **more,
        )

    @property
    def spec(self) -> StepSpec:
        """The step that is rehearsed."""
        return StepSpec(
            self.model,
            self.example,
            self.loss,
            self.optimizer,
            self.accumulate,
            self.device,
            self.profile,
            self.name,
            self.progress,
        )

    @cached_property
    def plain(self) -> Trace:
        """The step as it is without a plan."""
        return self._trace(None)

    def chain(
        self, granularity: str | Granularity = Granularity.LAYER, modules: Collection[str] | None = None
    ) -> Chain:
        """The chain view of the plain step."""
        trace = self.plain
        step = RecordedStep(trace.graph, trace.schedule, trace.calls, trace.forward_ops, trace.closed)
        args, kwargs = arguments(self.example)
        return replace(
            chain_of(step, granularity_named(granularity), modules),
            inputs=inputs_of(self.model, args, kwargs),
            fingerprint=fingerprint(self.model),
        )

    def confirmed(self, solution: Solution) -> Solution:
        """`solution` with its confirmation."""
        return replace(solution, confirmation=self.confirm(solution))

    def confirm(self, solution: Solution) -> Confirmation:
        """What a dry run of the model under `solution`'s plan shows.

        Raises:
            CannotApply: the model cannot be recomputed as planned.
        """
        tried = (solution.chain.places, solution.plan)
        if tried not in self._tried:
            self._tried[tried] = self._confirmation(self.under(solution))
        return self._tried[tried]

    def under(self, solution: Solution) -> Trace:
        """The step as it is under `solution`'s plan.

        Raises:
            CannotApply: the model cannot be recomputed as planned.
        """
        plain = self.plain  # what is wrong with the step itself is told of that
        try:
            trace = self._trace(solution)
        except BadRequest as error:
            if not isinstance(error.__cause__, CheckpointError):
                raise CannotApply(f"the step cannot be run under this plan: {error}") from error
            raise CannotApply(
                "running a part of the model again does not save what it saved before: "
                f"{str(error.__cause__).splitlines()[0]}\n"
                "Something in its forward depends on more than its inputs, or a custom autograd function "
                "is called outside of any module: put it into one."
            ) from error
        _refuse_changes_made_twice(trace, plain)
        _refuse_what_was_not_filled(trace, plain)
        return trace

    def _confirmation(self, trace: Trace) -> Confirmation:
        # What reads nothing recomputes nothing: memory that is only taken.
        recomputed = [op for op in trace.graph.ops if op.phase is Phase.RECOMPUTE and op.reads]
        return Confirmation(
            peak_bytes=_peak_bytes(trace) + self._earlier_bytes,
            recomputed_ops=len(recomputed),
            extra_seconds=sum(op.seconds for op in recomputed),
            plain_peak_bytes=_peak_bytes(self.plain),
            plain_seconds=sum(op.seconds for op in self.plain.graph.ops),
        )

    @property
    def _earlier_bytes(self) -> int:
        """Gradients of earlier backward calls, which the new ones are added to: a step holds no more."""
        graph = self.plain.graph
        made = [value.id for value in graph.values if value.role is Role.GRADIENT]
        return sum(map(graph.counted_bytes, made)) if self.accumulate > 1 else 0

    def solve(self, chain: Chain, method: str | Method, budget: str | int | None = None) -> Solution:
        """A plan within the budget, tried out: the dry run of the model under it stays within it too.

        What is found not to run again is left alone; `remark` says so. On CUDA the dry run stays a hundredth
        below: see `lowtide.planner.promise`.

        Raises:
            InfeasibleBudget: no plan of this method fits.
        """
        return self.within(chain, method, Budget.parse(budget))

    def within(self, chain: Chain, method: str | Method, budget: Budget) -> Solution:
        """The same, for a budget that has been read."""
        refuse_lowest(budget)
        wanted, around = self.bytes_of(budget), Around(self.confirmed)
        if wanted is None:
            return around(solve(chain, method))
        found = solved_within(
            wanted,
            lambda aim: around(solve(chain, method, aim)),
            self._promised if budget.card is None else partial(self._taken_bytes, wanted),
            lambda least: self._refusal(least, wanted, budget.card),
        )
        return replace(found, budget_bytes=wanted)

    @property
    def beside(self) -> Beside:
        """What the process takes from a card beside this step."""
        return Beside.of(distributed=False)

    def _taken_bytes(self, left_bytes: int, solution: Solution) -> int:
        """What a card must leave for `solution` to be safe."""
        return self._training(solution).needed_bytes(left_bytes)

    def _training(self, solution: Solution) -> Training:
        trace = self.under(solution)
        return Training(AllocatedRun(trace.graph, trace.schedule))

    def bytes_of(self, budget: Budget) -> int | None:
        """The bytes that a budget allows, those that a card leaves; None without one."""
        if budget.card is not None:
            check_on_card(budget.card, self.plain.graph.device)
            return self.beside.left_bytes(budget.card)
        return budget.bytes_of(lambda: _peak_bytes(self.plain) + numbers_bytes(self.plain.graph))

    def _promised(self, solution: Solution) -> int:
        """What a budget must hold for `solution` to be safe."""
        plain = self.plain
        again = solution.plan.levels  # times that a number is kept for a part that is run again, beside once
        peak_bytes = self.confirm(solution).peak_bytes + (1 + again) * numbers_bytes(plain.graph)
        return promised_bytes(peak_bytes, plain.timeline.resident_bytes, plain.graph.device)

    def _refusal(self, least: Solution, wanted: int, card: Card | None) -> InfeasibleBudget:
        running = least.timeline.peak_op
        needed_by = "what is always there" if running is None else running.module
        if card is not None:
            missing_bytes = self._training(least).least_bytes(wanted) - wanted
            return card_refusal(least.method, card, missing_bytes, needed_by)
        advice = f"{RAISE_OR_CUT} What is {least.remark}" if least.remark else RAISE_OR_CUT
        return InfeasibleBudget(least.method, wanted, self._promised(least), needed_by, advice)

    def _trace(self, solution: Solution | None) -> Trace:
        """A dry run of the step under a plan, or of the plain one."""
        with set_aside(self.model):
            if solution is not None:
                apply(self.model, solution)
            return trace_training(self.spec)


def _peak_bytes(trace: Trace) -> int:
    return allocated_bytes(trace.graph, trace.schedule, trace.peak_bytes)


def granularity_named(name: str) -> Granularity:
    """How finely to cut. Raises BadRequest where nothing goes by that name."""
    try:
        return Granularity(name)
    except ValueError:
        raise BadRequest(
            f"there is no granularity '{name}'; it is one of {', '.join(Granularity)}."
        ) from None


def _refuse_changes_made_twice(trace: Trace, plain: Trace) -> None:
    """Raise CannotApply where `trace` changes something again that the plain step does not.

    A part that the user has checkpointed changes its buffers twice as it is, and does so under a plan.
    """
    left = Counter(name for _, name in _changed_again(plain))
    for op, name in _changed_again(trace):
        left[name] -= 1
        if left[name] < 0:
            raise CannotApply(
                f"recomputing {op.label} would change {name} a second time. "
                "Move that change into a module of its own, so that it can be done once."
            )


def _changed_again(trace: Trace) -> Iterator[tuple[Op, str]]:
    """The ops of the backward that run a part of the forward again and change what was there before."""
    values = trace.graph.values
    users = {value for value in trace.graph.resident if values[value].role is not Role.INTERMEDIATE}
    for op in trace.graph.ops:
        if op.phase is Phase.RECOMPUTE:
            yield from ((op, values[value].name) for value in op.mutates if value in users)


def _refuse_what_was_not_filled(trace: Trace, plain: Trace) -> None:
    """Raise CannotApply where the backward reads memory that a part run again has taken and not yet filled.

    PyTorch stops a recomputation as soon as everything that was saved is there again. An op that saves what
    it is about to fill (the noise of `rrelu`) has not run then, if it is the last. What the user checkpoints
    is as the user has it.
    """
    found = list(_reads_too_early(trace))
    if len(found) > len(list(_reads_too_early(plain))):
        raise CannotApply(
            f"{found[-1].label} needs what the last op before it fills, which PyTorch's checkpoint does not "
            "run again. Let that part end with another op."
        )


def _reads_too_early(trace: Trace) -> Iterator[Op]:
    """The ops of the backward that read what a part that was run again has not filled."""
    unfilled: set[int] = set()
    for op in trace.graph.ops:
        unfilled.difference_update(op.mutates)
        if op.phase is Phase.RECOMPUTE and short_name(op.target) in _TAKES_MEMORY:
            unfilled.update(op.creates)
        if op.phase is Phase.BACKWARD and unfilled.intersection(op.reads):
            yield op
