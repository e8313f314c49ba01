"""Where else a search may begin than with everything held: plans as the literature has them, op by op."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from lowtide.chain.cuts import is_heavy
from lowtide.ir.graph import Graph, Phase
from lowtide.solvers.jit import Numbers
from lowtide.solvers.ops.search.encode import change_to, codes_in, column, slots_of
from lowtide.solvers.ops.search.moves import forget
from lowtide.solvers.ops.search.state import Work
from lowtide.solvers.ops.segments import recursive

SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
PIECES = (8, 32, 128)  # an op runs again at most log₂ of this many times


def starts(graph: Graph, work: Work) -> Iterator[Numbers]:
    """What runs again if only products are kept, if the forward is cut into more and more segments, and if it
    is halved again and again."""
    turn = next((op.id for op in graph.ops if op.phase is not Phase.FORWARD), len(graph.ops))
    if turn == len(graph.ops):
        return
    slots = slots_of(work)
    passing = _passing(work, turn)
    numbers = [cuts for cuts in SEGMENTS if cuts < turn // 4]
    for kept in (_products(graph), *(_crossing(work, _cuts(passing, cuts), turn) for cuts in numbers)):
        change_to(work, slots, np.empty(0, np.int64))
        forget(work, slots, column([value in kept for value in range(len(work.size))]), turn)
        yield codes_in(slots)
    for pieces in PIECES:
        if pieces < turn // 4:
            yield _halved(graph, pieces)


def _halved(graph: Graph, pieces: int) -> Numbers:
    """What runs again if the forward is halved down to so many pieces: what runs before each op in turn."""
    codes: list[int] = []
    waiting: list[int] = []
    done: set[int] = set()
    for op in recursive(graph, pieces).computed:
        if op in done:
            waiting.append(op)
            continue
        done.add(op)
        codes.extend(again * len(graph.ops) + op for again in waiting)
        waiting.clear()
    return np.asarray(sorted(set(codes)), np.int64)


def _products(graph: Graph) -> frozenset[int]:
    """What convolutions and matrix products make: dear to compute again, for its size."""
    return frozenset(value for op in graph.ops if is_heavy(op) for value in op.creates)


def _passing(work: Work, turn: int) -> Numbers:
    """For each place in the forward the bytes made before it and used after it, still in the forward."""
    change = np.zeros(turn + 1, np.int64)
    for value, (begin, end) in _forward_lives(work, turn):
        change[begin + 1] += work.size[value]
        change[end + 1] -= work.size[value]
    return np.cumsum(change)[:turn]


def _forward_lives(work: Work, turn: int) -> Iterator[tuple[int, tuple[int, int]]]:
    for value in work.evictable:
        used = [op for op in work.uses[work.uses_from[value] : work.uses_from[value + 1]] if op < turn]
        if used:
            yield int(value), (int(work.maker[value]), int(used[-1]))


def _cuts(passing: Numbers, count: int) -> list[int]:
    """Places about as far from one another, each where least passes nearby."""
    reach = max(1, len(passing) // (3 * (count + 1)))
    found: list[int] = []
    for number in range(1, count + 1):
        middle = len(passing) * number // (count + 1)
        low, high = max(1, middle - reach), min(len(passing) - 1, middle + reach)
        found.append(low + int(passing[low : high + 1].argmin()))
    return found


def _crossing(work: Work, cuts: Collection[int], turn: int) -> set[int]:
    """What is made before a cut and used after it."""
    return {
        value for value, (begin, end) in _forward_lives(work, turn) if any(begin < cut <= end for cut in cuts)
    }
