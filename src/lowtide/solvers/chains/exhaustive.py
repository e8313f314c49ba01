"""Every plan there is, tried: the yardstick for small chains."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import ClassVar

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment
from lowtide.chain.unroll import unrolled_graph, unrolled_schedule
from lowtide.errors import BadRequest
from lowtide.ir.simulate import EXACT, simulate
from lowtide.solvers.method import Method
from lowtide.solvers.solution import Answer, Status

_MOST_LAYERS = 16  # 32,768 plans, half a minute


class Exhaustive(Method):
    """Replays every plan of one level. It knows no formula, so it can judge those that do.

    Of the plans with the least peak it returns one that adds the least time.
    """

    name: ClassVar[str] = "exhaustive"
    minimises: ClassVar[str] = "the peak"
    complexity: ClassVar[str] = "O(n 2ⁿ)"
    reference: ClassVar[str] = f"every plan is replayed; at most {_MOST_LAYERS} layers"
    proves: ClassVar[str] = "always, among plans of one level"
    takes_budget: ClassVar[bool] = True

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer | None:
        """The plan with the least peak, or the one that adds the least time within the budget.

        Raises:
            BadRequest: the chain is too long for this.
        """
        if len(chain) > _MOST_LAYERS:
            raise BadRequest(
                f"exhaustive replays every plan, and {chain.name} with its {len(chain)} layers has "
                f"2^{len(chain) - 1} of them; it takes chains of at most {_MOST_LAYERS} layers. "
                "Use hong-quadratic, which finds the same, or rotor, which finds nested plans too."
            )
        graph = unrolled_graph(chain)  # the same for every plan
        best, least_bytes = None, math.inf
        for plan in sorted(single_level_plans(len(chain)), key=lambda plan: plan.extra_seconds(chain)):
            peak_bytes = simulate(graph, unrolled_schedule(chain, plan), EXACT).peak_bytes
            if budget_bytes is not None and peak_bytes <= budget_bytes:
                return Answer(plan, Status.OPTIMAL, peak_bytes)
            if peak_bytes < least_bytes:
                best, least_bytes = Answer(plan, Status.OPTIMAL, peak_bytes), peak_bytes
        return best if budget_bytes is None else None


def single_level_plans(n: int) -> Iterator[Plan]:
    """Every plan of one level for n layers that keeps the last layer: one for each set of checkpoints.

    To recompute the last stretch as well never lowers a peak: it only adds the gradient of the loss.
    """
    for count in range(n):
        yield from map(Plan.at, combinations(range(1, n), count))


def nested_plans(n: int) -> Iterator[Plan]:
    """Every memory-persistent plan for n layers: what is saved stays until its backward.

    In each pass over a stretch, the chain or a segment that is recomputed, the last layer is saved, for its
    backward comes next; every other layer is saved or is in a segment. There are 1, 2, 6, 22, 90, 394, …
    such plans for n = 1, 2, 3, …: the large Schröder numbers.
    """
    return map(Plan, _passes(0, n))


def _passes(start: int, stop: int) -> Iterator[tuple[Segment, ...]]:
    """The segments of every pass over layers start + 1 … stop, whose last layer is saved."""
    return _stretches(start, stop - 1)


def _stretches(start: int, stop: int) -> Iterator[tuple[Segment, ...]]:
    """Every way to save layers start + 1 … stop or put them into segments."""
    if start == stop:
        yield ()
        return
    yield from _stretches(start + 1, stop)  # the first layer is saved
    for middle in range(start + 1, stop + 1):
        for inside in _passes(start, middle):
            for after in _stretches(middle, stop):
                yield (Segment(start, middle, inside), *after)
