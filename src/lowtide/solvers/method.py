"""What a method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import ClassVar

from lowtide.chain.chain import Chain
from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph
from lowtide.solvers.solution import Answer, GraphAnswer, ScheduleAnswer


class Effort(StrEnum):
    """How long `auto` and `evict` search.

    A quick search does an eighth of the work, aims for a quarter of the peaks, and for each only once. Its
    plans keep every promise of a full one's, and add a little more time.
    """

    FULL = "full"
    QUICK = "quick"


class About(ABC):
    """What people are told of a method; `lowtide solvers` prints it."""

    name: ClassVar[str]
    minimises: ClassVar[str]
    complexity: ClassVar[str]  # n: layers, or ops
    reference: ClassVar[str]
    proves: ClassVar[str] = ""  # when its status is OPTIMAL; empty: never
    takes_budget: ClassVar[bool] = False


class Method(About):
    """Chooses what to recompute in a chain.

    A new one is a file with a subclass, and a line in the registry.
    """

    @abstractmethod
    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer | None:
        """A plan for `chain`; with a budget the one that adds the least time within it, None if none fits.

        Called with a budget only if the method takes one. The budget is on the whole peak, base and
        input included.
        """


class GraphMethod(Method):
    """A method that takes a captured graph as well as a chain."""

    @abstractmethod
    def choose_kept(self, graph: Graph) -> GraphAnswer:
        """Which values of the forward to keep; `keep_only` makes the schedule."""


class Scheduler(About):
    """Decides op by op, on a captured graph, what runs again and when."""

    takes_budget: ClassVar[bool] = True

    @abstractmethod
    def within(self, graph: Graph, budget_bytes: int) -> ScheduleAnswer | None:
        """The schedule that adds the least time of those that peak at `budget_bytes` or less.

        None if none is found. The budget is on the whole peak, what is resident included, rounded as
        the allocator of the graph's device rounds.
        """

    @abstractmethod
    def lowest(self, graph: Graph) -> ScheduleAnswer:
        """The schedule with the lowest peak that is found, and of those the one that adds the least time."""


class Searcher(Scheduler):
    """A scheduler that finds what a search of fixed length comes upon.

    Raises:
        BadRequest: there is no such effort.
    """

    def __init__(self, effort: str = Effort.FULL) -> None:
        self.effort = effort_named(effort)


def effort_named(name: str) -> Effort:
    """The effort of that name.

    Raises:
        BadRequest: there is none.
    """
    try:
        return Effort(name)
    except ValueError:
        raise BadRequest(f"there is no effort '{name}'; it is one of {', '.join(Effort)}.") from None
