"""Methods side by side on one model: what each plan is predicted to hold, and what it is measured to."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lowtide.chain.chain import Chain
from lowtide.chain.cuts import Granularity
from lowtide.chain.plan import Plan
from lowtide.compat.trees import tree_leaves
from lowtide.cost.measure import present_device
from lowtide.cost.profile import Progress
from lowtide.errors import BadRequest, CannotApply, CannotTrace, UnknownMethod
from lowtide.planner.as_found import as_found
from lowtide.planner.layers import Rehearsal
from lowtide.planner.real_step import RealStep
from lowtide.solvers import methods as registered
from lowtide.solvers import refuse_lowest, schedulers
from lowtide.solvers.method import Method
from lowtide.solvers.solution import Confirmation, Solution
from lowtide.text.budget import Budget
from lowtide.text.card import Card
from lowtide.text.units import format_bytes
from lowtide.trace.step import arguments, optimizer_name

_FEW_LAYERS = 12  # so many exhaustive does in a second or two


@dataclass(frozen=True)
class Row:
    """What came of one method. Where it made no plan, `problem` says why and the rest is None.

    `chain_peak_bytes` is what the replay of the chain counts, `predicted_peak_bytes` what a dry run of
    the model under the plan does. Ratios are to keep-all's: of the predicted peak (`ratio`), of the
    measured peak and of the measured time of a step; `extra_seconds_ratio` is predicted, the time added
    as a part of the plain step, and None where ops have not been timed.
    """

    method: str
    problem: str | None = None
    status: str | None = None
    plan: str | None = None
    checkpoints: tuple[int, ...] = ()
    chain_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    ratio: float | None = None
    recomputed_ops: int | None = None
    extra_seconds_ratio: float | None = None
    measured_peak_bytes: int | None = None
    measured_ratio: float | None = None
    measured_seconds: float | None = None
    measured_seconds_ratio: float | None = None
    objective_bytes: int | None = None
    planning_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Every field, as JSON can hold it."""
        return {**asdict(self), "checkpoints": list(self.checkpoints)}


@dataclass(frozen=True)
class Comparison:
    """Rows in the order of the methods, keep-all first.

    `lower_bound_bytes` is what no plan for this chain can undercut. `timed` is whether predicted times
    are known, `profiled_on` where kernels' workspaces were learnt (None: they are missing from the peaks).
    """

    model: str
    device: str
    optimizer: str | None
    layers: int
    budget_bytes: int | None
    lower_bound_bytes: int
    timed: bool
    measured: bool
    profiled_on: str | None
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {**asdict(self), "notes": list(self.notes), "rows": [row.to_json() for row in self.rows]}


def compare(
    rehearsal: Rehearsal,
    *,
    methods: Sequence[str | Method] | None = None,
    granularity: str | Granularity = Granularity.LAYER,
    modules: Collection[str] | None = None,
    budget: str | int | Card | None = None,
    measure: bool = False,
    repeats: int = 5,
    progress: Progress | None = None,
) -> Comparison:
    """Let every method plan for the same step, and try each plan out.

    Without `methods` these are all that there are: exhaustive only where the chain is short, and with a
    `budget` those that take one. Keep-all, which is plain training, is always there and first, over the
    budget or not. A method that finds no plan has a row that says why. Methods that agree on a plan share
    one trial of it. `progress(done, of)` is called as methods and measurements are done.

    With `measure` the step is really run under each plan: `repeats` steps are timed, by turns with the
    other plans. The model is then as it was before: its parameters, buffers, gradients, the plan that it
    had and the random streams. The measured peak is of a step that begins without gradients. On CUDA it is
    the allocator's own count, which includes whatever else the process holds on the device. The CPU's
    allocator keeps no such count: there it is what the step is seen to allocate, plus the predicted bytes
    of parameters, buffers, batch and optimizer states.

    Raises:
        UnknownMethod: there is no method of that name.
        DeviceMissing: measuring was asked for on a device that this machine does not have.
        BadRequest: the model cannot be cut, or measuring was asked for and model or batch are elsewhere.
    """
    if repeats < 1:
        raise BadRequest(f"steps cannot be timed {repeats} times; give 1 or more.")
    check_methods(methods or ())
    asked = Budget.of_a_peak(budget)
    refuse_lowest(asked)
    device = _measurable(rehearsal) if measure else None
    chain = rehearsal.chain(granularity, modules)
    others = [method for method in _chosen(methods, chain, asked) if _name(method) != "keep-all"]
    of = 1 + len(others)
    plain = rehearsal.solve(chain, "keep-all")
    budget_bytes = rehearsal.bytes_of(asked)
    found: list[tuple[str, Solution | str]] = [("keep-all", plain)]
    for done, method in enumerate(others, start=1):
        _tell(progress, done, of)
        found.append((_name(method), _attempt(rehearsal, chain, method, budget_bytes)))
    solutions = {answer.plan: answer for _, answer in found if isinstance(answer, Solution)}
    readings = {} if device is None else _measured(rehearsal, solutions.values(), device, repeats, progress)
    _tell(progress, of, of)
    graph = rehearsal.plain.graph
    return Comparison(
        model=chain.name,
        device=graph.device,
        optimizer=optimizer_name(rehearsal.optimizer),
        layers=len(chain),
        budget_bytes=budget_bytes,
        lower_bound_bytes=plain.lower_bound_bytes,
        timed=chain.timed,
        measured=measure,
        profiled_on=graph.profiled_on,
        notes=graph.notes,
        rows=tuple(
            Row(method, problem=answer)
            if isinstance(answer, str)
            else _row(method, answer, readings, budget_bytes)
            for method, answer in found
        ),
    )


