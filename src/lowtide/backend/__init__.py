"""`torch.compile(model, backend="lowtide", options={"budget": "8GiB"})`.

A backend is handed one graph at a time and never sees the whole step. So in the first step each graph keeps
as little as it can for its backward, and is watched: which graphs run, in which order, what passes from one
to another, and what of that is held by others. From the second step on all of them follow one schedule,
within the budget.

Counted is what the graphs are given and make, and on CUDA what else is allocated when a step begins. What
runs outside of them (a loss that is not compiled, say) is not: compile a function that includes it, or
use `lowtide.optimize`, which sees it.

Inside a DistributedDataParallel all ranks follow the schedules that the first one finds, and its buckets are
counted. Dynamo cuts graphs where buckets end, so that reducing and computing overlap as they do without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from lowtide.aot.codegen import Planned, emit
from lowtide.aot.halves import Halves, module_stack
from lowtide.aot.mark import Mark
from lowtide.aot.planned_graph import PlannedGraph
from lowtide.aot.tangents import with_held_tangents
from lowtide.backend.observe import Drawn, Run, Storages, joined_runs, storages_of
from lowtide.compat.ddp import let_go_of_old_buckets
from lowtide.compat.dynamo import take_a_list
from lowtide.compat.tensors import tensors_in
from lowtide.cost.price import with_costs
from lowtide.distributed.agreement import TIMEOUT_SECONDS, agreed, largest
from lowtide.distributed.ddp import with_buckets
from lowtide.errors import BadRequest, InfeasibleBudget, UnknownMethod
from lowtide.execute.identity import skeleton
from lowtide.ir.graph import Graph, Origin, Phase, Role, Value
from lowtide.ir.recomputable import between_graphs
from lowtide.ir.simulate import simulate
from lowtide.planner.promise import safe_peak_bytes
from lowtide.solvers import methods, schedulers, solve
from lowtide.solvers.refereed import SINGLE_OPS
from lowtide.solvers.solution import GraphSolution
from lowtide.text.budget import LOWEST, parse_bytes
from lowtide.trace.graph_builder import GraphBuilder

_OPTIONS = ("budget", "method", "profile")
_steps: dict[int, tuple[Any, _Step]] = {}  # by the options of a torch.compile: these it hands over each time


def lowtide(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The Dynamo backend. Its options are `budget` (a size, or "min"), `method` and `profile`.

    Raises:
        BadRequest: an option is missing, unknown or makes no sense.
        InfeasibleBudget: the budget is below what the graphs need at least.
    """
    known = _steps.get(id(options))
    if known is None:
        known = _steps[id(options)] = (options, _Step(_Request.read(options)))
    return known[1].compile(module, inputs)


def plans_of(options: Mapping[str, Any]) -> tuple[GraphSolution, ...]:
    """The plans for the `torch.compile` that was given `options`, this very dictionary.

    There is one for each kind of step. A step is planned when the next one begins, so there are none before
    the second.
    """
    known = _steps.get(id(options))
    return () if known is None else tuple(plan.solution for plan in known[1].plans)


@dataclass(frozen=True)
class _Request:
    """What the options ask for."""

    budget_bytes: int | None  # None: as low as possible
    method: str
    profile: bool

    @staticmethod
    def read(options: Mapping[str, Any] | None) -> _Request:
        given = dict(options or {})
        for name in given:
            if name not in _OPTIONS:
                raise BadRequest(f"the lowtide backend has no option {name!r}; it has {', '.join(_OPTIONS)}.")
        if "budget" not in given:
            raise BadRequest(
                "the lowtide backend needs a budget: "
                'torch.compile(model, backend="lowtide", options={"budget": "8GiB"}).'
            )
        budget, method = given["budget"], str(given.get("method", "auto"))
        if str(budget).strip().endswith("%"):
            raise BadRequest(
                f"the lowtide backend does not know the plain peak, of which {budget} is to be a part. "
                "Give a size, or use lowtide.optimize."
            )
        if method in methods():
            raise BadRequest(f"{method} plans layers; the backend plans op by op. Use auto, or leave it out.")
        if method not in schedulers():
            raise UnknownMethod(method, schedulers())
        lowest = isinstance(budget, str) and budget.strip() == LOWEST
        return _Request(None if lowest else parse_bytes(budget), method, bool(given.get("profile", True)))


@dataclass(kw_only=True)
class _Run(Run):
    """One run of one graph in a step that is watched. Its mark is there as long as its backward may come."""

    graph: _Compiled
    mark: StorageWeakRef
    waiting: bool = True  # for its backward


@dataclass(frozen=True)
class _Plan:
    """A schedule for the graphs that run in one kind of step, and the code for each."""

    graphs: tuple[_Compiled, ...]
    solution: GraphSolution
    sections: tuple[Planned, ...]


