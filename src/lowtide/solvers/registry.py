"""The methods by name, and the one door to them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import TypeGuard, overload

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan
from lowtide.errors import BadRequest, InfeasibleBudget, UnknownMethod
from lowtide.ir.graph import Graph
from lowtide.solvers.chains.baselines import EveryK, KeepAll
from lowtide.solvers.chains.chen import ChenGreedy, ChenRecursive, ChenSqrt
from lowtide.solvers.chains.exhaustive import Exhaustive
from lowtide.solvers.chains.feng_huang import FengHuang
from lowtide.solvers.chains.hong import HongCubic, HongLinear, HongQuadratic
from lowtide.solvers.chains.rotor import Rotor
from lowtide.solvers.chains.selective import Selective
from lowtide.solvers.chains.worst import worst_moment
from lowtide.solvers.method import (
    About,
    Effort,
    GraphMethod,
    Method,
    Scheduler,
    Searcher,
    effort_named,
)
from lowtide.solvers.ops.auto import Auto
from lowtide.solvers.ops.evict import Evict
from lowtide.solvers.ops.exact import Exact
from lowtide.solvers.refereed import SolverMistake, solve_graph
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.budget import Budget

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

_SCHEDULERS: tuple[type[Scheduler], ...] = (Evict, Exact, Auto)
OPS = "ops"  # auto, where nothing but a plan op by op will do


@cache
def methods() -> Mapping[str, type[Method]]:
    """Every method for chains by its name, in the order in which tables show them."""
    return {method.name: method for method in _METHODS}


@cache
def schedulers() -> Mapping[str, type[Scheduler]]:
    """Every method that schedules a captured graph op by op, by its name."""
    return {method.name: method for method in _SCHEDULERS}


def default_method(budget: Budget) -> str:
    """What plans a model unless told otherwise.

    Within a budget auto, op by op. Without one hong-linear, which finds the least peak of one level of
    layers: nesting goes lower, but for the last per cent it may double the time that is added.
    """
    return "auto" if budget.is_given else "hong-linear"


def refuse_lowest(budget: Budget) -> None:
    """Raise BadRequest if the budget is the lowest peak: for chains, no budget asks for that."""
    if budget.is_lowest:
        raise BadRequest(
            'the budget "min" is for methods that plan op by op (auto). Without a budget, a method for '
            "chains finds the lowest peak that it can."
        )


def is_scheduler(method: str | About) -> TypeGuard[str | Scheduler]:
    """Whether a method, or the one of that name, plans op by op.

    Raises:
        UnknownMethod: there is no method of that name.
    """
    return isinstance(_named(method) if isinstance(method, str) else method, Scheduler)


@overload
def at_effort(method: str, effort: str) -> str | Scheduler: ...


@overload
def at_effort(method: str | Method | Scheduler, effort: str) -> str | Method | Scheduler: ...


def at_effort(method: str | Method | Scheduler, effort: str) -> str | Method | Scheduler:
    """`method`, told how long to search: "full", as it does unless told, or "quick".

    Raises:
        UnknownMethod: there is no method of that name.
        BadRequest: there is no such effort, or the method does not search, or was told before.
    """
    if effort_named(effort) is Effort.FULL:
        return method
    known = schedulers().get(_canonical(method)) if isinstance(method, str) else None
    if known is not None and issubclass(known, Searcher):
        return known(effort)
    name = _named(method).name if isinstance(method, str) else method.name
    searchers = [name for name, other in schedulers().items() if issubclass(other, Searcher)]
    raise BadRequest(
        f"effort says how long a method searches that is given by its name and plans op by op "
        f"({', '.join(searchers)}), and this is {name}. Leave it out, or choose one of these."
    )


def quickly(method: str | Scheduler) -> str | Scheduler:
    """`method`, told to search for a short time; itself if it does not search, or was told before."""
    known = schedulers().get(_canonical(method)) if isinstance(method, str) else None
    return known(Effort.QUICK) if known is not None and issubclass(known, Searcher) else method


@overload
def solve(
    problem: Chain,
    method: str | Method | None = None,
    budget: str | int | None = None,
    *,
    effort: str = Effort.FULL,
) -> Solution: ...


@overload
def solve(
    problem: Graph,
    method: str | Method | Scheduler | None = None,
    budget: str | int | None = None,
    *,
    effort: str = Effort.FULL,
) -> GraphSolution: ...


def solve(
    problem: Chain | Graph,
    method: str | Method | Scheduler | None = None,
    budget: str | int | None = None,
    *,
    effort: str = Effort.FULL,
) -> Solution | GraphSolution:
    """Choose what to recompute, in a chain or in a captured graph; the plan has been replayed by the referee.

    Without a budget the method minimises what it minimises, most often the peak; where several plans
    reach the same, the one that recomputes least is returned. With a budget, in bytes or as a part of
    the plain peak ('60%'), it adds the least time within it: `solution.peak_bytes <= budget`.

    `method` is a name or, to set its options, a method: `solve(chain, EveryK(k=3))`.

    On a graph, schedulers ("auto" unless told) decide op by op. Without a budget, or with "min", they find
    the lowest peak that they can, and then the least time at that peak. Some of the methods for chains take
    a graph as well, and no budget. With `effort` "quick" auto and evict search four times as fast; their
    plans are within the budget all the same and add a little more time.

    Raises:
        UnknownMethod: there is no method of that name.
        InfeasibleBudget: no plan of this method fits.
        BadRequest: the method takes no budget, no graph or no effort, or needs to know more than the chain
            tells.
    """
    if isinstance(problem, Graph):
        chosen = at_effort("auto" if method is None else method, effort)
        return solve_graph(problem, _for_graph(problem, chosen), Budget.of_a_peak(budget))
    if not isinstance(problem, Chain):
        raise BadRequest(
            f"solve takes a Chain or a Graph, not a {type(problem).__name__}. "
            "Make a chain from sizes with Chain.from_sizes, or plan a model with lowtide.plan."
        )
    chosen = at_effort("hong-linear" if method is None else method, effort)
    return _solve_chain(problem, _for_chain(chosen), Budget.of_a_peak(budget))


def _solve_chain(chain: Chain, chosen: Method, budget: Budget) -> Solution:
    budget_bytes = _budget_bytes(chain, chosen, budget)
    started = time.perf_counter()
    answer = chosen.choose(chain, budget_bytes)
    planning_seconds = time.perf_counter() - started
    if answer is None:
        raise _infeasible(chain, chosen, budget_bytes or 0)
    worst = worst_moment(chain, answer.plan)
    if answer.peak_bytes is not None and answer.peak_bytes != worst.peak_bytes:
        raise SolverMistake(
            f"{chosen.name} says that {answer.plan} peaks at {answer.peak_bytes} bytes; replayed it peaks at "
            f"{worst.peak_bytes}."
        )
    if budget_bytes is not None and worst.peak_bytes > budget_bytes:
        raise SolverMistake(
            f"{chosen.name} was given {budget_bytes} bytes; its plan {answer.plan} peaks at "
            f"{worst.peak_bytes}."
        )
    return Solution(
        chain=chain,
        method=chosen.name,
        plan=answer.plan,
        status=answer.status,
        peak_bytes=worst.peak_bytes,
        lower_bound_bytes=chain.floor()[0],
        extra_seconds=answer.plan.extra_seconds(chain),
        planning_seconds=planning_seconds,
        budget_bytes=budget_bytes,
        objective_bytes=answer.objective_bytes,
    )


def _for_chain(method: str | About) -> Method:
    if isinstance(method, str):
        method = _named(method)
    if not isinstance(method, Method):
        raise BadRequest(
            f"{method.name} takes a captured graph, and this is a chain. "
            f"These take a chain: {', '.join(methods())}."
        )
    return method


def _for_graph(graph: Graph, method: str | About) -> GraphMethod | Scheduler:
    if isinstance(method, str):
        method = _named(method)
    if not isinstance(method, GraphMethod | Scheduler):
        able = [name for name, other in methods().items() if issubclass(other, GraphMethod)]
        raise BadRequest(
            f"{method.name} takes a chain, and {graph.name} is a graph. "
            f"These take a graph: {', '.join([*schedulers(), *able])}."
        )
    return method


def _named(name: str) -> About:
    known: dict[str, type[About]] = {**methods(), **schedulers()}
    if _canonical(name) not in known:
        raise UnknownMethod(name, [*known, OPS])
    return known[_canonical(name)]()


def _canonical(name: str) -> str:
    return Auto.name if name == OPS else name


def _budget_bytes(chain: Chain, method: Method, budget: Budget) -> int | None:
    if budget.is_given and not method.takes_budget:
        able = [name for name, other in methods().items() if other.takes_budget]
        raise BadRequest(
            f"{method.name} takes no budget: it minimises {method.minimises}. These do: {', '.join(able)}."
        )
    refuse_lowest(budget)
    return budget.bytes_of(lambda: worst_moment(chain, Plan()).peak_bytes)


def _infeasible(chain: Chain, method: Method, budget_bytes: int) -> InfeasibleBudget:
    """The least peak the method reaches, and the layer that is running at it."""
    least = method.choose(chain, None)
    worst = worst_moment(chain, Plan() if least is None else least.plan)
    return InfeasibleBudget(method.name, budget_bytes, worst.peak_bytes, worst.module)
