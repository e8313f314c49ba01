"""Schedules: for one graph alone, and for all graphs of a step, the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowtide.aot.kernels import Kernels
from lowtide.backend.request import Request
from lowtide.compat.ddp import active_wrapper
from lowtide.distributed.agreement import TIMEOUT_SECONDS, agreed, largest
from lowtide.distributed.ddp import with_buckets
from lowtide.errors import InfeasibleBudget
from lowtide.execute.identity import skeleton
from lowtide.fusion.fuse import of_ops
from lowtide.inductor.kinds import kind_of
from lowtide.ir.graph import Graph, Phase, Role, Value
from lowtide.ir.recomputable import between_graphs
from lowtide.ir.simulate import simulate
from lowtide.planner.promise import safe_peak_bytes
from lowtide.solvers import quickly, solve
from lowtide.solvers.kernels import in_kernels
from lowtide.solvers.method import Scheduler
from lowtide.solvers.refereed import SINGLE_OPS
from lowtide.solvers.solution import GraphSolution
from lowtide.solvers.tiling import best_tiled
from lowtide.text.budget import LOWEST

_OTHERS = "lowtide.other_graphs"
_ONE_GRAPH = (
    "That is the least of one graph; a step of several, where graphs break, needs more. Its least is the "
    'peak under the budget "min".'
)


def planned_alone(graph: Graph, request: Request) -> GraphSolution:
    """A schedule of one graph for a step in which others run that are not known yet.

    Raises:
        InfeasibleBudget: the graph alone needs more than the budget.
    """
    budget_bytes = request.budget_bytes
    sparingly = replace(request, budget_bytes=None, tiles=False, kernels=Kernels.EAGER)
    lowest = solved_by_all(graph, sparingly)
    if budget_bytes is not None and lowest.peak_bytes > budget_bytes:
        if request.tiles:
            lowest = solved_by_all(graph, replace(sparingly, tiles=True))
            if lowest.peak_bytes <= budget_bytes:
                return lowest
        running = lowest.timeline.peak_op
        needed_by = "what is always there" if running is None else running.label
        advice = f"{SINGLE_OPS} {_ONE_GRAPH}"
        raise InfeasibleBudget(lowest.method, budget_bytes, lowest.peak_bytes, needed_by, advice)
    # Other graphs will need about as much while this one waits, and what it keeps is there beside that.
    sparing = solved_by_all(_with_others_between(graph, lowest.timeline.growth_bytes), sparingly)
    alone = simulate(without_others(sparing.graph), sparing.schedule).peak_bytes
    return lowest if budget_bytes is not None and alone > budget_bytes else sparing


def solved_by_all(graph: Graph, request: Request) -> GraphSolution:
    """A schedule for `graph`; inside a DistributedDataParallel the one that its first rank finds."""
    if active_wrapper() is None:
        return _solved(graph, request)
    facts = {"a graph": skeleton(graph), "a budget of": str(request.budget_bytes)}
    solution = agreed(lambda: _solved(graph, request), facts, TIMEOUT_SECONDS)
    assert isinstance(solution, GraphSolution)
    return solution


def with_others(graph: Graph, elsewhere_bytes: int = 0) -> Graph:
    """With everything else that is allocated on CUDA when a step begins: states of the optimizer, say.

    On the CPU that is not known, but for the parameters that other graphs were given (`elsewhere_bytes`), and
    the buckets of a DistributedDataParallel that is running. Its ranks share a plan, so what counts is the
    one that holds most.
    """
    wrapper = active_wrapper()
    if not graph.device.startswith("cuda"):
        graph = _with(graph, elsewhere_bytes, "parameters of other graphs") if elsewhere_bytes else graph
        return graph if wrapper is None else with_buckets(graph, wrapper.module)
    known = sum(graph.counted_bytes(value) for value in graph.resident)
    others = max(0, torch.cuda.memory_allocated(graph.device) - known)
    if wrapper is not None:
        others = largest(others, TIMEOUT_SECONDS)
    return _with(graph, others, "other tensors")


def _with(graph: Graph, others_bytes: int, name: str) -> Graph:
    value = Value(len(graph.values), others_bytes, Role.OPTIMIZER_STATE, name, device=graph.device)
    return replace(graph, values=(*graph.values, value))


def without_others(graph: Graph) -> Graph:
    """`graph` where nothing else takes memory between its forward and its backward; its schedules stay."""
    ops = (replace(op, workspace_bytes=0) if op.target == _OTHERS else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def _with_others_between(graph: Graph, others_bytes: int) -> Graph:
    """`graph` with an op between its forward and its backward that takes `others_bytes` while it runs."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    others = between_graphs(_OTHERS, Phase.FORWARD, workspace_bytes=others_bytes)
    ops = (*forward, others, *graph.ops[len(forward) :])
    return replace(graph, ops=tuple(replace(op, id=position) for position, op in enumerate(ops)))


def _solved(graph: Graph, request: Request) -> GraphSolution:
    return _solved_by(request.method, _in_slices(graph, request) if request.tiles else graph, request)


def _in_slices(graph: Graph, request: Request) -> Graph:
    """`graph`, or the best of it with regions in slices. Which that is, a quick search tells."""
    quick = quickly(request.method)

    def solved(sliced: Graph) -> GraphSolution | None:
        try:
            return _solved_by(quick, sliced, request)
        except InfeasibleBudget:
            return None

    found = best_tiled(
        graph,
        lambda sliced: request.kernels.with_costs(sliced) if request.profile else sliced,
        solved,
        lambda sliced: solve(sliced, quick, LOWEST),
        is_lowest=request.budget_bytes is None,
    )
    return graph if found is None else of_ops(found.graph)


def _solved_by(method: str | Scheduler, graph: Graph, request: Request) -> GraphSolution:
    """A schedule of a graph, or of the kernels that it is compiled to."""
    if request.kernels is Kernels.EAGER:
        return _best(method, graph, request)
    return in_kernels(graph, kind_of, lambda kernels: _best(method, kernels, request))


def _best(method: str | Scheduler, graph: Graph, request: Request) -> GraphSolution:
    if request.budget_bytes is None:
        return solve(graph, method, LOWEST)
    resident = sum(graph.counted_bytes(value) for value in graph.resident)
    return solve(graph, method, safe_peak_bytes(request.budget_bytes, resident, graph.device))
