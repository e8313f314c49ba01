"""A graph's memory as one teaches it: the forward, its extension by the backward, and the planner's walk.

    lesson_of(graph)   counters and tags, what shares with what, and what each idea saves:
                       naive → in place → sharing → static, down to the lower bound

Everything is computed here and nothing is shown; `report/lesson.py` and `report/drawing.py` do that. Sizes
are those of the values, not rounded up to what an allocator aligns to, so that they can be added up by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lowtide.arena.buffers import live_bytes
from lowtide.arena.in_place import Obstacle, obstacles
from lowtide.arena.layout import Layout, lay_out
from lowtide.arena.tags import MATCH_RANGE, How, Sharing, Turn, share
from lowtide.ir.graph import Graph, Op, Phase
from lowtide.ir.schedule import Schedule, straight
from lowtide.lesson.phrasing import Phrasing, distinctly_named, short

Numbers = Mapping[int, tuple[float, ...]]  # by value: the first of its elements


@dataclass(frozen=True, slots=True)
class Total:
    """What all values take together if memory is given out in one way."""

    name: str
    bytes: int
    meaning: str


@dataclass(frozen=True, slots=True)
class Tag:
    """A piece of memory, and the values that are in it, one after the other."""

    number: int
    bytes: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """One turn of the walk, what each result was written over, and the box of free tags after it."""

    turn: Turn
    before: Mapping[int, int]  # by result: the value that had its tag before
    box: tuple[int, ...]


@dataclass(frozen=True)
class Lesson:
    """What there is to tell of a graph. No two values of its `graph` have the same name.

    `sharing` is the walk with everything allowed; the bytes of `naive` and `in_place` are those of walks that
    may do less. `numbers` are what came out when the graph was run on numbers, if it was.
    """

    graph: Graph
    schedule: Schedule
    naive: Sharing = field(repr=False)
    in_place: Sharing = field(repr=False)
    sharing: Sharing = field(repr=False)
    layout: Layout = field(repr=False)
    obstacles: tuple[Obstacle, ...]
    numbers: Numbers = field(default_factory=dict)

    # The graph --------------------------------------------------------------------------------------------

    @cached_property
    def words(self) -> Phrasing:
        """How its ops are written down."""
        return Phrasing(self.graph)

    @cached_property
    def forward(self) -> tuple[Op, ...]:
        """The ops of the forward."""
        return tuple(op for op in self.graph.ops if op.phase is Phase.FORWARD)

    @cached_property
    def backward(self) -> tuple[Op, ...]:
        """The ops by which the graph was extended."""
        return tuple(op for op in self.graph.ops if op.phase is not Phase.FORWARD)

    @cached_property
    def given(self) -> tuple[int, ...]:
        """The resident values that some op reads or changes."""
        return tuple(value for value in self.graph.resident if value in self.graph.readers)

    def needs(self, op: Op) -> tuple[int, ...]:
        """What an op of the backward reads that the backward has not made: given, or made by the forward."""
        return tuple(value for value in dict.fromkeys(op.reads) if self._is_of_forward(value))

    @cached_property
    def kept(self) -> frozenset[int]:
        """The values that the forward makes and the backward needs."""
        needed = {value for op in self.backward for value in self.needs(op)}
        return frozenset(needed & self.graph.creator.keys())

    def _is_of_forward(self, value: int) -> bool:
        maker = self.graph.creator.get(value)
        return maker is None or self.graph.ops[maker].phase is Phase.FORWARD

    # The walk ---------------------------------------------------------------------------------------------

    def scenes(self) -> Iterator[Scene]:
        """The walk, turn by turn."""
        box: dict[int, None] = {}
        inside: dict[int, int] = {}  # the value that each tag had last
        for turn in self.sharing.walk:
            before = {given.value: inside[given.tag] for given in turn.given if given.tag in inside}
            for given in turn.given:
                box.pop(given.tag, None)
                inside[given.tag] = given.value
            box.update(dict.fromkeys(turn.freed))
            yield Scene(turn, before, tuple(box))

    @cached_property
    def tags(self) -> tuple[Tag, ...]:
        """The pieces of memory that the walk ends up with."""
        values: dict[int, list[int]] = {}
        for turn in self.sharing.walk:
            for given in turn.given:
                values.setdefault(given.tag, []).append(given.value)
        return tuple(
            Tag(number, size, tuple(values[number])) for number, size in enumerate(self.sharing.tag_bytes)
        )

    # What it takes ----------------------------------------------------------------------------------------

    @property
    def totals(self) -> tuple[Total, ...]:
        """From every value for itself to one arena; each allows what the one before it does, and more."""
        return (
            Total("naive", self.naive.total_bytes, "every value has memory of its own"),
            Total(
                "in place", self.in_place.total_bytes, "a result is written over an input nobody needs again"
            ),
            Total("sharing", self.sharing.total_bytes, "and free tags are taken again"),
            Total(
                "static",
                self.layout.arena_bytes,
                "and tags may be cut: an offset in one arena for each value",
            ),
        )

    @property
    def lower_bound_bytes(self) -> int:
        """What is live at once at the fullest op: in this order of ops, nothing takes less."""
        return self.layout.lower_bound_bytes

    @cached_property
    def fullest_op(self) -> Op | None:
        """The op at which most is live."""
        live = live_bytes(self.layout.buffers)
        if not live.size:
            return None
        number = self.schedule.steps[int(live.argmax())].runs
        return None if number is None else self.graph.ops[number]

    # As a document ----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All of it, as what JSON knows. Values and ops go by their names and numbers."""
        fullest = self.fullest_op
        return {
            "given": [self._value_to_json(value) for value in self.given],
            "forward": [self._op_to_json(op) for op in self.forward],
            "backward": [
                {**self._op_to_json(op), "needs_of_forward": self.names(self.needs(op))}
                for op in self.backward
            ],
            "kept_for_the_backward": self.names(sorted(self.kept)),
            "walk": [self._scene_to_json(number, scene) for number, scene in enumerate(self.scenes(), 1)],
            "tags": [
                {"tag": tag.number, "bytes": tag.bytes, "values": self.names(tag.values)} for tag in self.tags
            ],
            "not_in_place": [self._obstacle_to_json(obstacle) for obstacle in self.obstacles],
            "totals": {total.name.replace(" ", "_"): total.bytes for total in self.totals},
            "lower_bound_bytes": self.lower_bound_bytes,
            "fullest_op": None if fullest is None else self.words.equation(fullest),
            "static_ratio": self.layout.ratio,
            "static_proven": self.layout.proven,
        }

    def names(self, values: Iterable[int]) -> list[str]:
        """The names of values, in order."""
        return [self.graph.values[value].name for value in values]

    def _value_to_json(self, value: int) -> dict[str, Any]:
        found = self.graph.values[value]
        shape = list(self.words.shape(value))
        numbers = {"numbers": [_json_number(number) for number in self.numbers.get(value, ())]}
        told = {"name": found.name, "role": found.role.value, "shape": shape, "bytes": found.bytes}
        return {**told, **(numbers if self.numbers else {})}

    def _op_to_json(self, op: Op) -> dict[str, Any]:
        return {
            "op": op.id,
            "target": op.target,
            "module": op.module,
            "call": self.words.call(op),
            "results": [self._value_to_json(value) for value in op.creates],
        }

    def _scene_to_json(self, number: int, scene: Scene) -> dict[str, Any]:
        values = self.graph.values
        return {
            "turn": number,
            "op": scene.turn.op,
            "given": [
                {
                    "value": values[given.value].name,
                    "tag": given.tag,
                    "how": given.how.value,
                    "tag_bytes": given.tag_bytes,
                    "over": None if given.how is How.NEW else values[scene.before[given.value]].name,
                }
                for given in scene.turn.given
            ],
            "counters": {values[value].name: count for value, count in scene.turn.counters},
            "freed": list(scene.turn.freed),
            "box": list(scene.box),
        }

    def _obstacle_to_json(self, obstacle: Obstacle) -> dict[str, Any]:
        op = self.graph.ops[obstacle.op]
        return {
            "op": op.id,
            "name": short(op),
            "equation": self.words.equation(op),
            "reason": obstacle.reason,
        }


