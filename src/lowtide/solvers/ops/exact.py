"""Every recomputation weighed against every other, by integer programming: the yardstick for small graphs.

After Checkmate (Jain et al., arXiv 1910.02653). A step is cut into stages, one for each op: stage u runs some
of the ops before u again, in graph order and each at most once, and ends with the first run of op u. Bytes
are counted as the referee counts them: with workspaces and rounding, all outputs of an op at once, each
value freed right after its last use.

    run   does op k run in stage u?      always for k = u
    gap   is a value held from one moment at which an op may touch it to the next?

An op runs only if what it reads is held; what is held after a moment was held before it, or is made in it;
and what is held while an op runs, with what it makes and its workspace, fits. There is no variable for a
free, in Checkmate a product of two others: a gap that is not held says it.

Why are gaps integers? Once the runs are chosen, the least gaps that they need are whole anyway. But told
so, HiGHS is five times as fast on the graphs of benchmarks/planner/training_graphs.py; and with fractions in
sums of bytes it rounded itself into calling graphs infeasible that were not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from lowtide.errors import BadRequest, MissingExtra
from lowtide.ir.bounds import least_peak_bytes
from lowtide.ir.graph import Graph
from lowtide.ir.recomputable import repeatable
from lowtide.ir.schedule import Compute, Free, Schedule, Step, straight
from lowtide.ir.simulate import allocator_of, simulate
from lowtide.solvers.method import Scheduler
from lowtide.solvers.solution import ScheduleAnswer, Status

_MOST_OPS = 120  # thousands of runs, tens of thousands of gaps: seconds, sometimes minutes
_PROVED = 0  # how scipy says that nothing better is left
_FINE = 1000.0  # HiGHS overlooks 1e-6 in a sum: bytes are summed as so many parts of the plain growth

Floats: TypeAlias = npt.NDArray[np.float64]


class Exact(Scheduler):
    """The least time within a budget, or the lowest peak, proved by HiGHS if it is done in time.

    `time_limit` is in seconds, for one answer; a peak may take half of it, the time at that peak what is
    left. When it is over, the best schedule so far is returned, with what is known of the best there is.
    """

    name: ClassVar[str] = "exact"
    minimises: ClassVar[str] = "time within the budget, or the peak"
    complexity: ClassVar[str] = "O(2^(n²))"
    reference: ClassVar[str] = f"Jain et al., arXiv 1910.02653 (Checkmate); at most {_MOST_OPS} ops"
    proves: ClassVar[str] = (
        "if HiGHS is done in time: among schedules that run the ops in graph order and, right before any of "
        "them, earlier ones again, in graph order and each at most once"
    )

    def __init__(self, time_limit: float = 60.0) -> None:
        self.time_limit = time_limit

    def within(self, graph: Graph, budget_bytes: int) -> ScheduleAnswer | None:
        """The schedule that adds the least time of those that peak at `budget_bytes` or less.

        None if there is none, or none was found in time. In a graph without times every run costs the same.

        Raises:
            BadRequest: the graph is too large.
            MissingExtra: scipy is not installed.
        """
        _check(graph)
        plain = straight(graph)
        if simulate(graph, plain).peak_bytes <= budget_bytes:
            return ScheduleAnswer(plain, Status.OPTIMAL)
        if budget_bytes < least_peak_bytes(graph)[0]:
            return None
        return _least_time(graph, _program(graph), budget_bytes, self.time_limit)

    def lowest(self, graph: Graph) -> ScheduleAnswer:
        """The schedule with the lowest peak, and of those the one that adds the least time.

        Raises:
            BadRequest: the graph is too large.
            MissingExtra: scipy is not installed.
        """
        _check(graph)
        started = time.perf_counter()
        plain = straight(graph)
        if simulate(graph, plain).peak_bytes == least_peak_bytes(graph)[0]:
            return ScheduleAnswer(plain, Status.OPTIMAL)
        program = _program(graph)
        lowest = _least_peak(graph, program, self.time_limit / 2)
        peak_bytes = simulate(graph, lowest.schedule).peak_bytes
        left = max(0.0, self.time_limit - (time.perf_counter() - started))
        cheapest = _least_time(graph, program, peak_bytes, left)
        if cheapest is None:
            return replace(lowest, status=Status.FEASIBLE)
        return cheapest if lowest.status is Status.OPTIMAL else replace(cheapest, status=Status.FEASIBLE)


def _check(graph: Graph) -> None:
    if len(graph.ops) > _MOST_OPS:
        raise BadRequest(
            f"exact weighs every recomputation against every other, and {graph.name} has {len(graph.ops)} "
            f"ops; it takes at most {_MOST_OPS}. Use evict, which takes a graph of any size."
        )
    if find_spec("scipy") is None:
        raise MissingExtra("scipy", "exact", "the method exact")


# What there is to choose -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Moment:
    """Op `op` may run in stage `stage`; the variable `run` says whether it does."""

    stage: int
    op: int
    run: int


Sum: TypeAlias = list[tuple[int, float]]  # variables and their factors

# Why a variable that is one? So that an op's first run and one that is to be chosen are written alike.
_ONE, _ROOM, _FIRST_RUN = range(3)


@dataclass(frozen=True, slots=True)
class _Program:
    """Variables that are 0 or 1, and sums of them that must not exceed 0.

    The first is one. The second alone may lie between: it is the room for all that is not resident, as a
    part of `growth_bytes`, which the step takes if nothing runs again. Then come `runs`, and then the gaps.
    """

    moments: Sequence[_Moment]
    sums: Sequence[Sum]
    runs: int
    variables: int
    growth_bytes: int
    resident_bytes: int


def _program(graph: Graph) -> _Program:
    """What has to hold of a schedule of `graph`."""
    timeline = simulate(graph, straight(graph))
    scale = _FINE / max(timeline.growth_bytes, 1)
    held, ops = allocator_of(graph.device).held, graph.ops
    moments = _moments(graph)
    when: dict[int, list[int]] = {}
    for position, moment in enumerate(moments):
        when.setdefault(moment.op, []).append(position)
    live = [[(_ROOM, -_FINE), (moment.run, scale * ops[moment.op].workspace_bytes)] for moment in moments]
    logic: list[Sum] = []
    runs = sum(moment.run != _ONE for moment in moments)
    variables = _FIRST_RUN + runs
    for value, maker in graph.creator.items():
        size = scale * held(graph.counted_bytes(value))
        uses = {use for op in graph.readers.get(value, ()) if op != maker for use in when[op]}
        if value in graph.outputs:
            uses.add(len(moments))  # it is asked for when all is over
        source: Sum = []  # what allows the value to be there
        touches = sorted(uses.union(when[maker]))
        for here, there in zip(touches, [*touches[1:], len(moments)], strict=True):
            run = moments[here].run if here < len(moments) else _ONE
            if here in uses:
                logic.append([(run, 1.0), *source])
            else:
                live[here].append((run, size))
                source = [*source, (run, -1.0)]
            if here >= max(uses, default=0):  # nobody will ask for it
                source = []
                continue
            gap, variables = variables, variables + 1
            logic.append([(gap, 1.0), *source])
            for sum_of_bytes in live[here + 1 : there + 1]:
                sum_of_bytes.append((gap, size))
            source = [(gap, -1.0)]
    growth_bytes, resident_bytes = max(timeline.growth_bytes, 1), timeline.resident_bytes
    return _Program(moments, [*logic, *live], runs, variables, growth_bytes, resident_bytes)


def _moments(graph: Graph) -> tuple[_Moment, ...]:
    """When ops may run, in order: in each stage those that may run again and be of use, then its own."""
    may_repeat = repeatable(graph)
    latest = list(range(len(graph.ops)))  # the last stage that can make use of each op
    for op in reversed(graph.ops):
        readers = {reader for value in op.creates for reader in graph.readers.get(value, ())} - {op.id}
        latest[op.id] = max((latest[r] if r in may_repeat else r for r in readers), default=op.id)
    found: list[_Moment] = []
    runs = 0
    for stage in graph.ops:
        for earlier in graph.ops[: stage.id]:
            may_run = earlier.id in may_repeat and earlier.section == stage.section
            if may_run and stage.id <= latest[earlier.id]:
                found.append(_Moment(stage.id, earlier.id, _FIRST_RUN + runs))
                runs += 1
        found.append(_Moment(stage.id, stage.id, _ONE))
    return tuple(found)


# Choosing --------------------------------------------------------------------------------------------


def _least_peak(graph: Graph, program: _Program, time_limit: float) -> ScheduleAnswer:
    plain = straight(graph)
    costs = np.zeros(program.variables)
    costs[_ROOM] = 1.0
    bounds = least_peak_bytes(graph)[0], simulate(graph, plain).peak_bytes
    found = _minimised(program, costs, bounds, time_limit)
    if found.x is None:
        return ScheduleAnswer(plain, Status.FEASIBLE)
    return ScheduleAnswer(_decoded(graph, program, found.x), _status(found))


def _least_time(
    graph: Graph, program: _Program, budget_bytes: int, time_limit: float
) -> ScheduleAnswer | None:
    seconds = np.array([graph.ops[moment.op].seconds for moment in program.moments if moment.run != _ONE])
    is_timed = bool(seconds.any())
    unit_seconds = seconds.mean() if is_timed else 1.0  # HiGHS stops within 1e-6 of the least
    costs = np.zeros(program.variables)
    costs[_FIRST_RUN : _FIRST_RUN + program.runs] = seconds / unit_seconds if is_timed else 1.0
    found = _minimised(program, costs, (budget_bytes, budget_bytes), time_limit)
    if found.x is None:
        return None
    least_seconds = max(0.0, float(found.mip_dual_bound * unit_seconds)) if is_timed else 0.0
    schedule = _decoded(graph, program, found.x)
    excess_bytes = simulate(graph, schedule).peak_bytes - budget_bytes
    if excess_bytes <= 0:
        return ScheduleAnswer(schedule, _status(found), least_seconds)
    # HiGHS overlooked these few bytes: a little less room, then, and no claim of a proof.
    tighter = _least_time(graph, program, budget_bytes - excess_bytes, time_limit)
    return tighter and ScheduleAnswer(tighter.schedule, Status.FEASIBLE, least_seconds)


def _status(found: Any) -> Status:
    return Status.OPTIMAL if found.status == _PROVED else Status.FEASIBLE


def _minimised(program: _Program, costs: Floats, peak_bytes: tuple[int, int], time_limit: float) -> Any:
    """What HiGHS finds, as scipy's OptimizeResult, with the peak between these bounds."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # half a second to import
    from scipy.sparse import csr_array

    rows = [row for row, terms in enumerate(program.sums) for _ in terms]
    columns = [variable for terms in program.sums for variable, _ in terms]
    factors = [factor for terms in program.sums for _, factor in terms]
    matrix = csr_array((factors, (rows, columns)), shape=(len(program.sums), program.variables))
    lower, upper = np.zeros(program.variables), np.ones(program.variables)
    lower[_ONE] = 1.0
    lower[_ROOM], upper[_ROOM] = (np.array(peak_bytes) - program.resident_bytes) / program.growth_bytes
    integers = np.ones(program.variables)
    integers[_ROOM] = 0
    return milp(
        costs,
        integrality=integers,
        bounds=Bounds(lower, upper),
        constraints=LinearConstraint(matrix, ub=0.0),
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )


def _decoded(graph: Graph, program: _Program, chosen: Floats) -> Schedule:
    """The runs that were chosen, less those of no use; every value freed after its last use."""
    steps: list[Step] = []
    wanted = set(graph.outputs)  # what is read later, before it is made again
    for moment in reversed(program.moments):
        op = graph.ops[moment.op]
        if chosen[moment.run] < 0.5 or (moment.run != _ONE and wanted.isdisjoint(op.creates)):
            continue
        touched = {*op.reads, *op.mutates, *op.creates}.intersection(graph.creator)
        steps.extend(Free(value) for value in sorted(touched - wanted, reverse=True))
        steps.append(Compute(op.id))
        wanted = (wanted | touched).difference(op.creates)
    return Schedule(tuple(reversed(steps)))
