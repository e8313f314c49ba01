"""From a model and a batch to a plan that has been tried out: trace, cut, solve, apply, trace again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from lowtide.aot.step_graph import check_accumulation
from lowtide.chain.chain import Chain
from lowtide.chain.cuts import Granularity, Step
from lowtide.chain.plan import Plan
from lowtide.chain.sizes import chain_of
from lowtide.cost.profile import Progress
from lowtide.errors import BadRequest, CannotApply, InfeasibleBudget
from lowtide.execute.apply import remove, set_aside
from lowtide.execute.identity import described_inputs, fingerprint
from lowtide.execute.layer_hooks import Model
from lowtide.execute.layer_hooks import apply as apply_segments
from lowtide.execute.layer_hooks import remove as remove_segments
from lowtide.execute.ops_forward import reroute
from lowtide.ir.graph import Phase, Role
from lowtide.planner.ops import StepBudget
from lowtide.planner.promise import allocated_bytes, promised_bytes, solved_within
from lowtide.solvers import at_effort, default_method, is_scheduler, refuse_lowest, solve
from lowtide.solvers.method import Effort, Method, Scheduler
from lowtide.solvers.solution import Confirmation, GraphSolution, Solution
from lowtide.text.budget import Budget
from lowtide.trace.dry_run import Trace
from lowtide.trace.step import Arguments, Example, Loss, Updates, arguments, check_optimizer
from lowtide.trace.training import trace_training

ON_NEW_SHAPE = ("plan", "error")


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
    _tried: dict[tuple[tuple[int, ...], Plan], Confirmation] = field(
        default_factory=dict, init=False, repr=False, compare=False
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
        step = Step(trace.graph, trace.schedule, trace.calls, trace.forward_ops)
        args, kwargs = arguments(self.example)
        return replace(
            chain_of(step, _granularity(granularity), modules),
            inputs=described_inputs(args, kwargs),
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
        try:
            trace = self._trace(solution)
        except BadRequest as error:
            if not isinstance(error.__cause__, CheckpointError):
                raise
            raise CannotApply(
                "running a part of the model again does not save what it saved before: "
                f"{str(error.__cause__).splitlines()[0]}\n"
                "Something in its forward depends on more than its inputs, or a custom autograd function "
                "is called outside of any module: put it into one."
            ) from error
        _refuse_changes_made_twice(trace)
        return trace

    def _confirmation(self, trace: Trace) -> Confirmation:
        # What reads nothing recomputes nothing: memory that is only taken.
        recomputed = [op for op in trace.graph.ops if op.phase is Phase.RECOMPUTE and op.reads]
        return Confirmation(
            peak_bytes=_peak_bytes(trace),
            recomputed_ops=len(recomputed),
            extra_seconds=sum(op.seconds for op in recomputed),
            plain_peak_bytes=_peak_bytes(self.plain),
            plain_seconds=sum(op.seconds for op in self.plain.graph.ops),
        )

    def solve(self, chain: Chain, method: str | Method, budget: str | int | None = None) -> Solution:
        """A plan within the budget, tried out: the dry run of the model under it stays within it too.

        On CUDA it stays a hundredth below: see `lowtide.planner.promise`.

        Raises:
            InfeasibleBudget: no plan of this method fits.
        """
        return self.within(chain, method, Budget.parse(budget))

    def within(self, chain: Chain, method: str | Method, budget: Budget) -> Solution:
        """The same, for a budget that has been read."""
        refuse_lowest(budget)
        wanted = self.bytes_of(budget)
        if wanted is None:
            return self.confirmed(solve(chain, method))
        found = solved_within(
            wanted,
            lambda aim: self.confirmed(solve(chain, method, aim)),
            self._promised,
            lambda least: self._refusal(least, wanted),
        )
        return replace(found, budget_bytes=wanted)

    def bytes_of(self, budget: Budget) -> int | None:
        """The bytes that a budget allows; None without one."""
        return budget.bytes_of(lambda: _peak_bytes(self.plain))

    def _promised(self, solution: Solution) -> int:
        """What a budget must hold for `solution` to be safe."""
        peak_bytes = self.confirm(solution).peak_bytes
        return promised_bytes(peak_bytes, self.plain.timeline.resident_bytes, self.plain.graph.device)

    def _refusal(self, least: Solution, wanted: int) -> InfeasibleBudget:
        running = least.timeline.peak_op
        needed_by = "what is always there" if running is None else running.module
        return InfeasibleBudget(least.method, wanted, self._promised(least), needed_by)

    def _trace(self, solution: Solution | None) -> Trace:
        """A dry run of the step under a plan, or of the plain one."""
        with set_aside(self.model):
            if solution is not None:
                apply_segments(self.model, solution)
            return trace_training(
                self.model,
                self.example,
                self.loss,
                optimizer=self.optimizer,
                device=self.device,
                profile=self.profile,
                name=self.name,
                progress=self.progress,
            )


def plan(
    model: nn.Module,
    example: Example,
    *,
    budget: str | int | None = None,
    method: str | Method | Scheduler | None = None,
    effort: str = Effort.FULL,
    loss: Loss | None = None,
    optimizer: Updates | None = None,
    accumulate: int = 1,
    granularity: str | Granularity = Granularity.LAYER,
    modules: Collection[str] | None = None,
    device: str | torch.device | None = None,
    profile: bool = True,
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Solution | GraphSolution:
    """Plan what to recompute when `model` trains on a batch like `example`.

    With a `budget` (bytes, "8GiB", a part of the plain peak, "60%", or "min" for the lowest peak that can be
    reached) the step is planned op by op unless `method` says otherwise: the peak of the whole step is
    within the budget, and the plan adds as little time as it can. `accumulate` counts the backward
    calls between two updates; with more than one, gradients are there when a forward begins. With `effort`
    "quick" the search is five times as fast, and the plan adds a little more time.

    A method for chains ("rotor", "hong-linear", …) plans layers instead: the model is cut into a chain
    (`granularity` "fine", "layer" or "block", or around the `modules` named), and the plan is tried out:
    `solution.confirmation.peak_bytes` is the peak of a dry run of the whole step with the plan applied.
    Without a budget such a method minimises what it minimises. Unless told, "auto" plans within a budget and
    hong-linear without one.

    `example`, `loss`, `optimizer`, `device` and `profile` are as in `lowtide.fit`. The model is left as
    it was, a plan that it has included; `lowtide.apply(model, solution)` puts the new one to work.

    Raises:
        InfeasibleBudget: no plan of this method fits.
        CannotCapture: op by op, Dynamo or AOTAutograd cannot follow the model.
        CannotApply: layer by layer, a part of the model cannot be run twice.
        BadRequest: the model cannot be cut, or an argument makes no sense.
        CannotTrace: the dry run cannot follow the step.
    """
    asked = Budget.parse(budget)
    chosen = at_effort(method or default_method(asked), effort)
    if is_scheduler(chosen):
        refuse_cutting(granularity, modules)
        step = StepBudget(model, example, loss, optimizer, accumulate, device, profile, name, progress)
        return step.within(chosen, asked)
    assert not isinstance(chosen, Scheduler)
    refuse_op_level_requests(asked, accumulate)
    rehearsal = Rehearsal(model, example, loss, optimizer, device, profile, name, progress)
    return rehearsal.within(rehearsal.chain(granularity, modules), chosen, asked)


def optimize(
    model: Model,
    example: Example | None = None,
    *,
    budget: str | int | None = None,
    method: str | Method | Scheduler | None = None,
    effort: str = Effort.FULL,
    loss: Loss | None = None,
    optimizer: Updates | None = None,
    accumulate: int = 1,
    on_new_shape: str = "plan",
    granularity: str | Granularity = Granularity.LAYER,
    modules: Collection[str] | None = None,
    device: str | torch.device | None = None,
    profile: bool = True,
    progress: Progress | None = None,
) -> Model:
    """Plan and apply at once: `model` itself, now within the budget when it trains.

    Without an `example` nothing is planned yet: the first inputs that the model meets in training mode, with
    gradients on, are planned for then, and nobody has to look into a data loader before it is used.

    Inputs of another shape than `example`, and other numbers or words among the model's arguments, are
    planned for when they are met first, under the same budget (a warning says so once), and remembered;
    with `on_new_shape="error"` they are refused. A budget given as a part of the plain peak stays the
    number of bytes that it meant for the first inputs. `loss` has to work with any of these inputs, so
    labels belong among the model's arguments, or into a loss that finds those of its batch. The other
    arguments are as in `lowtide.plan`.

    Raises:
        InfeasibleBudget: no plan of this method fits; for inputs that are met later, when they are met.
        CannotApply, CannotCapture, BadRequest, CannotTrace: as in `lowtide.plan`.
    """
    if on_new_shape not in ON_NEW_SHAPE:
        raise BadRequest(f"on_new_shape is {on_new_shape!r}; it is one of {', '.join(ON_NEW_SHAPE)}.")
    check_optimizer(optimizer)
    asked = Budget.parse(budget)
    chosen = at_effort(method or default_method(asked), effort)
    on_new_inputs = "error" if on_new_shape == "error" else "warn"
    if is_scheduler(chosen):
        refuse_cutting(granularity, modules)
        check_accumulation(accumulate)
        anew = _OpsAnew(loss, optimizer, accumulate, device, profile, progress, chosen, asked)
        planned = None if example is None else anew(model, *arguments(example))
        reroute(model, planned, on_new_inputs=on_new_inputs, accumulate=accumulate, replan=anew)
        remove_segments(model)
        return model
    assert not isinstance(chosen, Scheduler)
    refuse_op_level_requests(asked, accumulate)
    again = _Again(loss, optimizer, device, profile, progress, granularity, modules, chosen, asked)
    solution = None if example is None else again(model, *arguments(example))
    remove(model)
    return apply_segments(model, solution, on_new_inputs=on_new_inputs, replan=again)


def refuse_cutting(granularity: str | Granularity, modules: Collection[str] | None) -> None:
    """Raise BadRequest where it is said how to cut a model that is planned op by op."""
    if modules is not None or _granularity(granularity) is not Granularity.LAYER:
        raise BadRequest(
            "granularity and modules say how to cut a model into a chain of layers; this method plans op by "
            "op and cuts nothing. Leave them out, or choose a method for chains, such as rotor."
        )


def refuse_op_level_requests(budget: Budget, accumulate: int) -> None:
    """Raise BadRequest where a model that is planned by layers is asked for what ops alone can do."""
    refuse_lowest(budget)
    if accumulate != 1:
        raise BadRequest("accumulate is for methods that plan op by op (auto); leave it out for chains.")


@dataclass
class _OpsAnew:
    """Plans op by op for inputs as they are met. What a budget means is settled by the first of them."""

    loss: Loss | None
    optimizer: Updates | None
    accumulate: int
    device: str | torch.device | None
    profile: bool
    progress: Progress | None
    method: str | Scheduler
    budget: Budget

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphSolution:
        step = StepBudget(
            model,
            Arguments(args, kwargs),
            self.loss,
            self.optimizer,
            self.accumulate,
            self.device,
            self.profile,
            progress=self.progress,
        )
        self.budget = step.settled(self.budget)
        return step.within(self.method, self.budget)


@dataclass
class _Again:
    """Plans by layers for inputs as they are met. What a budget means is settled by the first of them."""

    loss: Loss | None
    optimizer: Updates | None
    device: str | torch.device | None
    profile: bool
    progress: Progress | None
    granularity: str | Granularity
    modules: Collection[str] | None
    method: str | Method
    budget: Budget

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Solution:
        rehearsal = Rehearsal(
            model,
            Arguments(args, kwargs),
            self.loss,
            self.optimizer,
            self.device,
            self.profile,
            progress=self.progress,
        )
        self.budget = Budget.parse(rehearsal.bytes_of(self.budget))
        return rehearsal.within(rehearsal.chain(self.granularity, self.modules), self.method, self.budget)


def _peak_bytes(trace: Trace) -> int:
    return allocated_bytes(trace.graph, trace.schedule, trace.peak_bytes)


def _granularity(name: str) -> Granularity:
    try:
        return Granularity(name)
    except ValueError:
        raise BadRequest(
            f"there is no granularity '{name}'; it is one of {', '.join(Granularity)}."
        ) from None


def _refuse_changes_made_twice(trace: Trace) -> None:
    values = trace.graph.values
    users = {value for value in trace.graph.resident if values[value].role is not Role.INTERMEDIATE}
    for op in trace.graph.ops:
        changed = users.intersection(op.mutates) if op.phase is Phase.RECOMPUTE else ()
        for value in changed:
            raise CannotApply(
                f"recomputing {op.label} would change {values[value].name} a second time. "
                "Move that change into a module of its own, so that it can be done once."
            )
