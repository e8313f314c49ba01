"""The ways to train one step: as it is, as its library saves memory, as compilers do, and under plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from lowtide.compat.compiling import compiling_afresh
from lowtide.compat.dynamo import activation_budget
from lowtide.errors import BadRequest, InfeasibleBudget, LowtideError
from lowtide.execute.apply import apply
from lowtide.fusion.fuse import of_ops
from lowtide.planner.checkpointed import switch_checkpointing_on
from lowtide.planner.ladder import AnySolution, Ladder
from lowtide.planner.peer_steps import PeerReading, PeerSteps
from lowtide.planner.promise import allocated_bytes
from lowtide.solvers.method import Scheduler
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.budget import LOWEST, Budget
from lowtide.text.units import format_bytes

CHECKPOINTING = "checkpointing"
EAGER = "eager"
PARTS = (1.0, 0.5, 0.2, 0.0)  # stock budgets, of the bytes that are saved for the backward
KEPT = "all kept"
EVERYTHING_FITS = 1 << 50

IN_ONE_PIECE = "nothing of it runs in slices here, so it is what it is without tiles"

_ALIKE = 1.01  # peaks that are closer are one
_LONGEST_PROBLEM = 300  # letters


class PeerKind(StrEnum):
    """Whose way to train it is."""

    EAGER = "eager"
    LIBRARY = "library"
    COMPILED = "compiled"
    PLANNED = "planned"


@dataclass(frozen=True)
class PeerRow:
    """One way to train, measured, or why it was not: `problem`.

    `budget_bytes` is what a plan was asked to hold, `predicted_peak_bytes` what lowtide said before the step
    ran, `planning_seconds` how long it took to find the plan, without tracing and capturing the step, which
    is done once. `from_cache` is whether compiled code may have come from a cache on disk.
    """

    label: str
    kind: PeerKind
    problem: str | None = None
    remark: str | None = None
    reading: PeerReading | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    planning_seconds: float | None = None
    recomputed_ops: int | None = None
    from_cache: bool = False

    @property
    def within_budget(self) -> bool | None:
        """Whether the measured peak is within the budget, if there is one."""
        if self.reading is None or self.budget_bytes is None:
            return None
        return self.reading.peak_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """Every field, as JSON can hold it; those of the reading beside the others."""
        own = {**self.__dict__, "kind": self.kind.value, "within_budget": self.within_budget}
        reading = own.pop("reading")
        return {**own, **(reading.__dict__ if reading is not None else {})}


@dataclass(frozen=True)
class TrainingWay:
    """A way to train, to be measured when it is its turn."""

    label: str
    kind: PeerKind
    row: Callable[[], PeerRow]


@dataclass(frozen=True)
class PeerWishes:
    """Which ways are asked for; `budgets` are for plans, beside those that others' peaks are."""

    method: str | Scheduler
    budgets: tuple[Budget, ...] = ()
    compiled: bool = True
    tiles: bool = True
    from_cache: bool = False


