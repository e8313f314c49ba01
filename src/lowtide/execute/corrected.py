"""Plans for generated kernels, set right by the code that was generated for them.

A plan is made with a guess of what Inductor will fuse. Once it has generated code for the halves of a graph,
what each half holds is read off its code; where the step then exceeds its budget, it is planned anew, with
as much less to hold as it was found to exceed it by. The lowest plan comes last, so that what its code holds
is a budget that holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from lowtide.cost.generated import copied_bytes
from lowtide.errors import InfeasibleBudget
from lowtide.inductor.reading import Read
from lowtide.ir.graph import Graph, Op, Phase, short_name
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import simulate
from lowtide.ir.walk import walk
from lowtide.solvers import solve
from lowtide.solvers.ops.auto import Auto
from lowtide.text.budget import LOWEST

_TRIES = 3  # before the lowest
_UNREAD = (
    "Inductor fuses other ops than the plan was made for, and what it generates needs more. Raise the budget "
    'to at least that, or leave kernels="eager".'
)
Half = tuple[int, Phase]  # a section, and which half of it


class Corrected:
    """What the halves of one step were found to hold, and plans that take it into account."""

    def __init__(self, graph: Graph, schedule: Schedule, budget_bytes: int | None) -> None:
        self._graph = graph
        self._schedule = schedule
        self._budget_bytes = budget_bytes
        self._found: dict[Half, int] = {}
        self._is_new = False  # what was found, since it was last looked at
        self._plans = 0
        self._is_lowest = False  # the plan that is followed: there is none below

    def note(self, half: Half, growth_bytes: int) -> None:
        """The code for a half holds at most so much above what is there when it begins."""
        self._found[half] = max(growth_bytes, self._found.get(half, 0))
        self._is_new = True

    def reading(self, section: int) -> Callable[[Phase, Callable[..., Read]], Read]:
        """What is to be told that a half of a section was compiled, and how to read its code."""

        def found(phase: Phase, read: Callable[..., Read]) -> Read:
            half = section, phase
            code = read(device=self._graph.device, workspaces=self.workspaces(half))
            self.note(half, code.growth_bytes)
            return code

        return found

    def workspaces(self, half: Half) -> Mapping[str, list[int]]:
        """Those of library kernels that run in a half, by the name of the op, in their order."""
        found: dict[str, list[int]] = {}
        steps = list(walk(self._graph, self._schedule))
        span = _spans(self._graph, self._schedule).get(half, range(0))
        for event in steps[span.start : span.stop]:
            if event.op is not None and event.op.section == half[0] and event.op.workspace_bytes >= 0:
                found.setdefault(short_name(event.op.target), []).append(self._unwritten_bytes(event.op))
        return found

    def _unwritten_bytes(self, op: Op) -> int:
        """What a library kernel takes by itself, without copies of what it is given: code shows those."""
        return max(0, op.workspace_bytes - copied_bytes(self._graph, op))

    @property
    def peak_bytes(self) -> int:
        """What the step holds at most, as far as its code has been read."""
        live = simulate(self._graph, self._schedule).live_bytes
        halves = _spans(self._graph, self._schedule)
        read = {half: span for half, span in halves.items() if half in self._found}
        inside = {position for span in read.values() for position in span}
        peaks = [int(each) for position, each in enumerate(live) if position not in inside]
        resident = simulate(self._graph, self._schedule).resident_bytes
        for half, span in read.items():
            before = int(live[span.start - 1]) if span.start else resident
            peaks.append(before + self._found[half])
        return max(peaks, default=resident)

    def next_plan(self) -> Schedule | None:
        """A plan to follow from now on, where the one that is followed exceeds the budget; else none.

        Raises:
            InfeasibleBudget: no plan was found whose code is within the budget.
        """
        if self._budget_bytes is None or not self._is_new:
            return None
        excess = self.peak_bytes - self._budget_bytes
        if excess > 0:
            self._schedule = self._lower_by(excess)
            self._plans += 1
            self._found.clear()
        self._is_new = False
        return self._schedule if excess > 0 else None

    def _lower_by(self, excess: int) -> Schedule:
        """A schedule that holds so much less than the one followed; in the end the lowest there is."""
        if self._is_lowest:
            raise self._refusal()
        aim = simulate(self._graph, self._schedule).peak_bytes - excess
        if aim > 0 and self._plans < _TRIES:
            with suppress(InfeasibleBudget):
                return solve(self._graph, Auto(), aim).schedule
        self._is_lowest = True
        lowest = solve(self._graph, Auto(), LOWEST).schedule
        if lowest == self._schedule:
            raise self._refusal()
        return lowest

    def _refusal(self) -> InfeasibleBudget:
        return InfeasibleBudget(
            Auto.name, self._budget_bytes or 0, self.peak_bytes, "code that Inductor has generated", _UNREAD
        )


def _spans(graph: Graph, schedule: Schedule) -> dict[Half, range]:
    """Where in a schedule each half runs: from its first op to its last, and what is freed then."""
    found: dict[Half, range] = {}
    latest: Half | None = None  # the last one of which an op has run for the first time
    done: set[int] = set()
    waiting: dict[int, int] = {}  # section -> where ops that run again begin, before one that runs first
    for event in walk(graph, schedule):
        op = event.op
        if op is None:
            if latest is not None and found[latest].stop == event.position:
                found[latest] = range(found[latest].start, event.position + 1)
            continue
        if op.id in done:
            waiting.setdefault(op.section, event.position)
            continue
        done.add(op.id)
        latest = half = op.section, op.phase
        begun = found.get(half)
        start = waiting.pop(op.section, event.position) if begun is None else begun.start
        waiting.pop(op.section, None)
        found[half] = range(start, event.position + 1)
    return found
