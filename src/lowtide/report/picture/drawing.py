"""A graph as a picture, one colour for each piece of memory: the forward goes up, the backward comes down.

Colours repeat when there are many pieces, so each node also carries the number of its tag. A thick frame says
that a result was written over an input, a dashed one that it took a free tag; the figure in the corner is the
counter with which the value begins: the readers that it waits for.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from lowtide.arena.tags import Given, How
from lowtide.errors import MissingExtra
from lowtide.lesson.lesson import Lesson
from lowtide.lesson.phrasing import shape_text, short
from lowtide.report.picture.brush import Brush, Stop
from lowtide.report.picture.layering import Arrow, GraphDrawing, Node, NodeKind, Position, planned
from lowtide.report.picture.legend import WIDTH_INCHES, height_inches, paint_legend
from lowtide.report.picture.plot import painted
from lowtide.report.text.lesson import numbers_text
from lowtide.text.names import without_middle

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_READABLE = 150  # nodes; more are drawn small and without words
_MOST_OPS = 240  # more would make a picture of several metres
_LETTER = 0.0088  # inches for each point of its size: some air, for viewers have fonts of their own
_NAME, _SMALL, _FIGURE = 10, 8, 6  # points
_WIDEST = 1.95  # inches of words in a node
_BADGE = 0.27  # inches at either side of them
_FLOOR, _CEILING = 0.85, 1.0  # inches below and above the graph
_MARGIN = 0.35  # inches at its left
_LONGEST_TITLE = 90
_PLAIN = "names, sizes, counters and what is given are not shown; the figures are tags"


class NodeSizes(NamedTuple):
    """How large nodes are, and how far apart, in inches; without `words` they are small."""

    width: float
    height: float
    across: float
    up: float
    words: bool


def require_drawing() -> None:
    """Raise MissingExtra unless graphs can be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot", "drawing a graph")