@dataclass(frozen=True)
class PeerTrial:
    """A step and all ways to train it. `peaks` are those that were measured so far, by label."""

    steps: PeerSteps
    wishes: PeerWishes
    peaks: dict[str, int] = field(default_factory=dict)

    def ways(self) -> Iterator[TrainingWay]:
        """Every way, one after the other; which budgets plans are asked to keep depends on earlier rows."""
        yield TrainingWay(EAGER, PeerKind.EAGER, self._eager)
        yield TrainingWay(CHECKPOINTING, PeerKind.LIBRARY, self._checkpointed)
        if self.wishes.compiled:
            for part in PARTS:
                label = compiled_label(part)
                yield TrainingWay(label, PeerKind.COMPILED, partial(self._compiled, label, part))
            label = f"compile + {CHECKPOINTING}"
            yield TrainingWay(label, PeerKind.COMPILED, partial(self._compiled, label, None))
        for engine in self._engines:
            yield from self._planned_ways(engine)

    def row(self, way: TrainingWay) -> PeerRow:
        """That way, measured; where it fails, the reason."""
        try:
            found = way.row()
        except torch.OutOfMemoryError:
            found = PeerRow(way.label, way.kind, "the device ran out of memory")
        except Exception as error:  # noqa: BLE001  a way that fails in whatever way must not cost the others
            found = PeerRow(way.label, way.kind, problem_of(error))
        finally:
            self.steps.clean_up()
        if found.reading is not None:
            self.peaks[found.label] = found.reading.peak_bytes
        return found

    # What others do ---------------------------------------------------------------------------------------

    def _eager(self) -> PeerRow:
        try:
            predicted, remark = self._ladder.step.plain_peak_bytes, None
        except LowtideError as error:
            predicted, remark = None, f"no prediction: {problem_of(error)}"
        reading = self.steps.measured(self.steps.another())
        return PeerRow(EAGER, PeerKind.EAGER, None, remark, reading, predicted_peak_bytes=predicted)

    def _checkpointed(self) -> PeerRow:
        model = self.steps.another()
        how = switch_checkpointing_on(model)
        return PeerRow(CHECKPOINTING, PeerKind.LIBRARY, None, how, self.steps.measured(model))

    def _compiled(self, label: str, part: float | None) -> PeerRow:
        """By Inductor, with a part of what it would save; None: with checkpointing instead."""
        model = self.steps.another()
        how = None if part is not None else switch_checkpointing_on(model)
        budget = nullcontext() if part is None else activation_budget(part)
        with compiling_afresh(self.wishes.from_cache), budget:
            compiled: Any = torch.compile(model)
            reading = self.steps.measured(compiled, draws_alike=False)
        return PeerRow(label, PeerKind.COMPILED, None, how, reading, from_cache=self.wishes.from_cache)

    # Plans ------------------------------------------------------------------------------------------------

    @cached_property
    def _ladder(self) -> Ladder:
        return Ladder(replace(self.steps.spec, model=self.steps.another()), self.wishes.method)

    @cached_property
    def _engines(self) -> Sequence[PlanEngine]:
        eager = PlanEngine("lowtide", self._ladder, generated=False)
        if not self.wishes.compiled:
            return (eager,)
        spec = replace(self.steps.spec, model=self.steps.another(), kernels="inductor")
        return (
            eager,
            PlanEngine("lowtide inductor", Ladder(spec, self.wishes.method), generated=True),
        )

    def _planned_ways(self, engine: PlanEngine) -> Iterator[TrainingWay]:
        kept = f"{engine.name}, {KEPT}"
        yield self._planned_way(engine, kept, EVERYTHING_FITS, False)
        for words, budget in self._asked(self.peaks.get(kept)):
            for tiles in (False, True) if self.wishes.tiles else (False,):
                label = f"{engine.name}{' tiles' if tiles else ''}{words}"
                yield self._planned_way(engine, label, budget, tiles)

    def _planned_way(
        self, engine: PlanEngine, label: str, budget: str | int | None, tiles: bool
    ) -> TrainingWay:
        return TrainingWay(
            label, PeerKind.PLANNED, partial(self._planned, engine, label, Budget.parse(budget), tiles)
        )

    def _asked(self, kept_bytes: int | None) -> Iterator[tuple[str, str | int | None]]:
        """Budgets and how they are called: peaks of others, those that were asked for, and the lowest."""
        peers = {
            label: peak
            for label, peak in self.peaks.items()
            if not label.startswith("lowtide")
            and label != EAGER
            and (kept_bytes is None or peak < kept_bytes)
        }
        yield from ((f" within {label}", peak) for label, peak in distinct_peaks(peers))
        for budget in self.wishes.budgets:
            if not budget.is_lowest:
                yield f" within {budget}", str(budget)
        yield ", lowest", LOWEST

    def _planned(self, engine: PlanEngine, label: str, budget: Budget, tiles: bool) -> PeerRow:
        from_cache = engine.generated and self.wishes.from_cache
        with compiling_afresh(from_cache) if engine.generated else nullcontext():
            planned = engine.planned(budget, tiles)
            reading = self.steps.measured(planned.model, draws_alike=not engine.generated)
        return PeerRow(
            label,
            PeerKind.PLANNED,
            None,
            planned.remark,
            reading,
            budget_bytes=None if budget.bytes == EVERYTHING_FITS else planned.budget_bytes,
            predicted_peak_bytes=planned.predicted_peak_bytes,
            planning_seconds=planned.planning_seconds,
            recomputed_ops=planned.recomputed_ops,
            from_cache=from_cache,
        )


