"""The methods by name, and the one door to them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import cache

from lowtide.chain import Chain
from lowtide.errors import BadRequest, InfeasibleBudget, LowtideError, UnknownMethod
from lowtide.plans import Plan
from lowtide.simulation import Timeline
from lowtide.solution import Solution
from lowtide.solvers.baselines import KeepAll
from lowtide.solvers.method import Method
from lowtide.units import parse_bytes
from lowtide.unrolling import replay

_METHODS: tuple[type[Method], ...] = (KeepAll,)


@cache
def methods() -> Mapping[str, type[Method]]:
    """Every method by its name, in the order in which tables show them."""
    return {method.name: method for method in _METHODS}


class SolverMistake(LowtideError):
    """A method claimed what the referee does not find. A bug in lowtide: please report it."""


def solve(chain: Chain, method: str | Method = "hong-linear", budget: str | int | None = None) -> Solution:
    """Choose what to recompute in `chain`; the plan has been replayed by the referee.

    Without a budget the method minimises what it minimises, most often the peak; where several plans
    reach the same, the one that recomputes least is returned. With a budget, in bytes or as a part of
    the plain peak ('60%'), it adds the least time within it: `solution.peak_bytes <= budget`.

    `method` is a name or, to set its options, a method: `solve(chain, EveryK(k=3))`.

    Raises:
        UnknownMethod: there is no method of that name.
        InfeasibleBudget: no plan of this method fits.
        BadRequest: the method takes no budget, or needs to know more than the chain tells.
    """
    chosen = _method(method)
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
    if isinstance(budget, str) and budget.strip().endswith("%"):
        return _part(budget, replay(chain, Plan()).peak_bytes)
    return parse_bytes(budget)


def _part(text: str, plain_peak_bytes: int) -> int:
    try:
        part = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        part = math.nan
    if not 0 < part < math.inf:
        raise BadRequest(
            f"cannot read '{text}' as a part of the plain peak. Write a budget such as 60% or 8GiB."
        )
    return int(part * plain_peak_bytes)


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
