"""How Feng and Huang take a forward apart: the division tree.

    Trunk = vertices, which read what earlier ones make      a forward, with all that hangs on it folded in
    Part  = what lies between two vertices, its ends, and is joined to the rest only there

A part is divided, as soon as one of these works, in a *line* (at the vertices that all paths through it
pass), in *branches* (that meet only at its ends), or into the largest smaller parts that do not overlap,
with the vertices left over between them (a *knot*). Once the ends of a part are kept, nothing that
happens inside it is connected with anything outside.

The graph code is written out here: it is three short loops over bit sets, and the core depends on
numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

import numpy as np

from lowtide.chain.chain import Ints
from lowtide.ir.graph import Graph, Role
from lowtide.ir.keep import droppable, forward_values, makers


class Shape(StrEnum):
    """How a part is divided."""

    LINE = "line"
    BRANCHES = "branches"
    KNOT = "knot"


@dataclass(frozen=True)
class Part:
    """A node of the division tree.

    `cuts` are the vertices that divide it, `cut_weights` what each weighs. In a line, part i lies between
    cut i − 1 and cut i, empty or not; elsewhere the order means nothing.
    """

    shape: Shape
    cuts: tuple[int, ...]
    cut_weights: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def line(cls, weights: Sequence[int]) -> Part:
        """Vertices 1 … n in a row, with nothing between them."""
        nothing = cls(Shape.KNOT, (), (), ())
        cuts = tuple(range(1, len(weights) + 1))
        return cls(Shape.LINE, cuts, tuple(weights), (nothing,) * (len(weights) + 1))

    @cached_property
    def weight(self) -> int:
        """Everything strictly between the ends."""
        return sum(self.cut_weights) + sum(part.weight for part in self.parts)

    @cached_property
    def before(self) -> Ints:
        """In a line: what lies strictly between its start and each of start, cuts and stop."""
        parts = [part.weight for part in self.parts]
        return np.cumsum([0, 0, *self.cut_weights], dtype=np.int64) + np.cumsum([0, *parts], dtype=np.int64)

    @cached_property
    def after(self) -> Ints:
        """The same with the vertex itself."""
        return self.before + np.asarray([0, *self.cut_weights, 0], np.int64)


@dataclass(frozen=True)
class Trunk:
    """The vertices that can be chosen: each is some forward ops whose values are kept together or not at all.

    Vertices are numbered from 1, in an order in which each comes after those it reads from; 0 stands for
    everything that is there anyway, and the number after the last for the end of the forward.
    `weights` and `ops` have an entry for each of these, ends included. A vertex that must be kept
    whatever is chosen weighs nothing: it is paid for.
    """

    weights: tuple[int, ...]
    ops: tuple[tuple[int, ...], ...]
    kept_anyway: frozenset[int]
    reads_from: tuple[int, ...]  # bit sets
    read_by: tuple[int, ...]

    @classmethod
    def of(cls, graph: Graph) -> Trunk:
        """The trunk of a graph's forward. What is no vertex and in none is always to be kept.

        Folded into its only reader is what does not depend on the batch (a cast weight, positions);
        folded into what it reads is what no later forward op depends on (a mask for the backward).
        Otherwise nothing would ever lie on all paths. Where that is not possible, because it has several
        readers or reads several vertices, it is kept.
        """
        repeated = droppable(graph)
        folded = _folded(graph, repeated)
        members: dict[int, list[int]] = {}
        for op, vertex in folded.items():
            members.setdefault(vertex, []).append(op)
        numbers = {vertex: number for number, vertex in enumerate(sorted(members), start=1)}
        end = len(numbers) + 1
        edges = [
            (numbers[folded[maker]], numbers[vertex])
            for op, vertex in folded.items()
            for maker in makers(graph, op) & folded.keys()
            if folded[maker] != vertex
        ]
        reading, read = {later for _, later in edges}, {earlier for earlier, _ in edges}
        edges += [(0, number) for number in numbers.values() if number not in reading]
        edges += [(number, end) for number in numbers.values() if number not in read]
        weights = {
            numbers[vertex]: sum(_bytes_of(graph, op) for op in ops if op in repeated)
            for vertex, ops in members.items()
        }
        return cls(
            weights=tuple(weights.get(number, 0) for number in range(end + 1)),
            ops=((), *(tuple(sorted(members[vertex])) for vertex in sorted(members)), ()),
            kept_anyway=frozenset(number for vertex, number in numbers.items() if vertex not in repeated),
            reads_from=_bit_sets(end + 1, [(later, earlier) for earlier, later in edges]),
            read_by=_bit_sets(end + 1, edges),
        )

    @property
    def end(self) -> int:
        """The number of the far end."""
        return len(self.weights) - 1

    def divide(self) -> Part:
        """The division tree of the whole."""
        return _divide(self, 0, self.end, tuple(range(1, self.end)))

    def dropped(self, kept: Sequence[int]) -> list[int]:
        """The vertices to recompute if those in `kept` are not."""
        return sorted(set(range(1, self.end)) - set(kept) - self.kept_anyway)

    def heaviest_segment(self, kept: Sequence[int]) -> int:
        """The most that vertices weigh which hang together without passing one that is kept."""
        pieces = _connected(self, self.dropped(kept))
        return max((sum(self.weights[vertex] for vertex in piece) for piece in pieces), default=0)


# From ops to vertices -------------------------------------------------------------------------------


def _folded(graph: Graph, repeated: frozenset[int]) -> dict[int, int]:
    """The vertex that each op belongs to, as the op it is named after; absent are ops that are no choice."""
    making = {graph.creator[value] for value in forward_values(graph)}
    readers: dict[int, list[int]] = {op: [] for op in making}
    for op in sorted(making):
        for maker in makers(graph, op):
            readers[maker].append(op)
    moving = _depending_on_the_batch(graph, making)
    leading = _leading_on(graph, readers, moving)

    vertex = {op: op for op in sorted(leading)}
    for op in sorted(making - moving, reverse=True):
        into = {vertex.get(reader) for reader in readers[op]}
        if op in repeated and len(readers[op]) == 1 and None not in into:
            vertex[op] = vertex[readers[op][0]]
    for op in sorted(moving - leading):
        read = {vertex[maker] for maker in makers(graph, op) if maker in vertex}
        if op in repeated and len(read) < 2:
            vertex[op] = read.pop() if read else op
    # Folding into what must be kept would be keeping.
    return {op: into for op, into in vertex.items() if op == into or into in repeated}


def _depending_on_the_batch(graph: Graph, making: set[int]) -> set[int]:
    """The ops that read more than parameters and buffers; all of them if none does."""
    constant = {
        value for value in graph.resident if graph.values[value].role in (Role.PARAMETER, Role.BUFFER)
    }
    moving: set[int] = set()
    for op in sorted(making):
        if any(
            graph.creator[value] in moving if value in graph.creator else value not in constant
            for value in graph.ops[op].reads
        ):
            moving.add(op)
    return moving or making


def _leading_on(graph: Graph, readers: Mapping[int, Sequence[int]], moving: set[int]) -> set[int]:
    """The last op and those that make what outlives the step, with all that these depend on."""
    leading: set[int] = set()
    for op in sorted(moving, reverse=True):
        last = not leading or not graph.outputs.isdisjoint(graph.ops[op].creates)
        if last or not leading.isdisjoint(readers[op]):
            leading.add(op)
    return leading


def _bytes_of(graph: Graph, op: int) -> int:
    return sum(graph.counted_bytes(value) for value in graph.ops[op].creates)


# From vertices to parts -----------------------------------------------------------------------------


def _divide(trunk: Trunk, start: int, stop: int, inside: Sequence[int]) -> Part:
    if cuts := _on_all_paths(trunk, start, inside):
        ends = [start, *cuts, stop]
        parts = tuple(
            _divide(trunk, first, last, tuple(vertex for vertex in inside if first < vertex < last))
            for first, last in pairwise(ends)
        )
        return _part(trunk, Shape.LINE, cuts, parts)
    pieces = _connected(trunk, inside)
    if len(pieces) > 1:
        branches = tuple(_divide(trunk, start, stop, piece) for piece in pieces)
        return _part(trunk, Shape.BRANCHES, (), branches)
    chosen = _largest_apart(trunk, start, stop, inside)
    covered = _bits(vertex for _, _, within in chosen for vertex in within)
    left = tuple(vertex for vertex in inside if not covered >> vertex & 1)
    return _part(trunk, Shape.KNOT, left, tuple(_divide(trunk, *part) for part in chosen))


def _part(trunk: Trunk, shape: Shape, cuts: tuple[int, ...], parts: tuple[Part, ...]) -> Part:
    return Part(shape, cuts, tuple(trunk.weights[cut] for cut in cuts), parts)


def _on_all_paths(trunk: Trunk, start: int, inside: Sequence[int]) -> tuple[int, ...]:
    """The vertices that no edge leaps over; an edge from end to end joins nothing and is not looked at."""
    mask = _bits(inside)
    reach = max(_members(trunk.read_by[start] & mask), default=0)
    found = []
    for vertex in inside:
        if reach <= vertex:
            found.append(vertex)
        reach = max(reach, trunk.read_by[vertex].bit_length() - 1)
    return tuple(found)


def _connected(trunk: Trunk, inside: Sequence[int]) -> list[tuple[int, ...]]:
    """The pieces that `inside` falls into once both ends are taken away."""
    left = _bits(inside)
    pieces = []
    while left:
        piece = grown = left & -left
        while grown:
            near = 0
            for vertex in _members(grown):
                near |= trunk.read_by[vertex] | trunk.reads_from[vertex]
            grown = near & left & ~piece
            piece |= grown
        left &= ~piece
        pieces.append(tuple(_members(piece)))
    return pieces


_Span = tuple[int, int, tuple[int, ...]]  # both ends, and what is inside


def _largest_apart(trunk: Trunk, start: int, stop: int, inside: Sequence[int]) -> list[_Span]:
    """Smaller parts of a knot, the one with most edges first, each taken if it overlaps none before it."""
    within = _bits(inside)
    after: dict[int, int] = {}
    for vertex in reversed((start, *inside)):
        near = trunk.read_by[vertex] & within
        after[vertex] = near
        for later in _members(near):
            after[vertex] |= after[later]
    before: dict[int, int] = {}
    for vertex in (*inside, stop):
        near = trunk.reads_from[vertex] & within
        before[vertex] = near
        for earlier in _members(near):
            before[vertex] |= before[earlier]

    found: list[tuple[int, int, int, int]] = []
    for first in (start, *inside):
        for last in (*inside, stop):
            between = after[first] & before[last]
            if between and (first, last) != (start, stop) and _is_apart(trunk, first, last, between):
                found.append((-_edges(trunk, last, between), first, last, between))
    taken, ends, chosen = 0, 0, []
    for _, first, last, between in sorted(found):
        mine = 1 << first | 1 << last
        if not (between & (taken | ends) or mine & taken):
            taken, ends = taken | between, ends | mine
            chosen.append((first, last, tuple(_members(between))))
    return chosen


def _is_apart(trunk: Trunk, first: int, last: int, between: int) -> bool:
    """Whether what is between is joined to the rest only at its ends."""
    allowed_before, allowed_after = between | 1 << first, between | 1 << last
    return all(
        not (trunk.reads_from[vertex] & ~allowed_before or trunk.read_by[vertex] & ~allowed_after)
        for vertex in _members(between)
    )


def _edges(trunk: Trunk, last: int, between: int) -> int:
    leaving = (trunk.reads_from[last] & between).bit_count()
    return leaving + sum(trunk.reads_from[vertex].bit_count() for vertex in _members(between))


def _bits(members: Iterator[int] | Sequence[int]) -> int:
    found = 0
    for member in members:
        found |= 1 << member
    return found


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _bit_sets(count: int, pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    found = [0] * count
    for one, other in pairs:
        found[one] |= 1 << other
    return tuple(found)
