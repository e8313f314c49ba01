"""Which kernels Inductor may fuse: those that a plan has run next to each other, and what adds little to one.

Fused kernels run at once. Where the plan has products between them, either the results of the later one are
there too soon, or what it reads has to be made before its time; a plan that runs ops again to hold less holds
as much as if it did not. What is small, as the sum of a gradient over its rows is, may be made on the way.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cache
from typing import Any

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._inductor.choices.InductorChoices", "decides what is fused"),
    Private("torch._inductor.graph.GraphLowering._update_scheduler", "has it decided"),
    Private("torch._inductor.virtualized.V", "holds what decides"),
)

_SMALL = 8  # so many times as much must be read at once as is made too soon


def keep_order() -> None:
    """Have the graph that Inductor is lowering now fused only as its order allows."""
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    if "_update_scheduler" in vars(graph):
        return
    make_scheduler = graph._update_scheduler

    def in_order() -> None:
        with V.set_choices_handler(_choices()()):
            make_scheduler()

    graph._update_scheduler = in_order


@cache
def _choices() -> type[Any]:
    """A class, once Inductor is there to derive it from."""
    from torch._inductor.choices import InductorChoices

    class InOrder(InductorChoices):
        """Fuses as Inductor does, but nothing across what a plan has put between."""

        def __init__(self) -> None:
            super().__init__()
            self._libraries = _LibraryKernels()

        def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:  # type: ignore[override]
            return InductorChoices.can_fuse(
                scheduler, node1, node2, shared_data_score
            ) and self._libraries.allow(scheduler, node1, node2, shared_data_score)

    return InOrder


class _LibraryKernels:
    """Where in the order of a graph the kernels are that are not generated."""

    def __init__(self) -> None:
        self._of: Any = None  # the scheduler
        self._orders: list[int] = []
        self._names: list[frozenset[str]] = []

    def allow(self, scheduler: Any, one: Any, other: Any, shared_bytes: int) -> bool:
        """Whether two kernels that read so many bytes alike may run at once."""
        if self._of is not scheduler:
            self._read(scheduler)
        earlier, later = sorted((one, other), key=lambda node: int(node.min_order))
        between = slice(
            bisect_right(self._orders, earlier.min_order), bisect_left(self._orders, later.min_order)
        )
        names = self._names[between]
        if not names:
            return True
        too_early = any(not needed.isdisjoint(later.ancestors) for needed in names)
        return not too_early and _SMALL * _made_bytes(later) <= shared_bytes

    def _read(self, scheduler: Any) -> None:
        found = sorted(
            (int(node.min_order), frozenset(node.get_operation_names()))
            for node in scheduler.nodes
            if node.is_extern()
        )
        self._of = scheduler
        self._orders = [order for order, _ in found]
        self._names = [names for _, names in found]


def _made_bytes(node: Any) -> int:
    """What a kernel writes."""
    made = (each.node for each in node.get_outputs())
    return sum(int(each.get_numel()) * int(each.get_dtype().itemsize) for each in made)