def compiled_label(part: float) -> str:
    """What stock compile with that budget is called."""
    return f"compile {part:g}"


def distinct_peaks(peaks: Mapping[str, int]) -> list[tuple[str, int]]:
    """Peaks from the highest to the lowest; of those that are nearly the same the lowest alone."""
    found: list[tuple[str, int]] = []
    for label, peak in sorted(peaks.items(), key=lambda item: item[1]):
        if not found or peak > _ALIKE * found[-1][1]:
            found.append((label, peak))
    return found[::-1]


# Plans at work --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedModel:
    """A model that trains by a plan, and what is known of that."""

    model: nn.Module
    planning_seconds: float
    predicted_peak_bytes: int
    budget_bytes: int | None
    recomputed_ops: int | None
    remark: str | None


@dataclass(frozen=True)
class PlanEngine:
    """Plans that run with one kind of kernels: all of one capture of the step, and for one copy of the model.

    Kernels that are `generated` are compiled anew for each plan, and draw random numbers of their own.
    """

    name: str
    ladder: Ladder
    generated: bool

    @cached_property
    def _in_slices(self) -> Ladder:
        return self.ladder.in_slices()

    def planned(self, budget: Budget, tiles: bool) -> PlannedModel:
        """The model, which trains within the budget from now on.

        Raises:
            InfeasibleBudget: no plan fits.
            BadRequest: slices are asked for, and nothing runs in slices.
        """
        ladder = self._in_slices if tiles else self.ladder
        started = time.perf_counter()
        solution = ladder.within(budget)
        seconds = time.perf_counter() - started
        if tiles and not _has_slices(solution):
            raise BadRequest(IN_ONE_PIECE)
        return PlannedModel(
            apply(ladder.spec.model, solution, on_new_inputs="error"),
            seconds,
            _predicted(solution),
            solution.budget_bytes,
            _recomputed(solution),
            solution.remark or None,
        )


def _has_slices(solution: AnySolution) -> bool:
    return isinstance(solution, GraphSolution) and of_ops(solution.graph).tiled is not None


def _predicted(solution: AnySolution) -> int:
    if isinstance(solution, Solution):
        assert solution.confirmation is not None, "a rehearsal confirms what it solves"
        return solution.confirmation.peak_bytes
    return allocated_bytes(solution.graph, solution.schedule, solution.peak_bytes)


def _recomputed(solution: AnySolution) -> int:
    if isinstance(solution, Solution):
        assert solution.confirmation is not None, "a rehearsal confirms what it solves"
        return solution.confirmation.recomputed_ops
    return sum(solution.recomputed.values())


# What went wrong ------------------------------------------------------------------------------------------


def problem_of(error: Exception) -> str:
    """Why a way to train failed, in one line."""
    if isinstance(error, InfeasibleBudget):
        return f"no plan fits; the least is {format_bytes(error.least_bytes)}"
    text = " ".join(str(error).split())
    if "C++ compiler" in text:
        return "there is no C++ compiler, which torch.compile needs on a CPU: install g++, or --no-compile"
    if "triton" in text.lower() and "install" in text.lower():
        return "there is no working Triton, which torch.compile needs: pip install triton, or --no-compile"
    told = text if isinstance(error, LowtideError) else f"{type(error).__name__}: {text}"
    return told if len(told) <= _LONGEST_PROBLEM else f"{told[:_LONGEST_PROBLEM]}…"
