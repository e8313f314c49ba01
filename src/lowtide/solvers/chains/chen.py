"""Three ways to place checkpoints, from Chen, Xu, Zhang and Guestrin, *Training deep nets with sublinear
memory cost* (arXiv 1604.06174): equal stretches, a greedy one by size, and halving again and again.

All are rules rather than optimisers: none of them looks at what a plan peaks at, but for the greedy one's
choice among the few plans that it tries. The last stretch of a pass is kept in all of them, because the
backward begins there: to drop it would be to recompute it at once.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment
from lowtide.solvers.chains.worst import worst_moment
from lowtide.solvers.method import Method
from lowtide.solvers.solution import Answer, Status

_REFERENCE = "Chen et al., arXiv 1604.06174"


class ChenSqrt(Method):
    """About √n stretches with as equal a number of layers as can be (Sec. 4.3, Eq. 1).

    With k stretches of layers alike, k checkpoints and n / k layers are held at the worst moment: least at
    k = √n. Where k does not divide n the remainder is spread; `torch.utils.checkpoint_sequential` leaves
    all of it to its last stretch.
    """

    name: ClassVar[str] = "chen-sqrt"
    minimises: ClassVar[str] = "peak, if all layers were alike"
    complexity: ClassVar[str] = "O(√n)"
    reference: ClassVar[str] = f"{_REFERENCE}, Eq. 1"

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer:
        """√n stretches, rounded to the nearest whole number; the last is kept."""
        n = len(chain)
        return Answer(Plan.at(equal_cuts(n, max(1, round(math.sqrt(n))))), Status.FEASIBLE)


def equal_cuts(n: int, stretches: int) -> list[int]:
    """Where to cut n layers into that many stretches, none longer than another by more than a layer."""
    return [n * stretch // stretches for stretch in range(1, stretches)]


class ChenGreedy(Method):
    """A checkpoint wherever the layers since the last one save more than a limit (Alg. 3, appendix A).

    The limit is searched for. At zero there is a checkpoint after each layer: x bytes of checkpoints, y
    at most between two. √(x·y) balances them, and six limits around it, from 1/√2 of it to √2 times it,
    are tried too; the paper scores them by its static allocator, here the referee does. A node's size in
    the paper is that of its one output. A layer of a chain has many nodes: what it adds between
    checkpoints is all that it saves, and as a checkpoint it costs its output.
    """

    name: ClassVar[str] = "chen-greedy"
    minimises: ClassVar[str] = "peak, among eight limits"
    complexity: ClassVar[str] = "O(n)"
    reference: ClassVar[str] = f"{_REFERENCE}, Alg. 3"
    takes_budget: ClassVar[bool] = True

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer | None:
        """The plan of least peak of those tried; with a budget, the one of least time that fits."""
        tried = [
            (plan, worst_moment(chain, plan).peak_bytes, plan.extra_seconds(chain)) for plan in _tried(chain)
        ]
        if budget_bytes is None:
            plan, peak_bytes, _ = min(tried, key=lambda one: (one[1], one[2]))
            return Answer(plan, Status.FEASIBLE, peak_bytes)
        fitting = [one for one in tried if one[1] <= budget_bytes]
        if not fitting:
            return None
        plan, peak_bytes, _ = min(fitting, key=lambda one: (one[2], one[1]))
        return Answer(plan, Status.FEASIBLE, peak_bytes)


def _tried(chain: Chain) -> list[Plan]:
    """The plans of the limits that appendix A tries, without those that repeat."""
    finest, checkpoint_bytes, between_bytes = _greedy(chain, 0.0)
    balanced = math.sqrt(checkpoint_bytes * between_bytes)
    around = np.linspace(balanced / math.sqrt(2), balanced * math.sqrt(2), 6).tolist()
    plans = [finest, *(_greedy(chain, limit)[0] for limit in (balanced, *around))]
    return list(dict.fromkeys(plans))


def _greedy(chain: Chain, limit_bytes: float) -> tuple[Plan, int, int]:
    """The plan for a limit, the bytes of its checkpoints and the most saved between two of them."""
    checkpoints = []
    checkpoint_bytes = between_bytes = since = 0
    for k in range(1, len(chain)):
        since += chain.saved_bytes[k - 1]
        if since > limit_bytes:
            checkpoints.append(k)
            checkpoint_bytes += chain.output_bytes[k]
            between_bytes = max(between_bytes, since)
            since = 0
    return Plan.at(checkpoints), checkpoint_bytes, between_bytes


class ChenRecursive(Method):
    """The chain is halved again and again: about log₂ n tensors are held (Sec. 4.4, with k = 1).

    A pass over a stretch runs its first half without saving, keeps the tensor in the middle, and passes
    over the second half in the same way, which leaves one layer that saves: the last. On the way back the
    first half of each is recomputed, by a pass of the same kind. So at any moment the middle tensors of
    stretches within one another are held, ⌈log₂ n⌉ at most, and what a single layer saves. For each level
    half of the layers run again: n/2 · log₂ n more forwards in all.
    """

    name: ClassVar[str] = "chen-recursive"
    minimises: ClassVar[str] = "tensors held: about log₂ n"
    complexity: ClassVar[str] = "O(n)"
    reference: ClassVar[str] = f"{_REFERENCE}, Eq. 3"

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer:
        """The halved chain. Of an odd number of layers the smaller half comes first: it runs again."""
        return Answer(Plan(_halved(0, len(chain))), Status.FEASIBLE)


def _halved(start: int, stop: int) -> tuple[Segment, ...]:
    """The segments of a pass over layers start + 1 … stop."""
    if stop - start <= 1:
        return ()
    middle = (start + stop) // 2
    return (Segment(start, middle, _halved(start, middle)), *_halved(middle, stop))