# Planning -------------------------------------------------------------------------------------------------


def _name(method: str | Method) -> str:
    return method if isinstance(method, str) else method.name


def check_methods(methods: Iterable[str | Method]) -> None:
    """Raise UnknownMethod or BadRequest for a name that no method for chains has."""
    for name in (method for method in methods if isinstance(method, str)):
        if name in schedulers():
            raise BadRequest(
                f"{name} plans op by op, and plans of layers are compared. "
                f"Plan with it: lowtide plan --method {name}."
            )
        if name not in registered():
            raise UnknownMethod(name, registered())


def _chosen(methods: Sequence[str | Method] | None, chain: Chain, budget: Budget) -> Sequence[str | Method]:
    if methods is not None:
        return methods
    return [
        name
        for name, method in registered().items()
        if (not budget.is_given or method.takes_budget)
        and (name != "exhaustive" or len(chain) <= _FEW_LAYERS)
    ]


def _attempt(
    rehearsal: Rehearsal, chain: Chain, method: str | Method, budget_bytes: int | None
) -> Solution | str:
    """A plan that has been tried out, or why there is none."""
    try:
        return rehearsal.solve(chain, method, budget_bytes)
    except (BadRequest, CannotApply, CannotTrace) as error:
        return str(error)


def _tell(progress: Progress | None, done: int, of: int) -> None:
    if progress is not None:
        progress(done, of)


# Rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlanReading:
    """A step under one plan, measured."""

    peak_bytes: int
    seconds: float


def _row(
    method: str, solution: Solution, readings: dict[Plan, _PlanReading | None], budget_bytes: int | None
) -> Row:
    tried = _confirmation(solution)
    reading, plain = readings.get(solution.plan), readings.get(Plan())
    return Row(
        method=method,
        problem=_problem(tried.peak_bytes, budget_bytes, bool(readings) and reading is None),
        status=solution.status.value,
        plan=str(solution.plan),
        checkpoints=solution.checkpoints,
        chain_peak_bytes=solution.peak_bytes,
        predicted_peak_bytes=tried.peak_bytes,
        ratio=tried.peak_bytes / tried.plain_peak_bytes,
        recomputed_ops=tried.recomputed_ops,
        extra_seconds_ratio=tried.extra_seconds / tried.plain_seconds if solution.chain.timed else None,
        measured_peak_bytes=reading.peak_bytes if reading else None,
        measured_ratio=reading.peak_bytes / plain.peak_bytes if reading and plain else None,
        measured_seconds=reading.seconds if reading else None,
        measured_seconds_ratio=reading.seconds / plain.seconds if reading and plain else None,
        objective_bytes=solution.objective_bytes,
        planning_seconds=solution.planning_seconds,
    )


def _confirmation(solution: Solution) -> Confirmation:
    assert solution.confirmation is not None, "a rehearsal confirms what it solves"
    return solution.confirmation


def _problem(peak_bytes: int, budget_bytes: int | None, failed: bool) -> str | None:
    if failed:
        return "the device ran out of memory when it was measured"
    if budget_bytes is not None and peak_bytes > budget_bytes:
        return f"{format_bytes(peak_bytes - budget_bytes)} over the budget, for reference"
    return None


# Measuring ------------------------------------------------------------------------------------------------


def _measurable(rehearsal: Rehearsal) -> torch.device:
    """Where to measure, if model and batch are there."""
    args, kwargs = arguments(rehearsal.example)
    batch = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    held = {"model": [*rehearsal.model.parameters(), *rehearsal.model.buffers()], "batch": batch}
    where = rehearsal.device or next((tensor.device for tensor in held["model"]), "cpu")
    device = present_device(where, "measure")
    for what, tensors in held.items():
        for tensor in tensors:
            if tensor.device.type != device.type:
                raise BadRequest(
                    f"cannot measure on '{device}': the {what} is on '{tensor.device}'. "
                    "Build both there, for real, or leave measuring out."
                )
    return device


def _measured(
    rehearsal: Rehearsal,
    solutions: Collection[Solution],
    device: torch.device,
    repeats: int,
    progress: Progress | None,
) -> dict[Plan, _PlanReading | None]:
    """A reading for each plan; None where the device had too little memory for it."""
    peaks: dict[Plan, int | None] = {}
    seconds: dict[Plan, list[float]] = {}
    rounds = len(solutions) * (1 + repeats)
    step = RealStep(replace(rehearsal.spec, device=device))
    with as_found(step.spec):
        for solution in solutions:
            found = step.reading(rehearsal.plain, solution)
            peaks[solution.plan] = None if found is None else found.peak_bytes
            _tell(progress, len(peaks), rounds)
        able = [solution for solution in solutions if peaks[solution.plan] is not None]
        for turn in range(1, repeats + 1):
            for solution in able:
                seconds.setdefault(solution.plan, []).append(step.seconds(solution))
            _tell(progress, len(solutions) * (1 + turn), rounds)
    return {
        plan: None if peak is None else _PlanReading(peak, statistics.median(seconds[plan]))
        for plan, peak in peaks.items()
    }
