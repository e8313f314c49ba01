"""What a method is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from lowtide.chain import Chain
from lowtide.graph import Graph
from lowtide.solution import Answer, GraphAnswer


class Method(ABC):
    """Chooses what to recompute. A new one is a file with a subclass, and a line in the registry.

    The strings are for people: `lowtide solvers` prints them.
    """

    name: ClassVar[str]
    minimises: ClassVar[str]
    complexity: ClassVar[str]  # n: layers
    reference: ClassVar[str]
    proves: ClassVar[str] = ""  # when its status is OPTIMAL; empty: never
    takes_budget: ClassVar[bool] = False

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
