"""Where the nodes of a drawn graph go: the forward on the left and upwards, the backward beside it and down.

Nodes are ops, and what is given to them. Levels are counted by dependencies, so that every arrow of the
forward points up and every arrow of the backward down; an arrow that skips levels has a bend in each of them,
which is kept free for it (after Sugiyama, Tagawa and Toda, 1981). Positions are in columns and levels:
nothing here knows how large a node is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from lowtide.ir.graph import Op
from lowtide.lesson.lesson import Lesson

_SWEEPS = 6  # of ordering each level by its neighbours; more change nothing in graphs that can be read
_APART = 0.8  # columns between the two sides
_BEND_WIDTH = 0.35  # columns


class NodeKind(IntEnum):
    """What a node is."""

    OP = 0
    GIVEN = 1
    BEND = 2


class Node(NamedTuple):
    """An op or a value by its number; bends are counted."""

    number: int
    kind: NodeKind = NodeKind.OP


class Position(NamedTuple):
    """A place: columns to the right, levels up."""

    x: float
    y: float


class Arrow(NamedTuple):
    """`value` goes from one node to another; it crosses if it goes to the other side."""

    source: Node
    target: Node
    value: int
    crosses: bool
    bends: tuple[Position, ...] = ()


@dataclass(frozen=True)
class GraphDrawing:
    """Where everything is, in a frame of `columns` and `levels`, and what is not shown, in words.

    `sides` are the first and last column of the forward and, if there is one, of the backward.
    """

    spots: Mapping[Node, Position]
    arrows: tuple[Arrow, ...]
    columns: float
    levels: float
    sides: tuple[tuple[float, float], ...]
    left_out: str = ""


def planned(lesson: Lesson, *, most_ops: int, detailed: bool) -> GraphDrawing:
    """A place for every op, up to `most_ops`; with details also for what is given, and bends in long arrows.

    Of more ops the first of the forward and the last of the backward are shown, which belong together. Ops
    that make nothing, as they only change what is there, are not shown.
    """
    forward, backward, left_out = _chosen(lesson, most_ops)
    arrows = tuple(_arrows(lesson, (*forward, *backward), detailed))
    within = [arrow for arrow in arrows if not arrow.crosses]
    sides = [_Side(ops, within, detailed) for ops in (forward, backward) if ops]
    height = max((side.highest for side in sides), default=1)
    spots: dict[Node, Position] = {}
    bends: dict[Arrow, tuple[Position, ...]] = {}
    frames: list[tuple[float, float]] = []
    for side in sides:
        begin = frames[-1][1] + _APART if frames else 0.0
        placed = side.spots(begin, height, up=side is sides[0] and bool(forward))
        spots |= {node: spot for node, spot in placed.items() if node.kind is not NodeKind.BEND}
        bends |= {arrow: tuple(placed[bend] for bend in bent) for arrow, bent in side.bent.items()}
        frames.append((begin, begin + side.width))
    drawn = tuple(arrow._replace(bends=bends.get(arrow, ())) for arrow in arrows)
    return GraphDrawing(spots, drawn, frames[-1][1] if frames else 1.0, height, tuple(frames), left_out)


def _chosen(lesson: Lesson, most: int) -> tuple[Sequence[Op], Sequence[Op], str]:
    forward, backward = ([op for op in ops if op.creates] for ops in (lesson.forward, lesson.backward))
    told: list[str] = []
    if idle := len(lesson.graph.ops) - len(forward) - len(backward):
        told.append(f"not shown: {idle:,} ops that make nothing new")
    if len(forward) + len(backward) > most:
        whole = len(forward), len(backward)
        forward, backward = forward[: most // 2], backward[max(len(backward) - most // 2, 0) :]
        told.append(f"shown: the first {len(forward):,} of {whole[0]:,} ops of the forward")
        if backward:
            told.append(f"the last {len(backward):,} of {whole[1]:,} of the backward")
    return forward, backward, ", ".join(told)


def _arrows(lesson: Lesson, ops: Sequence[Op], with_given: bool) -> Iterator[Arrow]:
    """What every op reads, from the node that it comes from."""
    shown, own = {op.id for op in ops}, {op.id for op in lesson.forward}
    used = {value for op in ops if op.id in own for value in op.reads}
    for op in ops:
        later = op.id not in own
        for value in dict.fromkeys(op.reads):
            maker = lesson.graph.creator.get(value)
            if maker is None and with_given:
                yield Arrow(Node(value, NodeKind.GIVEN), Node(op.id), value, later and value in used)
            elif maker in shown:
                yield Arrow(Node(maker), Node(op.id), value, later is (maker in own))


class _Side:
    """One side: its nodes by levels, the way of its long arrows, and where in its level each node stands."""

    def __init__(self, ops: Sequence[Op], arrows: Sequence[Arrow], detailed: bool) -> None:
        ids = {Node(op.id) for op in ops}
        own = [arrow for arrow in arrows if arrow.target in ids]
        self.level = _levels(ops, own)
        self.highest = max([*self.level.values(), 1])
        self.bent: dict[Arrow, tuple[Node, ...]] = {}
        ways = [(arrow.source, *self._bends(arrow, detailed), arrow.target) for arrow in own]
        self.near: dict[Node, list[Node]] = {}
        for a, b in (pair for way in ways for pair in pairwise(way)):
            self.near.setdefault(a, []).append(b)
            self.near.setdefault(b, []).append(a)
        self.x = self._places()
        self.least = min(self.x[node] - _width(node) / 2 for node in self.x)
        self.width = max(self.x[node] + _width(node) / 2 for node in self.x) - self.least

    def spots(self, begin: float, height: float, *, up: bool) -> dict[Node, Position]:
        """The places, from column `begin` on; the levels are stretched to `height`."""
        stretch = height / self.highest
        return {
            node: Position(begin + x - self.least, stretch * (level if up else self.highest - level))
            for node, x in self.x.items()
            for level in (self.level[node],)
        }

    def _bends(self, arrow: Arrow, detailed: bool) -> tuple[Node, ...]:
        """A node for each level that the arrow passes."""
        passed = range(self.level[arrow.source] + 1, self.level[arrow.target]) if detailed else range(0)
        count = sum(map(len, self.bent.values()))
        bends = tuple(Node(count + place, NodeKind.BEND) for place in range(len(passed)))
        self.level.update(zip(bends, passed, strict=True))
        self.bent[arrow] = bends
        return bends

    def _places(self) -> dict[Node, float]:
        rows: dict[int, list[Node]] = {}
        for node in sorted(self.level, key=lambda node: (node.kind is NodeKind.BEND, node)):
            rows.setdefault(self.level[node], []).append(node)
        x: dict[Node, float] = {}
        for row in rows.values():
            x.update(_in_row(row, {node: place for place, node in enumerate(row)}))
        for sweep in range(_SWEEPS):
            for number in sorted(rows, reverse=bool(sweep % 2)):
                wishes = {
                    node: _mean([x[other] for other in self.near.get(node, ())], x[node])
                    for node in rows[number]
                }
                x.update(_in_row(rows[number], wishes))
        return x


def _levels(ops: Sequence[Op], arrows: Sequence[Arrow]) -> dict[Node, int]:
    """How many arrows lead to each op at most; what nothing leads to stands right before what it leads to."""
    arriving: dict[Node, list[Node]] = {}
    leaving: dict[Node, list[Node]] = {}
    for arrow in arrows:
        arriving.setdefault(arrow.target, []).append(arrow.source)
        leaving.setdefault(arrow.source, []).append(arrow.target)
    level: dict[Node, int] = {}
    for node in (Node(op.id) for op in ops):
        level[node] = max((level.get(source, 0) for source in arriving.get(node, ())), default=-1) + 1
    for node in dict.fromkeys((*leaving, *level)):
        if node not in arriving and node in leaving:
            level[node] = min(level[target] for target in leaving[node]) - 1
    return level


def _in_row(row: Sequence[Node], wish: Mapping[Node, float]) -> dict[Node, float]:
    """Places side by side in the order of the wishes, around zero; what is given stands at their left."""
    inner = sorted(
        (node for node in row if node.kind is not NodeKind.GIVEN), key=lambda node: (wish[node], node)
    )
    given = sorted((node for node in row if node.kind is NodeKind.GIVEN), key=lambda node: (wish[node], node))
    if not inner:
        inner, given = given, []
    edge = -sum(map(_width, inner)) / 2
    return {**_lined_up(given, edge - len(given)), **_lined_up(inner, edge)}


def _lined_up(nodes: Iterable[Node], edge: float) -> dict[Node, float]:
    """The middles of nodes that stand one after the other from `edge` on."""
    places: dict[Node, float] = {}
    for node in nodes:
        places[node] = edge + _width(node) / 2
        edge += _width(node)
    return places


def _width(node: Node) -> float:
    return _BEND_WIDTH if node.kind is NodeKind.BEND else 1.0


def _mean(numbers: Sequence[float], otherwise: float) -> float:
    return sum(numbers) / len(numbers) if numbers else otherwise
