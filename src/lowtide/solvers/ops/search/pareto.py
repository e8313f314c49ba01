"""The best schedules seen so far: none of them both lower and faster than another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

from lowtide.ir.graph import Graph
from lowtide.solvers.jit import Numbers
from lowtide.solvers.method import Effort

Cost: TypeAlias = tuple[float, int]  # what running again costs; of two that cost the same, how much runs


@dataclass(frozen=True, slots=True)
class Seen:
    """A schedule: its peak beside what is resident, what running again costs in it, and what does."""

    peak_bytes: int
    cost: Cost
    codes: Numbers  # as `laying.codes_in` writes them


@dataclass(slots=True)
class Front:
    """Schedules in order of their peaks; each costs less than all that are lower."""

    seen: list[Seen] = field(default_factory=list)

    def wants(self, peak_bytes: int, cost: Cost) -> bool:
        """Whether no schedule here is as low and as cheap."""
        place = bisect_right(self.seen, peak_bytes, key=_peak)
        return place == 0 or self.seen[place - 1].cost > cost

    def add(self, new: Seen) -> None:
        """Take `new` in, and drop what it makes needless."""
        if not self.wants(new.peak_bytes, new.cost):
            return
        start = bisect_left(self.seen, new.peak_bytes, key=_peak)
        stop = start
        while stop < len(self.seen) and self.seen[stop].cost >= new.cost:
            stop += 1
        self.seen[start:stop] = [new]

    def best(self, peak_bytes: int) -> Seen | None:
        """The cheapest that peaks at no more than that."""
        place = bisect_right(self.seen, peak_bytes, key=_peak)
        return self.seen[place - 1] if place else None


def once_per_graph(search: Callable[[Graph, Effort], Front]) -> Callable[[Graph, Effort], Front]:
    """`search`, made once for a graph whatever is asked of it. A front goes with the graph that it is of."""
    fronts: WeakKeyDictionary[Graph, dict[Effort, Front]] = WeakKeyDictionary()

    def front_of(graph: Graph, effort: Effort) -> Front:
        found = fronts.setdefault(graph, {})
        if effort not in found:
            found[effort] = search(graph, effort)
        return found[effort]

    return front_of


def _peak(seen: Seen) -> int:
    return seen.peak_bytes
