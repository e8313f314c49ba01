"""A captured graph, solved: whatever the method answers is replayed before anyone sees it."""

from __future__ import annotations

import time
from dataclasses import replace

from lowtide.errors import BadRequest, InfeasibleBudget, LowtideError
from lowtide.ir.bounds import least_peak_bytes
from lowtide.ir.graph import Graph, Origin
from lowtide.ir.keep import keep_only
from lowtide.ir.schedule import Schedule, straight
from lowtide.ir.simulate import Timeline, simulate
from lowtide.solvers.method import GraphMethod, Scheduler
from lowtide.solvers.solution import GraphSolution, ScheduleAnswer, Status
from lowtide.text.budget import Budget
from lowtide.tiles.blocks import contracted

SINGLE_OPS = (
    "Raise the budget to at least that, or shrink the batch. Recomputation cannot go below what a single op "
    "needs at once: train in a smaller type (autocast), or split that op, to need less there."
)


class SolverMistake(LowtideError):
    """A method claimed what the referee does not find. A bug in lowtide: please report it."""


def solve_graph(graph: Graph, method: GraphMethod | Scheduler, budget: Budget) -> GraphSolution:
    """What `method` makes of `graph`, replayed; see `lowtide.solve`."""
    if graph.origin is Origin.EAGER:
        raise BadRequest(
            f"{graph.name} is an {graph.origin} graph: it says what a step did, and its ops cannot be "
            "rearranged. Capture the model (`lowtide.capture`) and solve that graph, or build a chain."
        )
    if isinstance(method, Scheduler):
        return _scheduled(graph, method, budget)
    if budget.is_given:
        raise BadRequest(
            f"{method.name} takes no budget on a graph: it minimises {method.minimises}. "
            "Leave the budget out, or choose a method that takes one."
        )
    started = time.perf_counter()
    blocks = contracted(graph)
    answer = method.choose_kept(blocks.graph)
    schedule = blocks.expanded(keep_only(blocks.graph, answer.kept))
    return _replayed(
        graph,
        method.name,
        ScheduleAnswer(schedule, answer.status),
        planning_seconds=time.perf_counter() - started,
        objective_bytes=answer.objective_bytes,
    )


def followed(graph: Graph, plan: GraphSolution) -> GraphSolution:
    """The schedule of `plan`, replayed on another graph of the same ops on the same values.

    Raises:
        IllegalSchedule: the ops are not the same.
    """
    started = time.perf_counter()
    answer = ScheduleAnswer(plan.schedule, Status.FEASIBLE)
    found = _replayed(graph, plan.method, answer, planning_seconds=0.0, budget_bytes=plan.budget_bytes)
    return replace(found, planning_seconds=time.perf_counter() - started)


def _scheduled(graph: Graph, method: Scheduler, budget: Budget) -> GraphSolution:
    """Within the budget; at the lowest peak where there is none."""
    started = time.perf_counter()
    budget_bytes = budget.bytes_of(lambda: simulate(graph, straight(graph)).peak_bytes)
    blocks = contracted(graph)
    answer = (
        method.lowest(blocks.graph) if budget_bytes is None else method.within(blocks.graph, budget_bytes)
    )
    seconds = time.perf_counter() - started
    if answer is None:
        raise _infeasible(graph, method, budget_bytes or 0)
    answer = replace(answer, schedule=blocks.expanded(answer.schedule))
    solution = _replayed(graph, method.name, answer, planning_seconds=seconds, budget_bytes=budget_bytes)
    if budget_bytes is not None and solution.peak_bytes > budget_bytes:
        raise SolverMistake(
            f"{method.name} was given {budget_bytes} bytes for {graph.name}; its schedule peaks at "
            f"{solution.peak_bytes}."
        )
    return solution


def _replayed(
    graph: Graph,
    method: str,
    answer: ScheduleAnswer,
    *,
    planning_seconds: float,
    budget_bytes: int | None = None,
    objective_bytes: int | None = None,
) -> GraphSolution:
    timeline = simulate(graph, answer.schedule)
    solution = GraphSolution(
        graph=graph,
        method=method,
        schedule=answer.schedule,
        status=answer.status,
        peak_bytes=timeline.peak_bytes,
        lower_bound_bytes=least_peak_bytes(graph)[0],
        extra_seconds=extra_seconds(graph, answer.schedule),
        planning_seconds=planning_seconds,
        budget_bytes=budget_bytes,
        least_extra_seconds=answer.least_extra_seconds,
        objective_bytes=objective_bytes,
    )
    vars(solution)["timeline"] = timeline  # as if it had been asked for: who asks finds it
    return solution


def extra_seconds(graph: Graph, schedule: Schedule) -> float:
    """The time of the ops that run again."""
    done: set[int] = set()
    again: list[float] = []
    for op in schedule.computed:
        if op in done:
            again.append(graph.ops[op].seconds)
        done.add(op)
    return sum(again)


def _infeasible(graph: Graph, method: Scheduler, budget_bytes: int) -> InfeasibleBudget:
    """The lowest peak that the method reaches, and the op that is running at it."""
    blocks = contracted(graph)
    timeline: Timeline = simulate(graph, blocks.expanded(method.lowest(blocks.graph).schedule))
    running = timeline.peak_op
    return InfeasibleBudget(
        method.name,
        budget_bytes,
        timeline.peak_bytes,
        "what is always there" if running is None else running.label,
        SINGLE_OPS,
    )