def draw_lesson(lesson: Lesson, kind: str, *, title: str) -> bytes:
    """The picture of a lesson as a file of `kind` ('svg', 'png' or 'pdf').

    Up to 150 nodes are drawn with names and sizes, larger graphs with small nodes and without what is given;
    of those of more than 240 ops it shows the first of the forward and the last of the backward, and says so.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    require_drawing()
    words = len(lesson.graph.ops) + len(lesson.given) <= _READABLE
    plan = planned(lesson, most_ops=_MOST_OPS, detailed=words)
    sizes = _sizes(lesson, plan, words)
    inches = (
        max(plan.columns * sizes.across, 2.5) + _MARGIN + WIDTH_INCHES,
        max(plan.levels * sizes.up + sizes.height + _FLOOR + _CEILING, height_inches(lesson)),
    )

    def paint(figure: Figure) -> None:
        figure.set_layout_engine("none")  # every place is given in inches
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, inches[0]), ylim=(0, inches[1]))
        axes.axis("off")
        brush = Brush(axes)
        brush.text(0.25, inches[1] - 0.32, without_middle(title, _LONGEST_TITLE), 13, weight="bold")
        _Painter(brush, lesson, plan, sizes).paint()
        note = "; ".join(filter(None, [plan.left_out, "" if words else _PLAIN]))
        corner = inches[0] - WIDTH_INCHES + 0.35, inches[1] - 0.75
        paint_legend(brush, lesson, *corner, badges=words, note=note)

    return painted(kind, inches, paint)


def _sizes(lesson: Lesson, plan: GraphDrawing, words: bool) -> NodeSizes:
    if not words:
        return NodeSizes(0.3, 0.16, 0.42, 0.3, words)
    lines = [_lines(lesson, node) for node in plan.spots] or [[""]]
    widest = max(
        len(line) * _LETTER * (_SMALL if place else _NAME)
        for node in lines
        for place, line in enumerate(node)
    )
    tall = 0.74 if max(map(len, lines)) > 2 else 0.56
    width = min(widest, _WIDEST) + 2 * _BADGE
    return NodeSizes(width, tall, width + 0.28, tall + 0.5, words)


def _lines(lesson: Lesson, node: Node) -> list[str]:
    """What is written in a node: its name, what makes it, and the numbers that come out or its shape."""
    if node.kind is NodeKind.GIVEN:
        name, made, value = lesson.graph.values[node.number].name, "", node.number
    else:
        op = lesson.graph.ops[node.number]
        name, made, value = lesson.words.result(op), short(op), op.creates[0]
    shape = shape_text(lesson.words.shape(value)) if lesson.words.shape(value) else ""
    return [line for line in (name, made, numbers_text(lesson, value) or shape) if line]


class _Painter:
    """Paints nodes and arrows where the plan has them."""

    def __init__(self, brush: Brush, lesson: Lesson, plan: GraphDrawing, sizes: NodeSizes) -> None:
        self.brush, self.lesson, self.plan, self.sizes = brush, lesson, plan, sizes
        self.given: dict[int, Given] = {}
        self.counter: dict[int, int] = {}
        self.overwritten: set[tuple[int, int]] = set()
        for scene in lesson.scenes():
            for given in scene.turn.given:
                self.given[given.value] = given
                if given.how is How.IN_PLACE:
                    self.overwritten.add((scene.before[given.value], given.value))
            for value, count in scene.turn.counters:
                self.counter.setdefault(value, count)

    def paint(self) -> None:
        for arrow in self.plan.arrows:
            self._arrow(arrow)
        for node in self.plan.spots:
            self._node(node)
        names = ["forward ↑"] if self.lesson.forward else []
        names += ["backward ↓"] if self.lesson.backward else []
        for name, (low, high) in zip(names, self.plan.sides, strict=False):
            middle = max(self._inches(Position((low + high) / 2, 0)).x, 0.6)
            self.brush.text(middle, 0.25, name, 11, ha="center", color="#555555", style="italic")

    def _inches(self, spot: Position) -> Position:
        return Position(
            _MARGIN + spot.x * self.sizes.across, _FLOOR + spot.y * self.sizes.up + self.sizes.height / 2
        )

    def _at(self, node: Node) -> Position:
        """The middle of a node."""
        return self._inches(self.plan.spots[node])

    # Nodes ----------------------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        x, y = self._at(node)
        made = () if node.kind is NodeKind.GIVEN else self.lesson.graph.ops[node.number].creates
        first = self.given.get(made[0]) if made else None
        size = self.sizes.width, self.sizes.height
        if first is None:
            self.brush.box(x, y, *size)
        else:
            self.brush.box(x, y, *size, first.tag, first.how)
        if not self.sizes.words:
            self.brush.text(x, y, "" if first is None else str(first.tag), _FIGURE, ha="center")
            return
        self._words(node, x, y)
        if first is not None:
            self.brush.tag(x - size[0] / 2 + 0.14, y, first.tag)
            self.brush.counter(x + size[0] / 2 - 0.02, y + size[1] / 2, self.counter[first.value])
        self._chips(x, y, made[1:])

    def _words(self, node: Node, x: float, y: float) -> None:
        lines = _lines(self.lesson, node)
        for place, line in enumerate(lines):
            size, weight = (_SMALL, "normal") if place else (_NAME, "bold")
            most = round((self.sizes.width - 2 * _BADGE) / (_LETTER * size))
            height = y + 0.17 * ((len(lines) - 1) / 2 - place)
            self.brush.text(x, height, without_middle(line, most), size, weight=weight, ha="center")

    def _chips(self, x: float, y: float, values: tuple[int, ...]) -> None:
        """Further results of an op: small boxes at its lower edge, the last one at the right."""
        below = y - self.sizes.height / 2 - 0.02
        for place, value in enumerate(value for value in reversed(values) if value in self.given):
            middle = x + self.sizes.width / 2 - 0.2 - 0.34 * place
            self.brush.box(middle, below, 0.3, 0.19, self.given[value].tag, self.given[value].how)
            self.brush.text(middle, below, str(self.given[value].tag), 7, ha="center", weight="bold")

    # Arrows ---------------------------------------------------------------------------------------------

    def _arrow(self, arrow: Arrow) -> None:
        creates = self.lesson.graph.ops[arrow.target.number].creates
        in_place = any((arrow.value, made) in self.overwritten for made in creates)
        scale = 1.0 if self.sizes.words else 0.5
        route = self._across(arrow) if arrow.crosses else self._along(arrow)
        width = scale * (0.9 if arrow.crosses else 2.4 if in_place else 1.0)
        self.brush.arrow(route, width, faint=arrow.crosses, scale=scale)

    def _along(self, arrow: Arrow) -> list[Stop]:
        """On one side: from edge to edge, through the bends that are kept free for it, always up or down."""
        start, stop = self._at(arrow.source), self._at(arrow.target)
        direction = 1 if stop.y > start.y else -1
        half = direction * self.sizes.height / 2
        lean = max(-0.3, min(0.3, (stop.x - start.x) / (2 * self.sizes.across))) * self.sizes.width
        first, last = Position(start.x + lean, start.y + half), Position(stop.x - lean, stop.y - half)
        bends = [self._inches(bend) for bend in arrow.bends]
        if not self.sizes.words and abs(stop.y - start.y) > 1.5 * self.sizes.up:
            bends = [Position((first.x + last.x) / 2 - direction * self.sizes.width, (first.y + last.y) / 2)]
        if not bends:
            straight = (last.x - first.x) / 3, (last.y - first.y) / 3
            return [Stop(*first, *straight), Stop(*last, *straight)]
        reach = (last.y - first.y) / (3 * len(bends) + 1)
        return [Stop(*spot, 0.0, reach) for spot in (first, *bends, last)]

    def _across(self, arrow: Arrow) -> list[Stop]:
        """From the forward to the backward: out at the right and in at the left, or by the lanes below."""
        start, stop = self._at(arrow.source), self._at(arrow.target)
        half, pull = self.sizes.width / 2, self.sizes.across * 0.6
        route = [Stop(start.x + half, start.y, pull, 0.0)]
        if self._blocked(arrow.source, 1):
            exit_x = self._inches(Position(self.plan.sides[0][1], 0)).x
            route = [*self._lane(start, 1), Stop(exit_x, self._lane_y(start), pull, 0.0)]
        if not self._blocked(arrow.target, -1):
            return [*route, Stop(stop.x - half, stop.y, pull, 0.0)]
        entry_x = self._inches(Position(self.plan.sides[-1][0], 0)).x
        return [*route, Stop(entry_x, self._lane_y(stop), pull, 0.0), *self._lane(stop, -1)]

    def _lane_y(self, spot: Position) -> float:
        """The height of the lane below a level."""
        return spot.y - self.sizes.height / 2 - (self.sizes.up - self.sizes.height) * 0.4

    def _lane(self, spot: Position, direction: int) -> list[Stop]:
        """From the lower edge of a node to the lane at its right, or from the one at its left to its edge."""
        half = direction * self.sizes.width / 2
        edge = Stop(spot.x + half / 2, spot.y - self.sizes.height / 2, 0.0, -0.12 * direction)
        turn = Stop(spot.x + half + 0.1 * direction, self._lane_y(spot), 0.15, 0.0)
        return [edge, turn][::direction]

    def _blocked(self, node: Node, direction: int) -> bool:
        """Whether another node of the same side stands on the way to the other side."""
        here = self.plan.spots[node]
        low, high = self.plan.sides[0 if direction > 0 else -1]
        return any(
            spot.y == here.y and (spot.x - here.x) * direction > 0 and low <= spot.x <= high
            for spot in self.plan.spots.values()
        )
