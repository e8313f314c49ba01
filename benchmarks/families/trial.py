"""One family: built small, predicted, measured, planned, trained under its plans, compared with itself."""

from __future__ import annotations

import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lowtide
from benchmarks.families.equality import CLOSE, Laboratory, Outcome, compared, distances
from benchmarks.families.subjects import NotBuilt, Subject, built
from lowtide.planner.api import AUTO
from lowtide.planner.ladder import Ladder
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.budget import Budget
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import training_step

PART = "70%"
LOWEST = "min"

_LOCAL = re.compile(r"/[^\"\s]*/(?=(site-packages|src|benchmarks)/)")  # where things lie on this machine

Row = dict[str, Any]
Tell = Callable[[Row], None]


@dataclass(frozen=True)
class Wanted:
    """What is asked about a family: where, how large a member, under which budgets, with which kernels."""

    device: str
    layers: int
    budgets: tuple[str, ...]
    deterministic: bool = False


def tried(family: str, wanted: Wanted, tell: Tell) -> None:
    """Everything about one family; `tell` is given the row again whenever it has grown."""
    warnings.simplefilter("ignore")
    row: Row = {"family": family, "stage": "built"}
    tell(row)
    started = time.process_time()
    try:
        subject = built(family, wanted.device, wanted.layers)
    except NotBuilt as error:
        tell(
            {
                **row,
                "stage": "ended",
                "not_built": str(error)[:1500],
                "seconds": time.process_time() - started,
            }
        )
        return
    row |= subject.about
    row["parameters"] = sum(parameter.numel() for parameter in subject.model.parameters())
    _Trial(subject, wanted, row, tell).run()
    row["seconds"] = time.process_time() - started
    tell({**row, "stage": "ended"})


class _Trial:
    def __init__(self, subject: Subject, wanted: Wanted, row: Row, tell: Tell) -> None:
        self.subject, self.row, self.tell = subject, row, tell
        self.device, self.budgets = wanted.device, wanted.budgets
        spec = StepSpec(subject.model, subject.example, subject.loss, device=wanted.device)
        self.ladder = Ladder(spec, AUTO)
        self.resident_bytes: int | None = None  # before the step, as the dry run counts it
        self.step = training_step(subject.model, subject.example, subject.loss)
        self.laboratory = Laboratory(subject.model, self.step)
        self.spread: Mapping[str, float] = {}  # between plain steps

    def run(self) -> None:
        self._stage("trained twice")
        expected = self.laboratory.outcome()
        again = self.laboratory.outcome()
        self.spread = distances(again, expected)
        if again.draws != expected.draws:  # it seeds generators itself
            expected = replace(expected, draws=())
        self.row["deterministic"] = not any(self.spread.values())
        self._dry_run()
        for budget in self.budgets:
            self._planned(budget, expected)
        if LOWEST not in self.budgets and self.row[self.budgets[0]].get("error") == "InfeasibleBudget":
            self._planned(LOWEST, expected)

    def _stage(self, name: str) -> None:
        self.row["stage"] = name
        self.tell(self.row)

    def _dry_run(self) -> None:
        self._stage("dry run")
        started = time.process_time()
        found: Row = {}
        self.row["dry_run"] = found
        try:
            fit = lowtide.fit(self.subject.model, self.subject.example, self.subject.loss, device=self.device)
            self.resident_bytes = fit.resident_bytes
            found |= {"predicted_bytes": fit.peak_bytes, "seconds": time.process_time() - started}
            found["measured_bytes"] = self._measured_bytes(fit.resident_bytes)
        except Exception as error:  # noqa: BLE001  what it raises is the answer
            found |= _error(error)
        self.laboratory.restore()

    def _measured_bytes(self, resident_bytes: int) -> int:
        """The peak of a step of the model as it is now; it has been trained before.

        On a CPU, whose allocator does not know what was there before, that is what the dry run counts.
        """
        self.laboratory.restore()
        reading = lowtide.measure(self.step, device=self.device)
        return reading.peak_bytes if self.device == "cuda" else resident_bytes + reading.growth_bytes

    def _planned(self, budget: str, expected: Outcome) -> None:
        self._stage(f"planned for {budget}")
        found: Row = {}
        self.row[budget] = found
        started = time.process_time()
        model = self.subject.model
        try:
            solution = self.ladder.within(Budget.parse(budget))
            found |= _described(solution) | {"seconds": time.process_time() - started}
            self._stage(f"trained within {budget}")
            lowtide.apply(model, solution)
            found["same"] = compared(self.laboratory.outcome(), expected, CLOSE, self.spread)
            if self.resident_bytes is not None:
                found["measured_bytes"] = self._measured_bytes(self.resident_bytes)
        except lowtide.InfeasibleBudget as error:
            found |= {**_error(error), "least_bytes": error.least_bytes}
        except Exception as error:  # noqa: BLE001  what it raises is the answer
            found |= _error(error)
        finally:
            found.setdefault("seconds", time.process_time() - started)
            lowtide.remove(model)
            self.laboratory.restore()


def _described(solution: Solution | GraphSolution) -> Row:
    """What is promised, and how it was planned."""
    how = "ops" if isinstance(solution, GraphSolution) else "layers"
    if how == "ops" and solution.remark:
        how = "partly"
    promised, plain = solution.peak_bytes, None
    if isinstance(solution, GraphSolution):
        plain = solution.plain_peak_bytes
    elif solution.confirmation is not None:
        promised, plain = solution.confirmation.peak_bytes, solution.confirmation.plain_peak_bytes
    return {
        "how": how,
        "remark": solution.remark,
        "promised_bytes": promised,
        "plain_bytes": plain,
        "budget_bytes": solution.budget_bytes,
        "extra": solution.extra_seconds_ratio,
    }


def _error(error: Exception) -> Row:
    """The message; for what lowtide does not raise on purpose, where it came from as well."""
    expected = isinstance(error, lowtide.LowtideError)
    message = _LOCAL.sub("", str(error))[:1500]
    found: Row = {"error": type(error).__name__, "message": message, "on_purpose": expected}
    if not expected:
        frames = traceback.extract_tb(error.__traceback__)[-12:]
        found["where"] = [f"{_LOCAL.sub('', frame.filename)}:{frame.lineno}" for frame in frames]
    return found
