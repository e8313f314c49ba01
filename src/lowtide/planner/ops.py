"""A budget for a training step, kept op by op: trace, capture, profile, solve, and replay.

The plain step is traced and captured once, whatever is asked afterwards.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lowtide.aot.casts import CAST_PER_GRAPH
from lowtide.aot.graph_backend import Spares
from lowtide.aot.kernels import Kernels
from lowtide.aot.step_graph import step_graph
from lowtide.compat.garbage import collecting_seldom
from lowtide.errors import InfeasibleBudget
from lowtide.execute.apply import set_aside
from lowtide.execute.circumstances import circumstances
from lowtide.execute.identity import fingerprint
from lowtide.fusion.fuse import of_ops
from lowtide.inductor.kinds import kind_of
from lowtide.ir.assumptions import Assumption
from lowtide.ir.graph import Graph
from lowtide.ir.training_reserve import AllocatedRun
from lowtide.planner.on_card import (
    CARD_STEPS,
    Beside,
    CardUse,
    Training,
    card_refusal,
    check_on_card,
    timed_for,
)
from lowtide.planner.promise import allocated_bytes, promised_bytes, solved_within
from lowtide.solvers import quickly, solve
from lowtide.solvers.kernels import in_kernels
from lowtide.solvers.method import Scheduler
from lowtide.solvers.refereed import SINGLE_OPS, followed
from lowtide.solvers.solution import GraphSolution
from lowtide.solvers.tiling import best_tiled
from lowtide.text.budget import LOWEST, Budget
from lowtide.text.card import Card
from lowtide.trace.dry_run import Trace
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import arguments
from lowtide.trace.training import trace_training

_NOTHING_IN_SLICES = (
    "tiles were asked for, and nothing of the step runs in slices: nothing that can be cut makes it"
)


@dataclass(frozen=True)
class StepBudget:
    """A step that is planned op by op."""

    spec: StepSpec
    spares: Spares | None = None  # where graphs are left for whoever puts the plan to work
    assumed: tuple[Assumption, ...] = ()  # of the graph, as other inputs have shown
    card: Card | None = None  # what a budget is counted on; None: it is a peak's

    @property
    def beside(self) -> Beside:
        """What the process takes from a card beside this step."""
        return Beside.of(distributed=False)

    @cached_property
    def left_bytes(self) -> int:
        """What the card leaves to the allocator.

        Raises:
            BadRequest: nothing, or the step runs where there is no card.
        """
        assert self.card is not None, "who asks has a card"
        check_on_card(self.card, self.plain.graph.device)
        return self.beside.left_bytes(self.card)

    def on(self, card: Card) -> StepBudget:
        """The same step, whose budgets are that card: it is not traced and captured once more."""
        found = replace(self, card=card)
        found.__dict__["plain"] = replace(self.plain, graph=timed_for(card, self.plain.graph))
        if "graph" in self.__dict__:
            found.__dict__["graph"] = timed_for(card, self.graph)
        if "_alone" in self.__dict__:
            found.__dict__["_alone"] = self._alone
        return found

    def surrounded(self, graph: Graph) -> Graph:
        """`graph` with what is held beside the step all the time: nothing, unless an engine holds some."""
        return graph

    @cached_property
    def plain(self) -> Trace:
        """The step as the user wrote it, without a plan."""
        return replace(self._alone, graph=self.surrounded(timed_for(self.card, self._alone.graph)))

    def set_aside(self) -> AbstractContextManager[None]:
        """The plain model while the block runs; afterwards with the plan that it had before, if any."""
        return set_aside(self.spec.model)

    @cached_property
    def _alone(self) -> Trace:
        with self.set_aside():
            return trace_training(self.spec)

    @cached_property
    def graph(self) -> Graph:
        """The step as it runs op by op."""
        with self.set_aside():
            graph = step_graph(self.spec, self._alone, self.spares, self.assumed)
        return self.surrounded(timed_for(self.card, graph))

    @property
    def plain_peak_bytes(self) -> int:
        """What the device's allocator will say that the plain step held."""
        return allocated_bytes(self.plain.graph, self.plain.schedule, self.plain.peak_bytes)

    @property
    def plain_needed_bytes(self) -> int:
        """What a budget must hold for the plain step: its peak, or all that it takes of a card."""
        if self.card is None:
            return self.plain_peak_bytes
        return self._of_card(Training(self._plain_run).needed_bytes(self.left_bytes))

    def _of_card(self, allocator_bytes: int) -> int:
        """All that is taken of the card, where its allocator needs so much."""
        assert self.card is not None, "who asks has a card"
        return self.card.memory_bytes - self.left_bytes + allocator_bytes

    @cached_property
    def _plain_run(self) -> AllocatedRun:
        return AllocatedRun(self.plain.graph, self.plain.schedule)

    def in_slices(self) -> StepBudget:
        """The same step, stretches of which may run in slices: it is not traced and captured once more."""
        found = replace(self, spec=replace(self.spec, tiles=True))
        found.__dict__["_alone"] = self._alone
        if Kernels.named(self.spec.kernels) is Kernels.EAGER:  # others capture losses otherwise
            found.__dict__["graph"] = self.graph
        return found

    def settled(self, budget: Budget) -> Budget:
        """The same budget for other inputs: the bytes that it means for these, or still the lowest peak."""
        if budget.card is not None:
            return budget
        return Budget.parse(LOWEST if budget.is_lowest else budget.bytes_of(lambda: self.plain_peak_bytes))

    def solve(self, method: str | Scheduler, budget: str | int | Card | None) -> GraphSolution:
        """A schedule that stays within the budget: bytes, a part of the plain peak ("60%"), "min" or a card.

        On CUDA it stays a hundredth of what is not resident below: see `lowtide.planner.promise`.

        Raises:
            InfeasibleBudget: the method finds none.
        """
        return self.within(method, Budget.parse(budget))

    def within(self, method: str | Scheduler, budget: Budget) -> GraphSolution:
        """The same, for a budget that has been read; without one, the lowest peak."""
        with collecting_seldom():
            return self._within(method, budget)

    def following(self, plan: GraphSolution, budget_bytes: int | None) -> GraphSolution:
        """The schedule of a plan for another batch of the same step, for this one, whatever it peaks at.

        Raises:
            IllegalSchedule: it is another step.
        """
        return self._labelled(followed(self.graph, plan), budget_bytes)

    def _within(self, method: str | Scheduler, budget: Budget) -> GraphSolution:
        if budget.card is not None and self.card != budget.card:
            return self.on(budget.card)._within(method, budget)
        wanted = self.left_bytes if budget.card else budget.bytes_of(lambda: self.plain_peak_bytes)
        if not self.spec.tiles:
            return self._labelled(self._solved(self.graph, method, wanted), wanted)
        return self._labelled(self._in_slices(method, wanted), wanted)

    def _solved(self, graph: Graph, method: str | Scheduler, wanted: int | None) -> GraphSolution:
        """What a method makes of a graph of the step, or of the kernels that it is compiled to."""
        if Kernels.named(self.spec.kernels) is Kernels.EAGER:
            return self._best(graph, method, wanted)
        return in_kernels(graph, kind_of, lambda kernels: self._best(kernels, method, wanted))

    def _best(self, graph: Graph, method: str | Scheduler, wanted: int | None) -> GraphSolution:
        if wanted is None:
            return solve(graph, method, LOWEST)
        return solved_within(
            wanted,
            lambda aim: solve(graph, method, LOWEST if aim is None else aim),
            self._needed_bytes,
            lambda least: self._refusal(least, wanted),
            step_bytes=0 if self.card is None else wanted // CARD_STEPS,
        )

    def _in_slices(self, method: str | Scheduler, wanted: int | None) -> GraphSolution:
        """The best of the step as it is and with regions in slices. Which that is, a quick search tells."""
        refusals: list[InfeasibleBudget] = []
        quick = quickly(method)

        def solved(graph: Graph) -> GraphSolution | None:
            try:
                return self._solved(graph, quick, wanted)
            except InfeasibleBudget as refusal:
                refusals.append(refusal)
                return None

        found = best_tiled(
            self.graph,
            self.priced,
            solved,
            lambda graph: solve(graph, quick, LOWEST),
            is_lowest=wanted is None,
        )
        if found is None:
            raise min(refusals, key=lambda refusal: refusal.least_bytes)
        cut = of_ops(found.graph)
        best = self._in_one_piece(method, wanted) if cut.tiled is None else self._solved(cut, method, wanted)
        if cut.tiled is not None or (wanted is not None and not best.recomputed):
            return best
        what = "peak lower" if wanted is None else "take less time within the budget"
        return replace(best, remark=f"{_NOTHING_IN_SLICES} {what}")

    def _in_one_piece(self, method: str | Scheduler, wanted: int | None) -> GraphSolution:
        """The best where nothing runs in slices: generated kernels are then captured as without tiles."""
        if Kernels.named(self.spec.kernels) is Kernels.EAGER:
            return self._solved(self.graph, method, wanted)
        whole = replace(self, spec=replace(self.spec, tiles=False))
        whole.__dict__["_alone"] = self._alone
        return whole._solved(whole.graph, method, wanted)

    def priced(self, graph: Graph) -> Graph:
        """What slices of the step cost, if ops are to be run for that; else parts of what the whole costs."""
        if not self.spec.profile:
            return graph
        kernels = Kernels.named(self.spec.kernels)
        return timed_for(self.card, kernels.with_costs(graph, self.spec.progress))

    def least_bytes_in_slices(self, method: str | Scheduler, seconds: float) -> int | None:
        """The least budget that a quick search with slices keeps, after about so many seconds; None: no idea.

        Costs of slices are parts of those of whole ops: nothing is run for it.
        """
        stop = time.monotonic() + seconds
        found: list[GraphSolution] = []
        quick = quickly(method)

        def lowest(graph: Graph) -> GraphSolution:
            if time.monotonic() > stop:
                raise _OutOfTime
            solution = self._solved(graph, quick, None)
            found.append(solution)
            return solution

        with suppress(_OutOfTime):
            best_tiled(self.graph, lambda graph: graph, lowest, lowest, is_lowest=True)
        return min(map(self.promised_bytes, found), default=None)

    def promised_bytes(self, solution: GraphSolution) -> int:
        """What a budget must hold for `solution` to be safe: of a card, everything on it."""
        needed = self._needed_bytes(solution)
        return needed if self.card is None else self._of_card(needed)

    def keeps(self, solution: GraphSolution, budget_bytes: int) -> bool:
        """Whether so much is enough for `solution` to be safe: of a card, what it leaves (`left_bytes`)."""
        return self._needed_bytes(solution) <= budget_bytes

    def _needed_bytes(self, solution: GraphSolution) -> int:
        if self.card is not None:
            return self.training(solution).needed_bytes(self.left_bytes)
        graph = solution.graph
        peak_bytes = allocated_bytes(graph, solution.schedule, solution.timeline.peak_bytes)
        return promised_bytes(peak_bytes, solution.timeline.resident_bytes, graph.device)

    def training(self, solution: GraphSolution) -> Training:
        """A training by that plan."""
        return Training(AllocatedRun(solution.graph, solution.schedule), self._plain_run)

    def use_of(self, solution: GraphSolution) -> CardUse:
        """What a training by that plan takes of the card."""
        assert self.card is not None, "who asks has a card"
        check_on_card(self.card, solution.graph.device)
        return CardUse.of(self.training(solution), self.card, self.beside)

    def _refusal(self, least: GraphSolution, wanted: int) -> InfeasibleBudget:
        running = least.timeline.peak_op
        needed_by = "what is always there" if running is None else running.label
        if self.card is None:
            return InfeasibleBudget(least.method, wanted, self.promised_bytes(least), needed_by, SINGLE_OPS)
        missing_bytes = self.training(least).least_bytes(wanted) - wanted
        return card_refusal(least.method, self.card, missing_bytes, needed_by)

    def _labelled(self, solution: GraphSolution, budget_bytes: int | None) -> GraphSolution:
        """`solution`, with what is needed to apply it to the model."""
        args, kwargs = arguments(self.spec.example)
        device = self.graph.device.partition(":")[0]
        notes = (note for note in self.graph.notes if note.startswith(CAST_PER_GRAPH))
        with self.set_aside():  # a plan that the model has is no circumstance of another
            inputs = circumstances(self.spec.model, args, kwargs, device)
        return replace(
            solution,
            budget_bytes=budget_bytes,
            plain_peak_bytes=self.plain_peak_bytes,
            fingerprint=fingerprint(self.spec.model),
            inputs=inputs,
            torch_version=torch.__version__.partition("+")[0],
            remark="; ".join(filter(None, (solution.remark, *notes))),
        )


class _OutOfTime(Exception):
    """A search that nobody waits for any longer."""
