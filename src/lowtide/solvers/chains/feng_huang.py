"""Feng and Huang's optimal gradient checkpointing: a shortest path for every threshold.

Both on chains and on arbitrary graphs what is minimised is the textbook sum: the bytes of everything
kept, and of the largest segment between kept tensors. The largest segment is guessed: every sum that a
segment can have is tried as a threshold T. Two vertices are *accessible* from each other if what lies
strictly between them is at most T; the cheapest path through the accessibility graph is the cheapest
way to keep all segments within T. The best sum of path and threshold wins.

On a graph the thresholds come from its division tree (see `division`). A part heavier than T is divided:
in a line the shortest path decides which of its vertices are kept, elsewhere all dividing vertices are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from lowtide.chain.chain import Chain, Ints
from lowtide.chain.plan import Plan
from lowtide.ir.graph import Graph
from lowtide.ir.keep import forward_values
from lowtide.solvers.chains.division import Part, Shape, Trunk
from lowtide.solvers.jit import Unit
from lowtide.solvers.method import GraphMethod
from lowtide.solvers.solution import Answer, GraphAnswer, Status

_loops = Unit()


class FengHuang(GraphMethod):
    """One shortest path for each of the O(n²) sums that a segment can have.

    Feng & Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021.
    """

    name: ClassVar[str] = "feng-huang"
    minimises: ClassVar[str] = "the textbook sum: what is kept and the largest segment"
    complexity: ClassVar[str] = "O(n⁴)"
    reference: ClassVar[str] = "Feng & Huang, CVPR 2021 (arXiv 1808.00079)"
    proves: ClassVar[str] = "always for the textbook sum of a chain; never of a graph, nor for the peak"

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer | None:
        """A plan with the least textbook sum over tensors 1 … n, and among all of these least recomputed.

        That is exact. A best plan is a shortest path for the threshold that is its own largest segment,
        and of the shortest paths the one is taken whose last checkpoint comes first: what comes before
        that is recomputed. A checkpoint at the output, tensor n, counts like any other, but never helps:
        without it the largest segment grows by no more than it weighs.
        """
        line = Part.line(chain.output_bytes[1:])
        n = len(chain)
        best = (line.weight, 0)  # nothing is kept
        checkpoints: tuple[int, ...] = ()
        for threshold in _thresholds(line):
            if threshold > best[0]:
                break
            path_bytes, path = _cheapest_run(line, 0, n + 1, threshold)
            inner = tuple(cut for cut in path if cut < n)
            found = (path_bytes + threshold, max(inner, default=0))
            if found < best:
                best, checkpoints = found, inner
        return Answer(Plan.at(checkpoints), Status.OPTIMAL, objective_bytes=best[0])

    def choose_kept(self, graph: Graph) -> GraphAnswer:
        """What to keep of a forward: the best that any threshold of its division tree leads to.

        The objective is exact for the answer: all bytes kept, whether by choice or because they cannot
        be recomputed, and those of the largest segment as `keeping` recomputes it. Of equal answers the
        one is taken whose ops left to recompute take least time; there may be others that take less.
        """
        trunk = Trunk.of(graph)
        tree = trunk.divide()
        free = {
            value
            for vertex in trunk.dropped(())
            for op in trunk.ops[vertex]
            for value in graph.ops[op].creates
        }
        always = forward_values(graph) - free
        always_bytes = sum(map(graph.counted_bytes, always))

        def judged(cuts: tuple[int, ...]) -> tuple[int, float]:
            again = (op for vertex in trunk.dropped(cuts) for op in trunk.ops[vertex])
            paid = sum(trunk.weights[cut] for cut in cuts)
            heaviest = trunk.heaviest_segment(cuts)
            return always_bytes + paid + heaviest, sum(graph.ops[op].seconds for op in again)

        chosen: tuple[int, ...] = ()
        best = judged(chosen)
        before = chosen
        for threshold in _thresholds(tree):
            if always_bytes + threshold > best[0]:
                break
            cuts = tuple(sorted(_kept_cuts(tree, threshold)))
            if cuts != before and (found := judged(cuts)) < best:
                best, chosen = found, cuts
            before = cuts
        kept = {value for cut in chosen for op in trunk.ops[cut] for value in graph.ops[op].creates}
        return GraphAnswer(always | kept, Status.FEASIBLE, best[0])


def _thresholds(part: Part) -> list[int]:
    """Every sum that a segment can have which this tree leads to, ascending; 0 keeps all of them empty."""
    return sorted({0, *_sums(part)})


def _sums(part: Part) -> Iterator[int]:
    yield part.weight
    if part.shape is Shape.LINE:
        between = part.before[np.newaxis, :] - part.after[:, np.newaxis]
        yield from np.unique(between[np.triu_indices(len(between), 1)]).tolist()
    for inner in part.parts:
        yield from _sums(inner)


def _kept_cuts(part: Part, threshold: int) -> Iterator[int]:
    """What to keep inside a part whose ends are kept, so that no segment weighs more than the threshold."""
    if part.weight <= threshold:
        return
    if part.shape is not Shape.LINE:
        yield from part.cuts
        for inner in part.parts:
            yield from _kept_cuts(inner, threshold)
        return
    heavy = [index for index, inner in enumerate(part.parts) if inner.weight > threshold]
    end = len(part.cuts) + 1
    for start, stop in zip([0, *(index + 1 for index in heavy)], [*heavy, end], strict=True):
        yield from _cheapest_run(part, start, stop, threshold)[1]
    beside_heavy = {position for index in heavy for position in (index, index + 1)} - {0, end}
    yield from (part.cuts[position - 1] for position in beside_heavy)
    for index in heavy:
        yield from _kept_cuts(part.parts[index], threshold)


def _cheapest_run(line: Part, start: int, stop: int, threshold: int) -> tuple[int, tuple[int, ...]]:
    """The cheapest cuts strictly between two vertices of a line, counted with its ends, and their bytes."""
    if stop - start < 2:
        return 0, ()
    previous = _shortest_path(line.before[start : stop + 1], line.after[start : stop + 1], threshold)
    path = []
    position = int(previous[-1])
    while position:
        path.append(start + position - 1)
        position = int(previous[position])
    return sum(line.cut_weights[index] for index in path), tuple(line.cuts[index] for index in reversed(path))


def _shortest_path(before: Ints, after: Ints, threshold: int) -> Ints:
    """The vertex before each on the cheapest path to it, from the first vertex, in the accessibility graph.

    Of vertices as cheap to come from the first is taken.
    """
    cost, previous = np.zeros((2, len(before)), np.int64)
    _relax_edges(before, after, threshold, cost, previous)
    return previous


@_loops.compiled
def _relax_edges(before: Ints, after: Ints, threshold: int, cost: Ints, previous: Ints) -> None:
    for later in range(1, len(before)):
        best = later - 1
        for earlier in range(later - 2, -1, -1):
            if before[later] - after[earlier] > threshold:
                break  # and all the more from further back
            if cost[earlier] <= cost[best]:
                best = earlier
        previous[later] = best
        cost[later] = cost[best] + after[later] - before[later]
