"""What papers and lectures draw to train in less memory, op by op on a captured graph.

    segmented   the forward is cut; what crosses a cut is kept, the rest is computed again before its backward
    recursive   each half of the forward is treated so in turn: about log₂ n crossings are held at once
    without     the results of some ops are dropped, and computed again from those of the others

They are of Chen, Xu, Zhang and Guestrin, *Training deep nets with sublinear memory cost* (arXiv 1604.06174):
Alg. 1 with Eq. 1, Eq. 2 and 3 with k = 1, and Sec. 4.2. All are rules: none looks at what its schedule peaks
at. What may not run twice is kept, and so is what is made with it.

    cut       a place in the forward, named by the op right after it
    crosses   a value does that is made before a cut and used after it, still in the forward
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Op, Phase
from lowtide.ir.keep import droppable, forward_values, keep_only
from lowtide.ir.schedule import Schedule, in_order, straight

Numbers = npt.NDArray[np.int64]


def segmented(graph: Graph, segments: int | Sequence[int]) -> Schedule:
    """Keep what crosses a cut; compute each segment again, once, when its backward begins.

    `segments` is how many there are to be, cut by `even_cuts`, or the cuts themselves. The last segment is
    not computed again if it hangs together: the backward begins there. One segment is the straight
    schedule. Ops run for the first time in graph order, and none more than twice.

    Raises:
        BadRequest: there is no such number of segments, or a cut is not inside the forward.
    """
    cuts = _cuts(graph, segments)
    if not cuts:
        return straight(graph)
    return keep_only(graph, {value for value, life in _lives(graph).items() if _crosses_any(life, cuts)})


def recursive(graph: Graph, pieces: int | Sequence[int]) -> Schedule:
    """Halve the forward again and again: keep what crosses the middle, and come back for the first half.

    `pieces` is how many are left when halving ends, cut by `even_cuts`, or the cuts between them. What a
    single piece makes is held at once when its backward runs. For each level half of the pieces run again:
    of n pieces, n/2 · log₂ n more in all. Ops run for the first time in graph order.

    Raises:
        BadRequest: there is no such number of pieces, or a cut is not inside the forward.
    """
    halving = _Halving(graph, _cuts(graph, pieces))
    return in_order(graph, [*range(_turn(graph)), *halving.backward(0, halving.pieces)])


def without(graph: Graph, dropped: Callable[[Op], bool]) -> Schedule:
    """Keep all that the forward makes but for the results of ops of which `dropped` is true.

    These are computed again, once, where the backward first reads one; ops that read from one another
    together.
    """
    gone = {value for op in graph.ops[: _turn(graph)] if dropped(op) for value in op.creates}
    return keep_only(graph, forward_values(graph) - gone)


def even_cuts(graph: Graph, segments: int) -> tuple[int, ...]:
    """Cuts into about `segments` stretches that make as much for the backward, each cut where little crosses.

    Of the places within a third of a stretch the one is taken that fewest bytes cross, and of these the
    nearest. Where two cuts fall together there is one segment less.

    Raises:
        BadRequest: there is no such number of segments.
    """
    turn = _turn(graph)
    if not 1 <= segments <= max(1, turn):
        raise BadRequest(
            f"cannot cut the forward of {graph.name} into {segments} segments: it has {turn} ops. "
            f"Ask for 1 to {max(1, turn)}."
        )
    saved, crossing = _saved_before(graph, turn), _crossing_bytes(graph, turn)
    stretch = float(saved[-1]) / segments
    places = (_place(saved, crossing, stretch * number, stretch / 3) for number in range(1, segments))
    return tuple(sorted({place for place in places if 0 < place < turn}))


def _place(saved: Numbers, crossing: Numbers, target: float, reach: float) -> int:
    """The place near `target` saved bytes that fewest bytes cross."""
    low, nearest, high = np.searchsorted(saved, [target - reach, target, target + reach])
    window = crossing[low : max(nearest, min(high, len(saved) - 1)) + 1]
    least = np.flatnonzero(window == window.min()) + low
    return int(min(least, key=lambda place: abs(float(saved[place]) - target)))


def _saved_before(graph: Graph, turn: int) -> Numbers:
    """For each cut the bytes made before it that the backward reads; at the end, all of them."""
    read_later = {value for op in graph.ops[turn:] for value in op.reads}
    saved = [
        sum(graph.counted_bytes(value) for value in op.creates if value in read_later)
        for op in graph.ops[:turn]
    ]
    return np.cumsum([0, *saved], dtype=np.int64)


def _crossing_bytes(graph: Graph, turn: int) -> Numbers:
    """For each cut the bytes that cross it."""
    change = np.zeros(turn + 2, np.int64)
    for value, (made, used) in _lives(graph).items():
        change[made + 1] += graph.counted_bytes(value)
        change[used + 1] -= graph.counted_bytes(value)
    return np.cumsum(change, dtype=np.int64)[: turn + 1]


def _cuts(graph: Graph, asked: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(asked, int):
        return even_cuts(graph, asked)
    cuts, turn = tuple(sorted(set(asked))), _turn(graph)
    for cut in cuts:
        if not 0 < cut < turn:
            raise BadRequest(
                f"cannot cut {graph.name} before op {cut}: a cut has forward ops on both sides. "
                f"Name ops from 1 to {turn - 1}."
            )
    return cuts


def _turn(graph: Graph) -> int:
    """Where the forward is over."""
    return next((op.id for op in graph.ops if op.phase is not Phase.FORWARD), len(graph.ops))


def _lives(graph: Graph) -> Mapping[int, tuple[int, int]]:
    """For each value of the forward the op that makes it and the last forward op that reads it."""
    lives: dict[int, tuple[int, int]] = {}
    for op in graph.ops[: _turn(graph)]:
        for value in op.reads:
            if value in lives:
                lives[value] = lives[value][0], op.id
        for value in op.creates:
            lives[value] = op.id, op.id
    return lives


def _crosses_any(life: tuple[int, int], cuts: Sequence[int]) -> bool:
    made, used = life
    return bisect_right(cuts, made) < bisect_right(cuts, used)


class _Halving:
    """The ops of the backward, and what runs again before them."""

    def __init__(self, graph: Graph, cuts: Sequence[int]) -> None:
        self.graph = graph
        self.pieces = len(cuts) + 1
        self.starts = (0, *cuts, _turn(graph))
        self.may_repeat = droppable(graph)
        self.last_piece = {value: bisect_right(cuts, used) for value, (_, used) in _lives(graph).items()}
        self.backward_of = self._assigned()

    def _assigned(self) -> list[list[int]]:
        """The backward ops of each piece.

        The backward of a forward op reads what that op read or made, so nothing whose last use was before
        it: where an op reads what was over by the end of a piece, the backward has come down to that piece.
        """
        found: list[list[int]] = [[] for _ in range(self.pieces)]
        piece = self.pieces - 1
        for op in self.graph.ops[self.starts[-1] :]:
            reads = (value for value in op.reads if self.graph.creator.get(value) in self.may_repeat)
            piece = min([piece, *(self.last_piece[value] for value in reads)])
            found[piece].append(op.id)
        return found

    def backward(self, start: int, stop: int) -> Iterator[int]:
        """The backward of these pieces, which have just been run, in order, from what crosses into them."""
        if stop - start == 1:
            yield from self.backward_of[start]
            return
        middle = (start + stop) // 2
        yield from self.backward(middle, stop)
        yield from self._again(start, middle)
        yield from self.backward(start, middle)

    def _again(self, start: int, stop: int) -> Iterator[int]:
        """The ops of these pieces that their backward depends on, but for what is held: it crosses `stop`."""
        wanted = {
            value
            for piece in range(start, stop)
            for op in self.backward_of[piece]
            for value in self.graph.ops[op].reads
        }
        needed: list[int] = []
        for number in range(self.starts[stop] - 1, self.starts[start] - 1, -1):
            op = self.graph.ops[number]
            held = any(self.last_piece[value] >= stop for value in op.creates)
            if number in self.may_repeat and not held and not wanted.isdisjoint(op.creates):
                needed.append(number)
                wanted.update(op.reads)
        return reversed(needed)
