"""The methods by name, and the one door to them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import overload

from lowtide.chain import Chain
from lowtide.errors import BadRequest, InfeasibleBudget, LowtideError, UnknownMethod
from lowtide.graph import Graph, Op, Origin
from lowtide.keeping import keep_only
from lowtide.plans import Plan
from lowtide.schedule import Compute
from lowtide.simulation import Timeline, allocator_of, simulate
from lowtide.solution import GraphSolution, Solution
from lowtide.solvers.baselines import EveryK, KeepAll
from lowtide.solvers.chen import ChenGreedy, ChenRecursive, ChenSqrt
from lowtide.solvers.exhaustive import Exhaustive
from lowtide.solvers.feng_huang import FengHuang
from lowtide.solvers.hong import HongCubic, HongLinear, HongQuadratic
from lowtide.solvers.method import GraphMethod, Method
from lowtide.solvers.rotor import Rotor
from lowtide.solvers.selective import Selective
from lowtide.units import parse_budget
from lowtide.unrolling import replay

_METHODS: tuple[type[Method], ...] = (
    KeepAll,
    EveryK,
    Selective,
    ChenSqrt,
    ChenGreedy,
    ChenRecursive,
    FengHuang,
    HongLinear,
    HongQuadratic,
    HongCubic,
    Rotor,
    Exhaustive,
)


@cache
def methods() -> Mapping[str, type[Method]]:
    """Every method by its name, in the order in which tables show them."""
    return {method.name: method for method in _METHODS}


def default_method(budget: str | int | None) -> str:
    """What plans unless told otherwise.

    Within a budget rotor, for it adds the least time. Without one hong-linear, which finds the least peak
    of one level: nesting goes lower, but for the last per cent it may double the time that is added.
    """
    return "hong-linear" if budget is None else "rotor"


class SolverMistake(LowtideError):
    """A method claimed what the referee does not find. A bug in lowtide: please report it."""


@overload
def solve(
    problem: Chain, method: str | Method = "hong-linear", budget: str | int | None = None
) -> Solution: ...


@overload
def solve(problem: Graph, method: str | Method) -> GraphSolution: ...


def solve(
    problem: Chain | Graph, method: str | Method = "hong-linear", budget: str | int | None = None
) -> Solution | GraphSolution:
    """Choose what to recompute in a chain; the plan has been replayed by the referee.

    Without a budget the method minimises what it minimises, most often the peak; where several plans
    reach the same, the one that recomputes least is returned. With a budget, in bytes or as a part of
    the plain peak ('60%'), it adds the least time within it: `solution.peak_bytes <= budget`.

    `method` is a name or, to set its options, a method: `solve(chain, EveryK(k=3))`.

    Some methods take a captured graph in place of a chain, and no budget. The solution then has a
    schedule, replayed too.

    Raises:
        UnknownMethod: there is no method of that name.
        InfeasibleBudget: no plan of this method fits.
        BadRequest: the method takes no budget, or no graph, or needs to know more than the chain tells.
    """
    chosen = _method(method)
    if isinstance(problem, Graph):
        return _solve_graph(problem, chosen, budget)
    if not isinstance(problem, Chain):
        raise BadRequest(
            f"solve takes a Chain or a Graph, not a {type(problem).__name__}. "
            "Make a chain from sizes with Chain.from_sizes, or plan a model with lowtide.plan."
        )
    return _solve_chain(problem, chosen, budget)


def _solve_chain(chain: Chain, chosen: Method, budget: str | int | None) -> Solution:
    budget_bytes = None if budget is None else _budget(chain, chosen, budget)
    started = time.perf_counter()
    answer = chosen.choose(chain, budget_bytes)
    planning_seconds = time.perf_counter() - started
    if answer is None:
        raise _infeasible(chain, chosen, budget_bytes or 0)
    timeline = replay(chain, answer.plan)
    if answer.peak_bytes is not None and answer.peak_bytes != timeline.peak_bytes:
        raise SolverMistake(
            f"{chosen.name} says that {answer.plan} peaks at {answer.peak_bytes} bytes; replayed it peaks at "
            f"{timeline.peak_bytes}."
        )
    if budget_bytes is not None and timeline.peak_bytes > budget_bytes:
        raise SolverMistake(
            f"{chosen.name} was given {budget_bytes} bytes; its plan {answer.plan} peaks at "
            f"{timeline.peak_bytes}."
        )
    return Solution(
        chain=chain,
        method=chosen.name,
        plan=answer.plan,
        status=answer.status,
        peak_bytes=timeline.peak_bytes,
        lower_bound_bytes=chain.floor()[0],
        extra_seconds=answer.plan.extra_seconds(chain),
        planning_seconds=planning_seconds,
        budget_bytes=budget_bytes,
        objective_bytes=answer.objective_bytes,
    )


def _solve_graph(graph: Graph, chosen: Method, budget: str | int | None) -> GraphSolution:
    if not isinstance(chosen, GraphMethod):
        able = [name for name, other in methods().items() if issubclass(other, GraphMethod)]
        raise BadRequest(
            f"{chosen.name} takes a chain, and {graph.name} is a graph. "
            f"These take a graph: {', '.join(able)}."
        )
    if graph.origin is not Origin.JOINT:
        raise BadRequest(
            f"{graph.name} is an {graph.origin} graph: it says what a step did, and its ops cannot be "
            "rearranged. Capture the model (`lowtide.capture`) and solve that graph, or build a chain."
        )
    if budget is not None:
        raise BadRequest(
            f"{chosen.name} takes no budget on a graph: it minimises {chosen.minimises}. "
            "Leave the budget out, or build a chain and choose a method that takes one."
        )
    started = time.perf_counter()
    answer = chosen.choose_kept(graph)
    planning_seconds = time.perf_counter() - started
    schedule = keep_only(graph, answer.kept)
    computed = sum(graph.ops[step.op].seconds for step in schedule if isinstance(step, Compute))
    return GraphSolution(
        graph=graph,
        method=chosen.name,
        kept=answer.kept,
        schedule=schedule,
        status=answer.status,
        peak_bytes=simulate(graph, schedule).peak_bytes,
        lower_bound_bytes=_largest_working_set(graph),
        extra_seconds=computed - sum(op.seconds for op in graph.ops),
        planning_seconds=planning_seconds,
        objective_bytes=answer.objective_bytes,
    )


def _largest_working_set(graph: Graph) -> int:
    """What is resident, and what the op that needs most needs beside it."""
    held = allocator_of(graph.device).held

    def needed(op: Op) -> int:
        touched = {*op.reads, *op.mutates, *op.creates} - set(graph.resident)
        return op.workspace_bytes + sum(held(graph.counted_bytes(value)) for value in touched)

    resident_bytes = sum(held(graph.counted_bytes(value)) for value in graph.resident)
    return resident_bytes + max(map(needed, graph.ops), default=0)


def _method(method: str | Method) -> Method:
    if isinstance(method, Method):
        return method
    if method not in methods():
        raise UnknownMethod(method, methods())
    return methods()[method]()


def _budget(chain: Chain, method: Method, budget: str | int) -> int:
    if not method.takes_budget:
        able = [name for name, other in methods().items() if other.takes_budget]
        raise BadRequest(
            f"{method.name} takes no budget: it minimises {method.minimises}. These do: {', '.join(able)}."
        )
    is_part = str(budget).strip().endswith("%")  # long chains take long to replay: only if it is needed
    return parse_budget(budget, replay(chain, Plan()).peak_bytes if is_part else 0)


def _infeasible(chain: Chain, method: Method, budget_bytes: int) -> InfeasibleBudget:
    """The least peak the method reaches, and the layer that is running at it."""
    least = method.choose(chain, None)
    timeline: Timeline = replay(chain, Plan() if least is None else least.plan)
    running = timeline.peak_op
    return InfeasibleBudget(
        method.name,
        budget_bytes,
        timeline.peak_bytes,
        "what is always there" if running is None else running.module,
    )
