"""What no schedule that runs the ops in graph order can do without: bytes, and seconds within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lowtide.solvers.jit import Numbers
from lowtide.solvers.ops.search.state import Work


def must_hold(work: Work) -> Numbers:
    """For each slot the bytes that its op needs at once, and what is alive that cannot be made again."""
    held = np.zeros(len(work.cost) + 1, np.int64)
    for value, maker in enumerate(work.maker):
        if maker < 0 or not work.size[value]:
            continue
        uses = work.uses[work.uses_from[value] : work.uses_from[value + 1]]
        last = len(work.cost) - 1 if work.lasting[value] else max([maker, *uses])
        if work.repeats[maker]:
            for slot in {maker, *uses}:  # only while it is touched
                held[slot] += work.size[value]
                held[slot + 1] -= work.size[value]
        else:
            held[maker] += work.size[value]
            held[last + 1] -= work.size[value]
    return np.cumsum(held)[:-1] + np.asarray(work.workspace, np.int64)


def least_seconds(work: Work, seconds: Sequence[float], budget: int) -> float:
    """What running again adds at least if the step grows by no more than `budget`.

    What is alive at some op without recomputation and is not held there has to be made again later, which
    takes one run of its maker. Dropping the parts of the makers that free most for their cost until the
    rest fits costs no more than any choice of whole ones. The bound is that of the op where most is alive.
    """
    ops = len(work.cost)
    alive = np.zeros(ops + 1, np.int64)
    spans: list[tuple[int, int, int, int]] = []
    for value in work.evictable:
        maker = work.maker[value]
        touches = [maker, *work.uses[work.uses_from[value] : work.uses_from[value + 1]]]
        for begin, end in pairwise(touches):
            if end > begin + 1:
                spans.append((begin, end, maker, work.size[value]))
                alive[begin + 1] += work.size[value]
                alive[end] -= work.size[value]
    total = np.cumsum(alive)[:-1] + must_hold(work)
    if not ops or int(total.max()) <= budget:
        return 0.0
    slot = int(total.argmax())
    freed: dict[int, int] = {}
    for begin, end, maker, size in spans:
        if begin < slot < end:
            freed[maker] = freed.get(maker, 0) + size
    excess = int(total[slot]) - budget
    cost = 0.0
    for maker in sorted(freed, key=lambda maker: (seconds[maker] / freed[maker], maker)):
        part = min(1.0, excess / freed[maker])
        cost += part * seconds[maker]
        excess -= freed[maker]
        if excess <= 0:
            break
    return cost
