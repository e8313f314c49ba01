"""What a method answers, and what is known about the answer once the referee has seen it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan
from lowtide.chain.unroll import replay
from lowtide.ir.graph import Graph, Phase
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import Timeline, simulate
from lowtide.solvers.chain_summary import explained_chain
from lowtide.solvers.summary import explained


class Status(StrEnum):
    """How good a plan is known to be, for what its method minimises."""

    OPTIMAL = "optimal"  # proved: no plan of the method's class does better
    FEASIBLE = "feasible"  # a plan, with no proof that there is none better


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method hands to the referee.

    `peak_bytes` is what the method believes the plan peaks at, where it has a formula for that: if the
    replay disagrees, the method has a bug. `objective_bytes` is what it minimised, where that is
    something else (the textbook sum).
    """

    plan: Plan
    status: Status
    peak_bytes: int | None = None
    objective_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GraphAnswer:
    """What a method hands to the referee for a graph: the forward's values to keep, and what it minimised."""

    kept: frozenset[int]
    status: Status
    objective_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ScheduleAnswer:
    """What a scheduler hands to the referee: what runs when.

    `least_extra_seconds` is what recomputation must add in any schedule within the budget; 0.0 says nothing.
    """

    schedule: Schedule
    status: Status
    least_extra_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A dry run of the model with the plan applied: what the step will really do."""

    peak_bytes: int
    recomputed_ops: int
    extra_seconds: float
    plain_peak_bytes: int
    plain_seconds: float


@dataclass(frozen=True)
class Solution:
    """A plan for a chain that the referee has replayed.

    `peak_bytes` is what the replay counted, `lower_bound_bytes` what no plan at all could undercut,
    `extra_seconds` what recomputation adds to a step that takes `chain.seconds` without it.
    `confirmation` is there where there is a model. `remark` says why it is no plan of the whole step op by
    op, where one was wanted, and what is left alone because it cannot be run again.
    """

    chain: Chain
    method: str
    plan: Plan
    status: Status
    peak_bytes: int
    lower_bound_bytes: int
    extra_seconds: float
    planning_seconds: float
    budget_bytes: int | None = None
    objective_bytes: int | None = None
    confirmation: Confirmation | None = field(default=None)
    remark: str = ""

    def __str__(self) -> str:
        return explained_chain(self)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The tensors that are kept as places to start again from, as the literature numbers them."""
        return self.plan.checkpoints

    @property
    def extra_seconds_ratio(self) -> float:
        """Time added by recomputation, as a part of the plain step."""
        return self.extra_seconds / self.chain.seconds if self.chain.seconds else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The replay, moment by moment."""
        return replay(self.chain, self.plan)


@dataclass(frozen=True)
class GraphSolution:
    """A schedule for a graph that the referee has replayed.

    `peak_bytes` is what the replay counted; `lower_bound_bytes` is what any schedule of these ops holds at
    some moment. `extra_seconds` is the time of the ops that run again, zero if the graph was not profiled,
    and `least_extra_seconds` what no schedule within the budget can do without, as far as is known.
    `plain_peak_bytes` is what the step holds as the user wrote it, where there is a model.
    `fingerprint`, `inputs` and `torch_version` tell which model, batch and torch it is for; empty: any.
    `remark` says what of the step could not be planned, where all of it was wanted.
    """

    graph: Graph = field(repr=False)  # thousands of ops
    method: str
    schedule: Schedule = field(repr=False)
    status: Status
    peak_bytes: int
    lower_bound_bytes: int
    extra_seconds: float
    planning_seconds: float
    budget_bytes: int | None = None
    least_extra_seconds: float = 0.0
    objective_bytes: int | None = None
    plain_peak_bytes: int | None = None
    fingerprint: str = ""
    inputs: tuple[str, ...] = ()
    torch_version: str = ""
    remark: str = ""

    def __str__(self) -> str:
        return explained(self)

    @cached_property
    def recomputed(self) -> Mapping[int, int]:
        """The ops that run more than once, and how often they run again."""
        runs = Counter(self.schedule.computed)
        return {op: count - 1 for op, count in sorted(runs.items()) if count > 1}

    @cached_property
    def kept(self) -> frozenset[int]:
        """The values of the forward that are made once."""
        forward = (op for op in self.graph.ops if op.phase is Phase.FORWARD and op.id not in self.recomputed)
        return frozenset(value for op in forward for value in op.creates)

    @property
    def seconds(self) -> float:
        """The time of the step without recomputation, zero if the graph was not profiled."""
        return sum(op.seconds for op in self.graph.ops)

    @property
    def extra_seconds_ratio(self) -> float:
        """Time added by recomputation, as a part of the plain step."""
        return self.extra_seconds / self.seconds if self.seconds else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """The replay, moment by moment."""
        return simulate(self.graph, self.schedule)