class _Step:
    """The graphs of one `torch.compile`, and the schedules that they follow.

    A new step begins when a forward runs and no graph waits for its backward, or when the graphs of a plan
    have all run.
    """

    def __init__(self, request: _Request) -> None:
        self.request = request
        self.plans: list[_Plan] = []
        self.watched: list[_Run] = []
        self._following: _Plan | None = None
        self._next = 0

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs."""
        return _Compiled(self).compile(module, inputs)

    def next_mark(self, graph: _Compiled) -> Mark | None:
        """Which plan `graph` is to follow now, and as which of its sections; None: it is to be watched."""
        if self._following is not None and self._next == len(self._following.graphs):
            self._following = None
        if self._following is None:
            self._plan_what_was_watched()
            self._following = next((plan for plan in self.plans if plan.graphs[0] is graph), None)
            self._next = 0
        if self._following is None:
            return None
        if self._following.graphs[self._next] is not graph:  # another kind of step
            self._following = None
            return None
        self._next += 1
        return Mark(self.plans.index(self._following), self._next - 1)

    def watch(self, graph: _Compiled, given: Storages, made: Storages) -> torch.Tensor:
        """A forward that follows no plan is over. Returns its mark, written."""
        mark = Mark(None, len(self.watched)).write()
        reference = StorageWeakRef(mark.untyped_storage())
        self.watched.append(_Run(drawn=graph.drawn, given=given, made=made, graph=graph, mark=reference))
        return mark

    def watch_backward(self, graph: _Compiled, mark: Mark, tangents: Storages, gradients: Storages) -> None:
        """The backward of a forward that followed no plan is over."""
        run = self.watched[mark.section] if mark.section < len(self.watched) else None
        if run is not None and run.graph is graph:
            run.tangents, run.gradients, run.waiting = tangents, gradients, False
            torch.autograd.Variable._execution_engine.queue_callback(self.look)

    def look(self) -> None:
        """A backward is over: see what is held by others than autograd."""
        for run in self.watched:
            if not run.waiting:
                run.look()

    def _plan_what_was_watched(self) -> None:
        let_go_of_old_buckets()
        if any(run.waiting and not run.mark.expired() for run in self.watched):
            return
        runs, self.watched = [run for run in self.watched if not run.waiting], []
        if not runs:
            return
        whole = with_held_tangents(_with_others(joined_runs(runs)))
        solution = _solved_by_all(whole, self.request)
        sections = tuple(
            emit(run.graph.halves, whole, solution.schedule, section) for section, run in enumerate(runs)
        )
        self.plans.append(_Plan(tuple(run.graph for run in runs), solution, sections))


class _Compiled(PlannedGraph):
    """One captured graph, watched while it follows a plan of its own, and then planned with the others."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self._step = step
        self._drawn: Drawn | None = None
        self._alone: Planned | None = None

    @property
    def drawn(self) -> Drawn:
        """The graph by itself, and what comes and goes."""
        assert self._drawn is not None, "AOTAutograd partitions, then compiles, then runs"
        return self._drawn

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        """Cut the joint graph in two, and plan it alone, as low as possible."""
        if any(isinstance(given, torch.SymInt) for given in inputs[0]):
            raise BadRequest(
                "a budget is planned for sizes that are numbers, and Dynamo made some of them symbols. "
                "Compile with dynamic=False; every size is then planned for when it is met."
            )
        halves = super().partition(joint, inputs, **options)
        drawn = _drawn(self.halves, frozenset(options.get("static_lifetime_input_indices") or ()))
        if self._step.request.profile:
            drawn = replace(drawn, graph=with_costs(drawn.graph))
        self._drawn = drawn
        first = _planned_alone(drawn.graph, self._step.request)
        self._alone = emit(self.halves, first.graph, first.schedule, 0)
        return halves

    def without_backward(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """It is not planned, and runs as it is."""
        take_a_list(graph.graph)
        graph.recompile()
        run: Callable[[list[Any]], Any] = graph.forward
        return run

    def run_forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        mark = self._step.next_mark(self)
        if mark is not None:
            return self.code(mark).forward.forward(args), mark.write()
        assert self._alone is not None, "planned alone when it was compiled"
        given = storages_of(args)
        results = self._alone.forward.forward(args)
        made = storages_of(results[: self.halves.user_results])
        return results, self._step.watch(self, given, made)

    def run_backward(self, mark: Mark, args: list[Any]) -> Any:
        if mark.plan is not None:
            return super().run_backward(mark, args)
        tangents = storages_of(args[len(args) - len(self.halves.tangents) :])
        gradients = super().run_backward(mark, args)
        self._step.watch_backward(self, mark, tangents, storages_of(gradients))
        return gradients

    def code(self, mark: Mark) -> Planned:
        """The code for a section of a plan, or, while it is watched, for the graph alone."""
        if mark.plan is not None:
            return self._step.plans[mark.plan].sections[mark.section]
        assert self._alone is not None, "planned alone when it was compiled"
        return self._alone


def _planned_alone(graph: Graph, request: _Request) -> GraphSolution:
    """A schedule of one graph for a step in which others run that are not known yet.

    Raises:
        InfeasibleBudget: the graph alone needs more than the budget.
    """
    budget_bytes = request.budget_bytes
    sparingly = replace(request, budget_bytes=None)
    lowest = _solved_by_all(graph, sparingly)
    if budget_bytes is not None and lowest.peak_bytes > budget_bytes:
        running = lowest.timeline.peak_op
        needed_by = "what is always there" if running is None else running.label
        raise InfeasibleBudget(lowest.method, budget_bytes, lowest.peak_bytes, needed_by, SINGLE_OPS)
    # Other graphs will need about as much while this one waits, and what it keeps is there beside that.
    sparing = _solved_by_all(_with_others_between(graph, lowest.timeline.growth_bytes), sparingly)
    alone = simulate(_with_others_between(graph, 0), sparing.schedule).peak_bytes
    return lowest if budget_bytes is not None and alone > budget_bytes else sparing


# Graphs -----------------------------------------------------------------------------------------------


def _drawn(halves: Halves, static: frozenset[int]) -> Drawn:
    """What a captured graph does, read off its nodes."""
    assert halves.backward is not None, "only graphs with a backward are cut"
    device = next(
        (str(tensor.device) for node in halves.given for tensor in tensors_in(node.meta.get("val"))), "cpu"
    )
    builder = GraphBuilder("step", Origin.JOINT, device, {})

    def residents(nodes: Sequence[fx.Node], role: Callable[[int], Role]) -> tuple[int | None, ...]:
        found: list[int | None] = []
        for position, node in enumerate(nodes):
            tensor = next(tensors_in(node.meta.get("val")), None)
            if tensor is not None and builder.value_of(tensor) is None:
                builder.add_value(tensor, role(position), node.name)
            found.append(None if tensor is None else builder.value_of(tensor))
        return tuple(found)

    came = residents(halves.given, lambda position: Role.PARAMETER if position in static else Role.BATCH)
    tangents = residents(halves.tangents, lambda _: Role.BATCH)
    in_forward, in_backward = halves.ops
    for phase, nodes in ((Phase.FORWARD, in_forward), (Phase.BACKWARD, in_backward)):
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
            builder.add_op(node.target, args, kwargs, node.meta.get("val"), phase=phase, module=_module(node))
    made = _values(builder, halves.made)
    gradients = _values(builder, halves.gradients)
    graph = builder.finish(value for value in (*made, *gradients) if value is not None)
    return Drawn(graph, came, made, tangents, gradients)


def _with_others_between(graph: Graph, others_bytes: int) -> Graph:
    """`graph` with an op between its forward and its backward that takes `others_bytes` while it runs."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    others = between_graphs("lowtide.other_graphs", Phase.FORWARD, workspace_bytes=others_bytes)
    ops = (*forward, others, *graph.ops[len(forward) :])
    return replace(graph, ops=tuple(replace(op, id=position) for position, op in enumerate(ops)))


def _values(builder: GraphBuilder, nodes: Sequence[Any]) -> tuple[int | None, ...]:
    fakes = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]
    return tuple(builder.value_of(fake) if isinstance(fake, torch.Tensor) else None for fake in fakes)


def _module(node: fx.Node) -> str:
    """The path of the innermost module that `node` belongs to, as Dynamo knows it."""
    for path, _ in reversed(list(module_stack(node).values())):
        return str(path).replace("L['self']", "").strip(".")
    return ""


def _with_others(graph: Graph) -> Graph:
    """With everything else that is allocated on CUDA when a step begins: states of the optimizer, say.

    Elsewhere that is not known, but for the buckets of a DistributedDataParallel that is running. Its ranks
    share a plan, so what counts is the one that holds most.
    """
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if not graph.device.startswith("cuda"):
        return graph if wrapper is None else with_buckets(graph, wrapper.module)
    known = sum(graph.counted_bytes(value) for value in graph.resident)
    others = max(0, torch.cuda.memory_allocated(graph.device) - known)
    if wrapper is not None:
        others = largest(others, TIMEOUT_SECONDS)
    value = Value(len(graph.values), others, Role.OPTIMIZER_STATE, "other tensors", device=graph.device)
    return replace(graph, values=(*graph.values, value))


def _solved_by_all(graph: Graph, request: _Request) -> GraphSolution:
    """A schedule for `graph`; inside a DistributedDataParallel the one that its first rank finds."""
    if DistributedDataParallel._get_active_ddp_module() is None:
        return _solved(graph, request)
    facts = {"a graph": skeleton(graph), "a budget of": str(request.budget_bytes)}
    solution = agreed(lambda: _solved(graph, request), facts, TIMEOUT_SECONDS)
    assert isinstance(solution, GraphSolution)
    return solution


def _solved(graph: Graph, request: _Request) -> GraphSolution:
    if request.budget_bytes is None:
        return solve(graph, request.method, LOWEST)
    resident = sum(graph.counted_bytes(value) for value in graph.resident)
    return solve(graph, request.method, safe_peak_bytes(request.budget_bytes, resident, graph.device))
