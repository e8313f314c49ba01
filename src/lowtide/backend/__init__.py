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
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from lowtide.aot.codegen import Halves, Planned, emit
from lowtide.aot.mark import Mark
from lowtide.aot.sections import boxed, cut_in_two
from lowtide.aot.tangents import with_held_tangents
from lowtide.backend.observe import Drawn, Run, joined_runs, storages_of
from lowtide.compat.ddp import let_go_of_old_buckets
from lowtide.compat.tensors import tensors_in
from lowtide.cost.price import with_costs
from lowtide.distributed.agreement import TIMEOUT_SECONDS, agreed, largest
from lowtide.distributed.ddp import with_buckets
from lowtide.errors import BadRequest, InfeasibleBudget, UnknownMethod
from lowtide.execute.identity import skeleton
from lowtide.execute.ops_graphs import refuse_graphs_of_the_backward
from lowtide.ir.graph import Graph, Origin, Phase, Role, Value
from lowtide.ir.recomputable import between_graphs
from lowtide.ir.simulate import simulate
from lowtide.planner.promise import safe_peak_bytes
from lowtide.solvers import methods, schedulers, solve
from lowtide.solvers.refereed import LOWEST, SINGLE_OPS
from lowtide.solvers.solution import GraphSolution
from lowtide.text.budget import parse_bytes
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
        graph = _Compiled(self)
        compile_ = aot_autograd(
            fw_compiler=graph.compile_forward,
            bw_compiler=graph.compile_backward,
            partition_fn=graph.partition,
            keep_inference_input_mutations=True,
        )
        compiled: Callable[..., Any] = compile_(module, inputs)
        return compiled

    def section_of(self, graph: _Compiled) -> tuple[int, int] | None:
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
        return self.plans.index(self._following), self._next - 1

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


class _Compiled:
    """One captured graph."""

    def __init__(self, step: _Step) -> None:
        self._step = step
        self._halves: Halves | None = None
        self._drawn: Drawn | None = None
        self._alone: Planned | None = None

    @property
    def halves(self) -> Halves:
        """The graph as it was cut."""
        assert self._halves is not None, "AOTAutograd partitions, then compiles, then runs"
        return self._halves

    @property
    def graph(self) -> Graph:
        """The graph by itself."""
        return self.drawn.graph

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
        forward, backward = cut_in_two(joint, inputs, **options)
        self._halves = Halves(forward, backward, options["num_fwd_outputs"])
        static = options.get("static_lifetime_input_indices") or ()
        drawn = _drawn(self._halves, frozenset(static))
        if self._step.request.profile:
            drawn = replace(drawn, graph=with_costs(drawn.graph))
        self._drawn = drawn
        request = replace(self._step.request, budget_bytes=None)
        lowest = _solved_by_all(self.graph, request)
        budget_bytes = self._step.request.budget_bytes
        if budget_bytes is not None and lowest.peak_bytes > budget_bytes:
            running = lowest.timeline.peak_op
            needed_by = "what is always there" if running is None else running.label
            raise InfeasibleBudget(lowest.method, budget_bytes, lowest.peak_bytes, needed_by, SINGLE_OPS)
        # Other graphs will need about as much while this one waits, and what it keeps is there beside that.
        sparing = _solved_by_all(_with_others_between(self.graph, lowest.timeline.growth_bytes), request)
        alone = simulate(_with_others_between(self.graph, 0), sparing.schedule).peak_bytes
        first = lowest if budget_bytes is not None and alone > budget_bytes else sparing
        self._alone = emit(self._halves, first.graph, first.schedule, 0)
        return forward, backward

    def compile_forward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """A callable that runs the forward."""
        if self._halves is None:  # nothing in it needs a backward
            graph.graph.set_codegen(_BoxedCodeGen())
            graph.recompile()
            return boxed(graph.forward)
        return boxed(self._run_forward)

    def compile_backward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """A callable that runs the backward that belongs to the forward whose mark it is given."""
        return boxed(self._run_backward)

    def _run_forward(self, args: list[Any]) -> Any:
        found = self._step.section_of(self)
        user = self.halves.user_results
        if found is not None:
            plan, section = found
            results = self._step.plans[plan].sections[section].forward.forward(args)
            return [*results[:user], Mark(plan, section).write(), *results[user:]]
        assert self._alone is not None, "planned alone when it was compiled"
        given = storages_of(args)
        results = self._alone.forward.forward(args)
        mark = Mark(None, len(self._step.watched)).write()
        run = _Run(
            drawn=self.drawn,
            given=given,
            made=storages_of(results[:user]),
            graph=self,
            mark=StorageWeakRef(mark.untyped_storage()),
        )
        self._step.watched.append(run)
        return [*results[:user], mark, *results[user:]]

    def _run_backward(self, args: list[Any]) -> Any:
        refuse_graphs_of_the_backward()
        plan, section = Mark.read(args.pop(0))
        if plan is not None:
            return _backward(self._step.plans[plan].sections[section])(args)
        assert self._alone is not None, "planned alone when it was compiled"
        run = self._step.watched[section] if section < len(self._step.watched) else None
        tangents = storages_of(args[len(args) - len(self.halves.tangents) :])
        gradients = _backward(self._alone)(args)
        if run is not None and run.graph is self:
            run.tangents, run.gradients, run.waiting = tangents, storages_of(gradients), False
            torch.autograd.Variable._execution_engine.queue_callback(self._step.look)
        return gradients


