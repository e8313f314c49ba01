"""A plan for every step that can be traced: op by op if that can be, else the best of what can.

    ops     the whole step, op by op: what is planned unless it cannot be captured
    layers  stretches of the model's own modules, run again through hooks; needs no more than a dry run

The first way that keeps the budget is taken; for the lowest peak, the way that gets lowest. What could not
be done, and what was done instead, is said in `solution.remark`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

from lowtide.aot.graph_backend import Spares
from lowtide.aot.kernels import Kernels
from lowtide.chain.cuts import Granularity
from lowtide.errors import BadRequest, CannotTrace, InfeasibleBudget, LowtideError
from lowtide.ir.assumptions import Assumption
from lowtide.planner.layers import Rehearsal
from lowtide.planner.ops import StepBudget
from lowtide.solvers.method import Scheduler
from lowtide.solvers.refereed import SINGLE_OPS
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.budget import LOWEST, Budget
from lowtide.text.units import format_bytes
from lowtide.trace.spec import StepSpec

AnySolution: TypeAlias = Solution | GraphSolution
Way: TypeAlias = Callable[[Budget], AnySolution]

_NESTED = "rotor"  # the least time within a budget, and nearly the least peak
_LONGEST_NESTED = 150  # layers; its time grows with their cube
_LINEAR = "hong-linear"
_SHORT_SECONDS = 5.0  # nobody minds that
_WORTH_SAYING = 0.99  # of the least without slices


@dataclass(frozen=True)
class Ladder:
    """The ways to plan one step. What they trace and capture is done once."""

    spec: StepSpec
    method: str | Scheduler  # which plans ops
    spares: Spares | None = None
    assumed: tuple[Assumption, ...] = ()  # of its graph, as other inputs have shown

    @cached_property
    def step(self) -> StepBudget:
        """The step, op by op."""
        return StepBudget(self.spec, self.spares, self.assumed)

    @cached_property
    def rehearsal(self) -> Rehearsal:
        """The step, layer by layer."""
        return Rehearsal.of(self.spec)

    def in_slices(self) -> Ladder:
        """The same step, stretches of which may run in slices: it is not traced and captured once more.

        Raises:
            CannotCapture: it cannot be planned op by op.
        """
        found = replace(self, spec=replace(self.spec, tiles=True))
        found.__dict__["step"] = self.step.in_slices()
        return found

    def within(self, budget: Budget, insists: bool = False) -> AnySolution:
        """The best plan that keeps the budget: bytes, a part of the plain peak, or the lowest peak.

        Op by op and in no other way, if somebody `insists`.

        Raises:
            InfeasibleBudget: no way keeps it; the least that one of them reaches is named, and what it would
                be with slices, if that is less.
            CannotCapture: there is no way at all: the reason is that of the first.
            CannotTrace, BadRequest: the dry run cannot follow the step, or it makes no sense.
        """
        budget = budget if budget.is_given else Budget.parse(LOWEST)
        started = time.perf_counter()
        try:
            return self.step.within(self.method, budget)
        except InfeasibleBudget as refusal:
            step = self.step if budget.card is None else self.step.on(budget.card)
            raise self._with_hint(step, refusal, time.perf_counter() - started) from None
        except (BadRequest, CannotTrace):
            raise
        except LowtideError as error:
            if insists:
                raise
            return self._otherwise(budget, error)

    def _with_hint(self, step: StepBudget, refusal: InfeasibleBudget, seconds: float) -> InfeasibleBudget:
        """The same, with what slices would do, found in no more than the `seconds` that planning took."""
        if self.spec.tiles:
            return refusal
        least = step.least_bytes_in_slices(self.method, max(seconds, _SHORT_SECONDS))
        if least is None or least > _WORTH_SAYING * refusal.least_bytes:
            return refusal
        advice = f"With tiles=True (--tiles) the least is {format_bytes(least)}. {SINGLE_OPS}"
        return InfeasibleBudget(
            refusal.method, refusal.budget_bytes, refusal.least_bytes, refusal.needed_by, advice
        )

    def _otherwise(self, budget: Budget, reason: LowtideError) -> AnySolution:
        found: list[AnySolution] = []
        refusals: list[LowtideError] = []
        for way in self._ways():
            try:
                planned = way(budget)
            except CannotTrace:
                raise
            except LowtideError as refusal:
                refusals.append(refusal)
                continue
            found.append(replace(planned, remark=_remark(reason, planned, self.spec)))
            if not budget.is_lowest:
                break
        if found:
            return min(found, key=_peak_bytes)
        infeasible = [refusal for refusal in refusals if isinstance(refusal, InfeasibleBudget)]
        if infeasible:
            raise min(infeasible, key=lambda refusal: refusal.least_bytes) from reason
        raise type(reason)(f"{reason}\nNor can it be planned by layers: {refusals[-1]}") from reason

    def _ways(self) -> Iterator[Way]:
        for granularity in (Granularity.LAYER, Granularity.FINE, Granularity.BLOCK):
            yield partial(self._by_layers, granularity)

    def _by_layers(self, granularity: Granularity, budget: Budget) -> Solution:
        chain = self.rehearsal.chain(granularity)
        method = _NESTED if len(chain) <= _LONGEST_NESTED else _LINEAR
        return self.rehearsal.within(chain, method, Budget() if budget.is_lowest else budget)


def _remark(reason: LowtideError, planned: AnySolution, spec: StepSpec) -> str:
    how = "layer by layer" if isinstance(planned, Solution) else "op by op where that can be"
    more = f"; {planned.remark}" if planned.remark else ""
    more += "; nothing of it runs in slices, which are for plans op by op" if spec.tiles else ""
    more += "" if spec.kernels == Kernels.EAGER else "; it runs by eager kernels, layers have no others"
    return (
        f"the step could not be planned op by op as a whole, so it was planned {how}: {_brief(reason)}{more}"
    )


def _brief(reason: LowtideError) -> str:
    return str(reason).splitlines()[0]


def _peak_bytes(solution: AnySolution) -> int:
    if isinstance(solution, Solution):
        assert solution.confirmation is not None, "a rehearsal confirms what it solves"
        return solution.confirmation.peak_bytes
    return solution.peak_bytes
