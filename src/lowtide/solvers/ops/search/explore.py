"""The search behind `evict` and `auto`: the schedules worth having from the plain one to the lowest.

It goes down a ladder of peaks and does not know of any budget: what it finds is the same for all of them.

    descend   from some start, level after level, as far as it gets
    polish    the best schedule of each level, improved
    sink      further down than the last level that was reached
    fill      what lies between two levels
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowtide.solvers.jit import Numbers, is_compiling
from lowtide.solvers.method import Effort
from lowtide.solvers.ops.search.encode import change_to, codes_in, slots_of
from lowtide.solvers.ops.search.lower_bound import must_hold
from lowtide.solvers.ops.search.memory import highest
from lowtide.solvers.ops.search.moves import is_in_place, relax
from lowtide.solvers.ops.search.pareto import Front, Seen
from lowtide.solvers.ops.search.repair import NO_LIMIT, improve, shrink
from lowtide.solvers.ops.search.state import Work

NOTHING: Numbers = np.empty(0, np.int64)
WIDTH = 12  # candidates that are tried before one is taken
HALVINGS = 5  # of the way to a peak that is out of reach
BETWEEN = 4  # parts into which the way from one level to the next is cut at last
DEEPEST = 50  # no level is below this part of the plain peak


@dataclass(frozen=True, slots=True)
class Length:
    """How long a search is."""

    levels: int  # at most
    passes: int  # down the ladder and up again
    part: int  # of `work_for`: what is allowed


SLOW = (
    "llvmlite is not installed, or older than 0.44: the search runs as Python and takes about a hundred "
    "times as long. Install it (pip install llvmlite), or plan with effort='quick'."
)
LENGTHS = {Effort.FULL: Length(64, 2, 1), Effort.QUICK: Length(16, 1, 8)}


class Explorer:
    """A search over the schedules of one graph; `front` is what it has found so far."""

    def __init__(self, work: Work, costs: Sequence[float]) -> None:
        self.work = work
        self.costs = np.asarray(costs, np.float64)
        self.slots = slots_of(work)
        self.front = Front()
        self.plain_bytes = int(highest(work, self.slots))
        self.floor_bytes = int(must_hold(work).max(initial=0))
        self.note()

    def note(self) -> None:
        """Remember the schedule as it stands, if it is worth it and may be executed so."""
        codes = codes_in(self.slots)
        peak_bytes = int(highest(self.work, self.slots))
        cost = float(self.costs[codes // len(self.costs)].sum()), len(codes)
        if self.front.wants(peak_bytes, cost) and is_in_place(self.work, self.slots):
            self.front.add(Seen(peak_bytes, cost, codes))

    def begin(self, codes: Numbers) -> None:
        """Go on from there."""
        change_to(self.work, self.slots, codes)

    def shrink(self, level: int, merge: bool, allowance: int) -> bool:
        """Get down to `level`, and give back what can be given back there; False if it is stuck above."""
        self.slots.journal.count[0] = 0
        reached = shrink(self.work, self.slots, level, merge, WIDTH, NO_LIMIT, 0.0, allowance)
        self.slots.journal.count[0] = 0
        if reached:
            relax(self.work, self.slots, level)
        self.slots.journal.count[0] = 0
        self.note()
        return bool(reached)

    def improve(self, level: int, allowance: int) -> None:
        """Try other ways to be at `level`, or nearer to it."""
        improve(self.work, self.slots, level, allowance, WIDTH)
        self.note()

    def descend(self, levels: Sequence[int], merge: bool, allowance: int) -> None:
        """From where it stands down to the first level that it cannot reach."""
        stop = self.slots.spent[0] + allowance
        here = int(highest(self.work, self.slots))
        for level in [here, *(level for level in levels if level < here)]:
            left = int(stop - self.slots.spent[0])
            if left <= 0 or not self.shrink(level, merge, left):
                break

    def polish(self, levels: Iterable[int], allowance: int) -> None:
        """Level after level, improve the better of the best so far and what the level before leads to."""
        for level in levels:
            self.shrink(level, merge=False, allowance=allowance)
            self.begin((self.front.best(level) or self.front.seen[0]).codes)
            self.improve(level, allowance)
            if self.front.seen[0].peak_bytes > level:
                break

    def sink(self, beyond: int, allowance: int) -> None:
        """Halve, a few times, what lies between the lowest peak so far and one that is out of reach."""
        for _ in range(HALVINGS):
            lowest = self.front.seen[0]
            middle = (lowest.peak_bytes + beyond) // 2
            if not beyond < middle < lowest.peak_bytes:
                break
            self.begin(lowest.codes)
            self.improve(middle, allowance)
            if self.front.seen[0].peak_bytes > middle:
                beyond = middle
        self.begin(self.front.seen[0].codes)
        self.improve(self.front.seen[0].peak_bytes, allowance)

    def fill(self, levels: Sequence[int]) -> None:
        """Between levels, give back from the best of the lower one what can be given back."""
        for high, low in pairwise([self.plain_bytes, *levels]):
            best = self.front.best(low)
            if best is None:
                break
            self.begin(best.codes)
            for part in range(1, BETWEEN):
                self.slots.journal.count[0] = 0
                relax(self.work, self.slots, low + (high - low) * part // BETWEEN)
                self.note()


def explore(
    work: Work, costs: Sequence[float], starts: Iterable[Numbers] = (), effort: Effort = Effort.FULL
) -> Front:
    """The schedules worth having that a search of fixed length comes upon, begun with nothing run again.

    And with what `starts` run again. `costs` are those of the ops. How long the search is depends on the
    number of ops and on `effort` alone, and what it finds on nothing but these and the graph.
    """
    if not is_compiling():
        warnings.warn(SLOW, stacklevel=2)
    explorer = Explorer(work, costs)
    length = LENGTHS[effort]
    levels = levels_between(explorer.plain_bytes, explorer.floor_bytes, len(work.cost), length.levels)
    if not levels or not len(work.evictable):
        return explorer.front
    allowance = work_for(len(work.cost)) // length.part
    for merge in (False, True):
        explorer.begin(NOTHING)
        explorer.descend(levels, merge, allowance // 2)
    for start in starts:
        explorer.begin(start)
        explorer.descend(levels, merge=True, allowance=allowance // 16)
    each = allowance // (2 * length.passes * len(levels))
    for _ in range(length.passes):
        explorer.begin(NOTHING)
        explorer.polish(levels, each)
        lowest = explorer.front.seen[0].peak_bytes
        missed = [level for level in levels if level < lowest]
        explorer.sink(missed[0] if missed else explorer.floor_bytes - 1, allowance // 24)
        explorer.polish(reversed(levels[: len(levels) - len(missed)]), each)
    explorer.fill(levels)
    return explorer.front


def levels_between(plain_bytes: int, floor_bytes: int, ops: int, most: int) -> list[int]:
    """Peaks to aim for, each by the same part lower than the one before; fewer where they take long."""
    steps = min(4 * ops, most, max(16, 64 * 64 * 16 // max(1, ops)))
    lowest = max(floor_bytes, plain_bytes // DEEPEST, 1)
    found = [int(plain_bytes * (lowest / max(1, plain_bytes)) ** (step / steps)) for step in range(1, steps)]
    levels = dict.fromkeys([*found, max(floor_bytes, plain_bytes // DEEPEST)])
    return [level for level in levels if floor_bytes <= level < plain_bytes]


def work_for(ops: int) -> int:
    """How much work each part of a search may be; a unit takes about 60 ns where loops are compiled."""
    return 30_000 * min(ops, 500) + 4_000 * min(max(0, ops - 500), 2500) + 500 * max(0, ops - 3000)