def _backward(planned: Planned) -> Callable[[list[Any]], Any]:
    assert planned.backward is not None, "only a forward with a backward leaves a mark"
    backward: Callable[[list[Any]], Any] = planned.backward.forward
    return backward


# Graphs -----------------------------------------------------------------------------------------------


def _drawn(halves: Halves, static: frozenset[int]) -> Drawn:
    """What a captured graph does, read off its nodes."""
    assert halves.backward is not None, "only graphs with a backward are cut"
    given = list(halves.forward.graph.find_nodes(op="placeholder"))
    device = next(
        (str(tensor.device) for node in given for tensor in tensors_in(node.meta.get("val"))), "cpu"
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

    came = residents(given, lambda position: Role.PARAMETER if position in static else Role.BATCH)
    tangents = residents(halves.tangents, lambda _: Role.BATCH)
    in_forward, in_backward = halves.ops
    for phase, nodes in ((Phase.FORWARD, in_forward), (Phase.BACKWARD, in_backward)):
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
            builder.add_op(node.target, args, kwargs, node.meta.get("val"), phase=phase, module=_module(node))
    made = _values(builder, _results(halves.forward)[: halves.user_results])
    gradients = _values(builder, _results(halves.backward))
    graph = builder.finish(value for value in (*made, *gradients) if value is not None)
    return Drawn(graph, came, made, tangents, gradients)


def _with_others_between(graph: Graph, others_bytes: int) -> Graph:
    """`graph` with an op between its forward and its backward that takes `others_bytes` while it runs."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    others = between_graphs("lowtide.other_graphs", Phase.FORWARD, workspace_bytes=others_bytes)
    ops = (*forward, others, *graph.ops[len(forward) :])
    return replace(graph, ops=tuple(replace(op, id=position) for position, op in enumerate(ops)))


def _results(half: fx.GraphModule) -> list[Any]:
    (output,) = half.graph.find_nodes(op="output")
    return list(output.args[0])


def _values(builder: GraphBuilder, nodes: Sequence[Any]) -> tuple[int | None, ...]:
    fakes = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]
    return tuple(builder.value_of(fake) if isinstance(fake, torch.Tensor) else None for fake in fakes)


def _module(node: fx.Node) -> str:
    """The path of the innermost module that `node` belongs to, as Dynamo knows it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
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