def lesson_of(graph: Graph, *, match_range: int = MATCH_RANGE, arena_bytes: int | None = None) -> Lesson:
    """Plan the memory of `graph`, its ops in order, in every way that the lesson tells of.

    Values are renamed where two have the same name. Ops that read nothing are not asked why they are not in
    place.

    Raises:
        BadRequest: `match_range` is less than 1.
        ArenaTooSmall: no layout was found that fits in `arena_bytes`; names the op that needs most.
    """
    graph = distinctly_named(graph)
    schedule = straight(graph)
    return Lesson(
        graph=graph,
        schedule=schedule,
        naive=share(graph, schedule, in_place=False, sharing=False),
        in_place=share(graph, schedule, sharing=False),
        sharing=share(graph, schedule, match_range=match_range),
        layout=lay_out(graph, schedule, alignment=1, arena_bytes=arena_bytes),
        obstacles=tuple(found for found in obstacles(graph, schedule) if graph.ops[found.op].reads),
    )


def with_numbers(lesson: Lesson, numbers: Numbers) -> Lesson:
    """The lesson, told with the numbers that come out."""
    return replace(lesson, numbers=numbers)


def _json_number(number: float) -> float | str:
    """JSON has no word for what is not finite."""
    return number if math.isfinite(number) else str(number)
