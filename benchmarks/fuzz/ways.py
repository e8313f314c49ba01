"""The ways to put a plan to work, each as a step to run and what was promised of its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lowtide
from benchmarks.fuzz.subjects import Subject
from lowtide.backend import plans_of as plans_of_backend
from lowtide.compat.composites import as_they_run
from lowtide.compat.dynamo import drawing_as_eager
from lowtide.compat.fake_kernels import as_kernels_do
from lowtide.ir.graph import Graph, Phase, Ref
from lowtide.ir.recomputable import BETWEEN_GRAPHS
from lowtide.planner.verify import allowed_bytes
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.trace.step import loss_of

LOWEST, BYTES = "min", "bytes"
BY_LAYERS, NO_ARENA = "by layers", "by its plan, for it has no arena"
BUDGETS = ("90%", "70%", LOWEST, BYTES)
_PARTS = {"90%": 0.9, "70%": 0.7, BYTES: 0.8}  # of the plain peak
_FACTOR_BYTES, _PRODUCTS = 8, ("aten.mul.Tensor", "aten.div.Tensor")  # see docs/counted.md
_NO_ONE_GRAPH = "an arena runs one graph"  # and this step may be another whenever it runs: it has none
_NUMBER = 8  # a loss is handed back, and is not of the arena

Step = Callable[[], tuple[Tensor, Any]]  # forward, loss and backward; gives the loss and the output


@dataclass(frozen=True)
class Promise:
    """The most that a step may hold, and what of it is counted as there before, if that is not all."""

    allowed_bytes: int
    resident_bytes: int | None = None


@dataclass(frozen=True)
class Planned:
    """A step as it was planned. `promise` is known when it has run; None: nothing is promised."""

    step: Step
    promise: Callable[[], Promise | None]
    how: Callable[[], str]
    take_off: Callable[[], None]
    gives_output: bool = True


Way = Callable[[Subject, str | int], Planned]


def step_of(subject: Subject, model: Callable[..., Any]) -> Step:
    """The usual training step, the backward outside of what the forward runs within."""

    def step() -> tuple[Tensor, Any]:
        with subject.context():
            output = model(*subject.example.args, **subject.example.kwargs)
            loss = loss_of(output, subject.loss)
        loss.backward()
        return loss.detach(), output

    return step


def bytes_of(budget: str, plain_bytes: int) -> str | int:
    """The budget as a number of bytes, unless it is the lowest peak."""
    return budget if budget == LOWEST else int(_PARTS[budget] * plain_bytes)


def plain(subject: Subject) -> Planned:
    """Without a plan."""
    return Planned(step_of(subject, subject.model), lambda: None, lambda: "plain", lambda: None)


def _by_ops(subject: Subject, budget: str | int) -> Planned:
    return _optimized(subject, budget=budget, effort="quick")


def _by_layers(method: str) -> Way:
    def way(subject: Subject, budget: str | int) -> Planned:
        asked = None if budget == LOWEST else budget  # without one they minimise what they minimise
        return _optimized(subject, budget=asked, method=method)

    return way


def _optimized(subject: Subject, **options: Any) -> Planned:
    model = subject.model
    with subject.context():
        lowtide.optimize(model, subject.example, loss=subject.loss, **options)

    def how() -> str:
        solution = lowtide.plans_of(model)[-1]
        if not isinstance(solution, GraphSolution):
            return BY_LAYERS
        return "partly" if solution.remark else "by ops"

    def promise() -> Promise:
        plan = lowtide.plans_of(model)[-1]
        return Promise(allowed_bytes(plan) + _bytes_of_factors(plan))

    return Planned(step_of(subject, model), promise, how, lambda: lowtide.remove(model))


def _bytes_of_factors(plan: Solution | GraphSolution) -> int:
    """What autograd keeps of numbers that tensors are multiplied by between graphs."""
    if not isinstance(plan, GraphSolution):
        return 0
    between = (op for op in plan.graph.ops if op.section == BETWEEN_GRAPHS and op.phase is Phase.FORWARD)
    return _FACTOR_BYTES * sum(op.target in _PRODUCTS and not isinstance(op.args[1], Ref) for op in between)


class _Whole(nn.Module):
    """Model and loss in one, so that a backend sees both."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model, self.loss = subject.model, subject.loss

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        output = self.model(*args, **kwargs)
        return loss_of(output, self.loss), output


