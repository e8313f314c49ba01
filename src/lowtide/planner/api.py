"""From a model and a batch to a plan, and to a model that trains by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.aot.graph_backend import Spares
from lowtide.aot.kernels import Kernels
from lowtide.aot.step_graph import check_accumulation
from lowtide.chain.cuts import Granularity
from lowtide.compat.dynamo import is_compiled, uncompiled
from lowtide.cost.profile import Progress
from lowtide.errors import BadRequest, PlanDisagrees
from lowtide.execute.apply import remove
from lowtide.execute.ops_forward import Model, reroute
from lowtide.ir.assumptions import Assumption
from lowtide.planner.batch_steps import BatchOf
from lowtide.planner.by_classes import ByClasses, Foreseen, ahead_of
from lowtide.planner.ladder import AnySolution, Ladder
from lowtide.planner.layers import Rehearsal, granularity_named
from lowtide.planner.lengths import Lengths
from lowtide.planner.on_card import expand_segments
from lowtide.planner.verify import tried
from lowtide.solvers import at_effort, default_method, is_scheduler, refuse_lowest
from lowtide.solvers.method import Effort, Method, Scheduler
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.budget import Budget
from lowtide.text.card import Card
from lowtide.trace.dry_run import Trace
from lowtide.trace.losses import LossOfAnyBatch, learn_of_loss
from lowtide.trace.spec import SpecOf, StepSpec
from lowtide.trace.step import (
    Arguments,
    Example,
    Loss,
    Updates,
    arguments,
    check_optimizer,
    declared,
    targets_wanted,
)

AUTO = "auto"  # the best that can be done; every other method insists
ON_NEW_SHAPE = ("plan", "error")


def plan(
    model: nn.Module,
    example: Example,
    *,
    budget: str | int | Card | None = None,
    method: str | Method | Scheduler | None = None,
    effort: str = Effort.FULL,
    loss: Loss | None = None,
    target: Any = None,
    optimizer: Updates | None = None,
    accumulate: int = 1,
    granularity: str | Granularity = Granularity.LAYER,
    modules: Collection[str] | None = None,
    device: str | torch.device | None = None,
    profile: bool = True,
    name: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    verify: bool = False,
    tiles: bool = False,
    kernels: str = Kernels.EAGER,
) -> Solution | GraphSolution:
    """Plan what to recompute when `model` trains on a batch like `example`.

    With a `budget` (bytes, "8GiB", a part of the plain peak, "60%", "min" for the lowest peak that can be
    reached, or a card: "24GiB card", "rtx4090", `lowtide.Card("24GiB", reserve="1GiB")`) the step is planned
    op by op unless `method` says otherwise: the peak of the whole step is within the budget, and the plan
    adds as little time as it can. A step that cannot be captured (it looks at
    numbers that exist only when it runs, say) is planned layer by layer instead: `solution.remark` and a
    warning say why. The method "ops" insists on op by op. `accumulate` counts the backward
    calls between two updates; with more than one, gradients are there when a forward begins. With `effort`
    "quick" the search is four times as fast, and the plan adds a little more time.

    A card has to hold everything that the process takes from the device: the segments that PyTorch's
    allocator reserves, replayed from the first step of a training on with expandable segments, the CUDA
    context and libraries, and what others hold of it. `lowtide.optimize` switches these segments on.

    With `tiles` stretches of the step may run in slices, along a dimension that their ops treat independently
    (tokens, or the examples of a batch): so the peak goes below what a single op needs, and a budget may cost
    less time. Only what pays is cut; `print(solution)` tells what. Gradients are then those of plain training
    but for the order in which sums are added up.

    A method for chains ("rotor", "hong-linear", …) plans layers instead: the model is cut into a chain
    (`granularity` "fine", "layer" or "block", or around the `modules` named), and the plan is tried out:
    `solution.confirmation.peak_bytes` is the peak of a dry run of the whole step with the plan applied.
    Without a budget such a method minimises what it minimises. Unless told, "auto" plans within a budget and
    hong-linear without one.

    `example`, `loss`, `target`, `optimizer`, `device` and `profile` are as in `lowtide.fit`. The model is
    left as it was, a plan that it has included; `lowtide.apply(model, solution)` puts the new one to work.

    With `kernels` "inductor" the plan is for, and runs with, the kernels that Inductor generates, as
    torch.compile does: what they fuse takes no memory and little time. Gradients are then those of
    torch.compile, and need not be equal to plain training's to the last bit. Which ops are fused is known
    only once code was generated: from the second step on the peak is within the budget, or an error names
    one that would hold.

    With `verify` the plan is tried before it is returned: plain and planned steps are run for real, and must
    agree in loss, gradients, buffers and random streams, to the last bit where kernels are deterministic and
    neither half precision nor slices take part, and the peak that is measured must be within the budget. The
    model, its gradients, the batch, the optimizer and the random streams are put back: nothing is used up.

    Raises:
        PlanDisagrees: the plan was tried, and is not right.
        InfeasibleBudget: no plan of this method fits.
        CannotCapture: Dynamo or AOTAutograd cannot follow the model, and op by op is insisted on, or it
            cannot be planned by layers either.
        CannotApply: layer by layer, a part of the model cannot be run twice.
        BadRequest: the model cannot be cut, or an argument makes no sense.
        CannotTrace: the dry run cannot follow the step.
    """
    _refuse_compiled(model)
    asked = Budget.parse(budget)
    method = method or default_method(asked)
    chosen = at_effort(method, effort)
    Kernels.named(kernels)
    example, loss = declared(example, loss, target)
    spec = StepSpec(
        model, example, loss, optimizer, accumulate, device, profile, name, progress, tiles, kernels
    )
    if is_scheduler(chosen):
        refuse_cutting(granularity, modules)
        ladder = Ladder(spec, chosen)
        solution = ladder.within(asked, insists=method != AUTO)
        _tell(solution.remark, stacklevel=3)
        if verify:
            tried(spec, solution, ladder.step.plain)
        return solution
    assert not isinstance(chosen, Scheduler)
    refuse_op_level_requests(asked, accumulate, tiles, kernels)
    rehearsal = Rehearsal.of(spec)
    found = rehearsal.within(rehearsal.chain(granularity, modules), chosen, asked)
    _tell(found.remark, stacklevel=3)
    if verify:
        tried(spec, found, rehearsal.plain)
    return found


def optimize(
    model: Model,
    example: Example | BatchOf | Foreseen | None = None,
    *,
    budget: str | int | Card | None = None,
    method: str | Method | Scheduler | None = None,
    effort: str = Effort.FULL,
    loss: Loss | None = None,
    target: Any = None,
    optimizer: Updates | None = None,
    accumulate: int = 1,
    on_new_shape: str = "plan",
    granularity: str | Granularity = Granularity.LAYER,
    modules: Collection[str] | None = None,
    device: str | torch.device | None = None,
    profile: bool = True,
    progress: Progress | None = None,
    verify: bool = False,
    tiles: bool = False,
    kernels: str = Kernels.EAGER,
    lengths: Lengths | None = None,
    length_key: str | None = None,
    classes: int | Sequence[int] | None = None,
) -> Model:
    """Plan and apply at once: `model` itself, now within the budget when it trains.

    Without an `example` nothing is planned yet: the first inputs that the model meets in training mode, with
    gradients on, are planned for then, and nobody has to look into a data loader before it is used.

    Inputs of another shape than `example`, and other numbers or words among the model's arguments, are
    planned for when they are met first, under the same budget (a warning says so once), and remembered;
    with `on_new_shape="error"` they are refused. A budget given as a part of the plain peak stays the
    number of bytes that it meant for the first inputs. Where `loss` cannot be run for other inputs, because
    it was given the labels of the example, it is counted as for the example, scaled by the size of the
    output, and a warning says so. The other arguments are as in `lowtide.plan`. Plans are held for the 32
    kinds of inputs that came last; others are made anew if they come again, and a warning says so.

    With `lengths`, as in `lowtide.worst`, `example` is a function: `example(n)` is a batch of length n. Some
    of the lengths are chosen as `classes` (how many, 4 by default, or which), and planned for at once, the
    worst first, which settles what the budget means. Inputs of a class run by its plan. Others are captured
    when they come and follow the schedule of a class: nothing is searched, and it is replayed on their own
    graph before it runs. Padding to classes spares the captures too (`lowtide.padded`). What follows no
    class is planned for as it comes, or refused with `on_new_shape="error"`.

    With `verify` the first plan is tried as in `lowtide.plan`, and taken off if it is not right.

    Raises:
        PlanDisagrees: the plan was tried, and is not right. The model has no plan now.
        InfeasibleBudget: no plan of this method fits; for inputs that are met later, when they are met.
        CannotApply, CannotCapture, BadRequest, CannotTrace: as in `lowtide.plan`.
    """
    if on_new_shape not in ON_NEW_SHAPE:
        raise BadRequest(f"on_new_shape is {on_new_shape!r}; it is one of {', '.join(ON_NEW_SHAPE)}.")
    _refuse_compiled(model)
    check_optimizer(optimizer)
    asked = Budget.parse(budget)
    if asked.card is not None:
        expand_segments(stacklevel=3)
    method = method or default_method(asked)
    chosen = at_effort(method, effort)
    Kernels.named(kernels)
    on_new_inputs = "error" if on_new_shape == "error" else "warn"
    ahead = ahead_of(example, lengths, length_key, classes, loss, target)
    if ahead is not None:
        example = None
    elif example is not None:
        assert not isinstance(example, Foreseen), "that is ahead"
        assert not callable(example), "that is ahead, or refused"
        example, loss = declared(example, loss, target)
    elif targets_wanted(loss):
        raise BadRequest(
            "the loss takes targets beside the model's output, and without an example nobody knows of which "
            "kind. Give an example with them: (images, labels)."
        )
    if loss is not None:
        loss = LossOfAnyBatch(loss)
    spec_of = partial(
        StepSpec,
        loss=loss,
        optimizer=optimizer,
        accumulate=accumulate,
        device=device,
        profile=profile,
        progress=progress,
        tiles=tiles,
        kernels=kernels,
    )
    if is_scheduler(chosen):
        refuse_cutting(granularity, modules)
        check_accumulation(accumulate)
        anew = _OpsAnew(spec_of, chosen, asked, insists=method != AUTO, to_verify=verify)
        if ahead is not None:
            by_classes = ByClasses(anew, ahead, refuses=on_new_shape == "error")
            return _by_classes(model, by_classes, accumulate, anew.spares, at_once=lengths is not None)
        planned = None if example is None else anew(model, *arguments(example))
        return reroute(
            model,
            planned,
            on_new_inputs=on_new_inputs,
            accumulate=accumulate,
            replan=anew,
            spares=anew.spares,
        )
    assert not isinstance(chosen, Scheduler)
    refuse_op_level_requests(asked, accumulate, tiles, kernels)
    if ahead is not None:
        raise BadRequest(f"{method} plans layers, and lengths are planned op by op: try auto.")
    again = _Again(spec_of, granularity, modules, chosen, asked, to_verify=verify)
    solution = None if example is None else again(model, *arguments(example))
    return reroute(model, solution, on_new_inputs=on_new_inputs, replan=again, of_layers=True)


def _by_classes(model: Model, planner: ByClasses, accumulate: int, spares: Spares, *, at_once: bool) -> Model:
    """`model` with the plans of classes: made now, or when it meets its first inputs."""
    if at_once:
        planner.plan_ahead(model)
    first, *others = planner.plans or (None,)
    return reroute(
        model,
        first,
        on_new_inputs="ignore",  # the planner tells, or refuses
        accumulate=accumulate,
        replan=planner,
        spares=spares,
        others=[plan for plan in others if plan is not None],
    )


def _refuse_compiled(model: nn.Module) -> None:
    if is_compiled(model):
        raise BadRequest(
            f"this {type(uncompiled(model)).__name__} is compiled by torch.compile, and nobody can plan what "
            "compiled code holds. Plan the model without it, or have torch.compile plan: "
            'torch.compile(model, backend="lowtide", options={"budget": "8GiB"}).'
        )


def _tell(remark: str, stacklevel: int) -> None:
    if remark:
        warnings.warn(f"lowtide: {remark}", stacklevel=stacklevel)


def refuse_cutting(granularity: str | Granularity, modules: Collection[str] | None) -> None:
    """Raise BadRequest where it is said how to cut a model that is planned op by op."""
    if modules is not None or granularity_named(granularity) is not Granularity.LAYER:
        raise BadRequest(
            "granularity and modules say how to cut a model into a chain of layers; this method plans op by "
            "op and cuts nothing. Leave them out, or choose a method for chains, such as rotor."
        )


def refuse_op_level_requests(
    budget: Budget, accumulate: int, tiles: bool = False, kernels: str = Kernels.EAGER
) -> None:
    """Raise BadRequest where a model that is planned by layers is asked for what ops alone can do."""
    refuse_lowest(budget)
    if accumulate != 1:
        raise BadRequest("accumulate is for methods that plan op by op (auto); leave it out for chains.")
    if tiles:
        raise BadRequest("tiles are for methods that plan op by op (auto); leave them out for chains.")
    if Kernels.named(kernels) is not Kernels.EAGER:
        raise BadRequest(
            f"kernels={kernels!r} is for methods that plan op by op (auto); leave it out for chains."
        )


@dataclass
class _OpsAnew:
    """Plans op by op for inputs as they are met. What a budget means is settled by the first of them."""

    spec_of: SpecOf
    method: str | Scheduler
    budget: Budget
    insists: bool  # on a plan of the whole step
    to_verify: bool  # the next plan that is made
    has_told: bool = False  # that there is none
    spares: Spares = field(default_factory=Spares)
    expected: tuple[Assumption, ...] = ()  # of the next graph, which the last one was found to follow

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AnySolution:
        return self.searched(self.ladder(self.spec_of(model, Arguments(args, kwargs))))

    def ladder(self, spec: StepSpec) -> Ladder:
        """The ways to plan a step."""
        return Ladder(spec, self.method, self.spares, self.expected)

    def searched(self, ladder: Ladder) -> AnySolution:
        """A plan that is searched for."""
        self.budget = ladder.step.settled(self.budget)
        found = ladder.within(self.budget, self.insists)
        if self.to_verify:
            _tried_or_taken_off(ladder.spec, found, ladder.step.plain)
            self.to_verify = False
        if isinstance(found, GraphSolution):
            self.expected = found.graph.assumptions
        learn_of_loss(ladder.spec.loss, ladder.step.plain)
        if not self.has_told:
            _tell(found.remark, stacklevel=4)
        self.has_told = self.has_told or bool(found.remark)
        return found


@dataclass
class _Again:
    """Plans by layers for inputs as they are met. What a budget means is settled by the first of them."""

    spec_of: SpecOf
    granularity: str | Granularity
    modules: Collection[str] | None
    method: str | Method
    budget: Budget
    to_verify: bool  # the next plan that is made
    has_told: bool = False  # what is left alone

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Solution:
        rehearsal = Rehearsal.of(self.spec_of(model, Arguments(args, kwargs)))
        if self.budget.card is None:
            self.budget = Budget.parse(rehearsal.bytes_of(self.budget))
        found = rehearsal.within(rehearsal.chain(self.granularity, self.modules), self.method, self.budget)
        if self.to_verify:
            _tried_or_taken_off(rehearsal.spec, found, rehearsal.plain)
            self.to_verify = False
        learn_of_loss(rehearsal.spec.loss, rehearsal.plain)
        if not self.has_told:
            _tell(found.remark, stacklevel=4)
        self.has_told = self.has_told or bool(found.remark)
        return found


def _tried_or_taken_off(spec: StepSpec, solution: AnySolution, plain: Trace) -> None:
    try:
        tried(spec, solution, plain)
    except PlanDisagrees:
        remove(spec.model)
        raise