def _compiled(subject: Subject, budget: str | int) -> Planned:
    options: dict[str, Any] = {"budget": budget}

    def promise() -> Promise | None:
        plans = plans_of_backend(options)
        if len(plans) != 1 or counters["graph_break"]:
            return None  # what runs between graphs is not counted
        return Promise(allowed_bytes(plans[0]), _bytes_before(plans[0].graph))

    return Planned(_step_of_whole(subject, "lowtide", options), promise, lambda: "compiled", lambda: None)


def as_aot_eager(subject: Subject) -> Planned:
    """Compiled by PyTorch alone: the graphs of torch.compile, run by the kernels of eager PyTorch.

    Its fakes do as kernels do, for stock torch.compile fails by those that do not. It draws what eager
    PyTorch draws, also what nobody looks at, or all that is drawn later would differ. And it takes ops apart
    as running them does: an upsampling in sums of products is rounded otherwise.
    """
    step = _step_of_whole(subject, "aot_eager")

    def corrected() -> tuple[Tensor, Any]:
        with as_kernels_do(), drawing_as_eager(), as_they_run():
            return step()

    return Planned(corrected, lambda: None, lambda: "aot_eager", lambda: None)


def _step_of_whole(subject: Subject, backend: str, options: dict[str, Any] | None = None) -> Step:
    """A step of model and loss, compiled together."""
    whole = torch.compile(_Whole(subject), backend=backend, options=options, dynamic=False)

    def step() -> tuple[Tensor, Any]:
        with subject.context():
            loss, output = whole(*subject.example.args, **subject.example.kwargs)
        loss.backward()
        return loss.detach(), output

    return step


def _bytes_before(graph: Graph) -> int:
    """What is there before the step. What autograd hands to its backward is counted too, but comes later."""
    there = (value for value in graph.resident if not graph.values[value].name.startswith("tangents_"))
    return sum(graph.counted_bytes(value) for value in there)


def _in_arena(subject: Subject, budget: str | int) -> Planned:
    model, example, loss = subject.model, subject.example, subject.loss
    with subject.context():
        solution = lowtide.plan(model, example, loss=loss, budget=budget, effort="quick")
        try:
            arena = lowtide.in_arena(model, example, loss, solution=solution, profile=True)
        except lowtide.CannotRun as refusal:
            if not str(refusal).startswith(_NO_ONE_GRAPH):
                raise
            return _without_arena(subject, solution)

    def step() -> tuple[Tensor, Any]:
        return arena(), None

    def promise() -> Promise:
        return Promise(max(arena.report.extra_bytes, _NUMBER), 0)

    def take_off() -> None:
        model.zero_grad(set_to_none=True)

    return Planned(step, promise, lambda: "in an arena", take_off, gives_output=False)


def _without_arena(subject: Subject, solution: Solution | GraphSolution) -> Planned:
    """The way out that is named to whoever asks for an arena that cannot be: the plan does without one."""
    lowtide.apply(subject.model, solution)
    promise = Promise(allowed_bytes(solution) + _bytes_of_factors(solution))
    step = step_of(subject, subject.model)
    return Planned(step, lambda: promise, lambda: NO_ARENA, lambda: lowtide.remove(subject.model))


WAYS: Mapping[str, Way] = {
    "ops": _by_ops,
    "rotor": _by_layers("rotor"),
    "hong-linear": _by_layers("hong-linear"),
    "backend": _compiled,
    "arena": _in_arena,
}
