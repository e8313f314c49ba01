"""A region: ops that are run slice by slice together, and where the sliced dimension is in each.

It grows from one op and one dimension of it. Whatever is large and indexed by that dimension takes its maker
and its readers along, if their rules let it pass; what is small stays at the border, whole. So a region ends
where little crosses its border: at the input of a product with a wide result, at a loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowtide.ir.graph import Graph, Op, short_name
from lowtide.ir.strides import Ints, is_dense
from lowtide.ir.validate import item_bytes
from lowtide.tiles.axis import ABSENT, Axis, Place, axis_of, extent, parts_of, place_in
from lowtide.tiles.rules import Averaged, Labels, Slot, labelled, slots

SMALL = 0.4  # a value of up to this part of the largest may cross the border of a region


@dataclass(frozen=True)
class Passage:
    """How the sliced dimension passes through one op. A place is None where a tensor is independent of it.

    Of `makes`, those in `summed` are sums over the slices; `sized` are numbers among the arguments, and the
    part of the dimension that they are the size of.
    """

    takes: Mapping[Slot, Place | None]
    makes: tuple[Place | None, ...]
    summed: frozenset[int]
    sized: Mapping[Slot, int]
    averaged: Averaged | None


@dataclass(frozen=True)
class Region:
    """The ops of a region, and the axes of the values that are indexed by the sliced dimension.

    `parts` are the sizes into which the dimension falls, outermost first. `borders` say what else would have
    belonged to it, and why it does not.
    """

    ops: Mapping[int, Passage]
    axes: Mapping[int, Axis]
    parts: Ints
    borders: tuple[str, ...]


def passage(graph: Graph, op: Op, where: Slot | int, place: Place) -> Passage | str:
    """How a dimension that is at `place` in an argument (a slot) or a result (a number) passes `op`.

    Or why it does not, in words.
    """
    rule = labelled(graph, op)
    if rule is None:
        return f"{op.label} has no rule for slices" if not op.random else f"{op.label} draws random numbers"
    known = rule.takes.get(where) if isinstance(where, tuple) else rule.makes[where]
    if known is None:
        return f"{op.label} does not say how that tensor is sliced"
    parts = [(known[dim] if dim != ABSENT else "", size) for dim, size in place]
    if any(not label and size > 1 for label, size in parts):
        return f"{op.label} is not indexed by all of the dimension"
    if {label for label, _ in parts} & rule.couples:
        return f"{op.label} couples what is sliced"
    parts = [(label, size) for label, size in parts if label] or [("", 1)]

    def place_by(labels: Labels) -> Place | None:
        if not any(label in labels for label, _ in parts):
            return None
        return tuple((labels.index(label) if label in labels else ABSENT, size) for label, size in parts)

    makes: list[Place | None] = []
    summed: set[int] = set()
    for number, labels in enumerate(rule.makes):
        found = None if labels is None else place_by(labels)
        if labels is not None and (found is None or any(dim == ABSENT for dim, _ in found)):
            if found is not None or not {label for label, _ in parts} <= rule.summed:
                return f"{op.label} couples what is sliced"
            summed.add(number)
        makes.append(found)
    numbers = {label: at for at, (label, _) in enumerate(parts)}
    sized = {slot: numbers[label] for slot, label in (rule.sized or {}).items() if label in numbers}
    takes = {slot: place_by(labels) for slot, labels in rule.takes.items()}
    return Passage(takes, tuple(makes), frozenset(summed), sized, rule.averaged if summed else None)


def grown(
    graph: Graph,
    seed: int,
    dims: Sequence[int | tuple[int, int]],
    small: float = SMALL,
    only: frozenset[int] | None = None,
) -> Region | str:
    """The region around op `seed`, sliced along dimensions of the largest tensor that it makes or takes.

    Several dimensions are sliced as if they were one, the first outermost. Of a dimension that is given with
    a size only the outer part is sliced: (0, 8) of 8 examples times tokens. `small` is what may cross the
    region's border, as a part of that tensor. With `only`, no other ops may join. Or why there is none, in
    words.
    """
    op = graph.ops[seed]
    where, number = largest(graph, op)
    tensor = graph.tensors[number]
    growth = _Growth(graph, op.section, small * graph.values[tensor.value].bytes, only)
    place = tuple((dim, tensor.shape[dim]) if isinstance(dim, int) else dim for dim in dims)
    reason = growth.join(op, where, place)
    if reason:
        return reason
    growth.spread()
    places = [
        place
        for found in growth.ops.values()
        for place in (*found.takes.values(), *found.makes)
        if place is not None
    ]
    parts = parts_of(places)
    if parts is None:
        return f"the dimension that {op.label} has is cut differently elsewhere"
    return Region(growth.ops, growth.axes, parts, tuple(growth.borders))


def largest(graph: Graph, op: Op) -> tuple[Slot | int, int]:
    """The largest tensor that an op makes or takes: where, and which."""
    found: list[tuple[Slot | int, int]] = [
        (at, made) for at, made in enumerate(op.outputs) if made is not None
    ]
    found += slots(op)
    return max(found, key=lambda each: graph.values[graph.tensors[each[1]].value].bytes)


class _Growth:
    """A region while it grows."""

    def __init__(self, graph: Graph, section: int, small_bytes: float, only: frozenset[int] | None) -> None:
        self.graph = graph
        self.section = section
        self.small_bytes = small_bytes
        self.only = only
        self.ops: dict[int, Passage] = {}
        self.axes: dict[int, Axis] = {}
        self.borders: dict[str, None] = {}
        self._waiting: list[int] = []  # values that have become indexed
        self._changed = {
            value for op in graph.ops for value in (*op.mutates, *op.updates) if value not in op.creates
        }
        self._in_blocks = frozenset() if graph.tiled is None else graph.tiled.ops

    def spread(self) -> None:
        """Take along whatever is large, then what lies between ops of the region."""
        while True:
            while self._waiting:
                self._follow(self._waiting.pop())
            between = [op for op in self._between() if self._join_by_any(op)]
            if not between and not self._waiting:
                return

    def join(self, op: Op, where: Slot | int, place: Place) -> str:
        """Take an op along; why not, if that cannot be."""
        if self.only is not None and op.id not in self.only:
            return f"{op.label} is not to be sliced"
        if op.section != self.section or op.id in self._in_blocks:
            return f"{op.label} belongs to another part of the step"
        found = passage(self.graph, op, where, place)
        if isinstance(found, str):
            return found
        axes: dict[int, Axis] = {}
        looks = [(tensor, found.takes.get(slot)) for slot, tensor in slots(op)]
        looks += [
            (tensor, place)
            for tensor, place in zip(op.outputs, found.makes, strict=True)
            if tensor is not None
        ]
        for number, at in looks:
            tensor = self.graph.tensors[number]
            if tensor.value in self._changed:
                return f"{op.label} looks at what is changed in place"
            axis = None if at is None else axis_of(tensor, at)
            if axis is None or not any(step for _, step in axis):
                continue
            known = axes.get(tensor.value) or self.axes.get(tensor.value)
            if known is not None and place_in(tensor, known) != place_in(tensor, axis):
                return f"{op.label} looks at what is sliced along another dimension"
            if known is None:
                axes[tensor.value] = axis
        if any(not self._is_whole(number) for number, at in zip(op.outputs, found.makes, strict=True) if at):
            return f"{op.label} makes only a part of what lies in memory"
        self.ops[op.id] = found
        self.axes |= axes
        self._waiting += axes
        return ""

    def _is_whole(self, number: int | None) -> bool:
        if number is None:
            return True
        tensor = self.graph.tensors[number]
        elements = self.graph.values[tensor.value].bytes // item_bytes(tensor.dtype)
        return is_dense(tensor.shape, tensor.stride) and elements >= extent(enumerate_sizes(tensor.shape))

    def _follow(self, value: int) -> None:
        """The maker and the readers of a value that has become indexed, if it is large."""
        if self.graph.values[value].bytes <= self.small_bytes or value not in self.graph.creator:
            return
        for number in (self.graph.creator[value], *self.graph.readers.get(value, ())):
            if number not in self.ops:
                self._join_by(self.graph.ops[number], value)

    def _join_by(self, op: Op, value: int) -> bool:
        """Take an op along that looks at an indexed value."""
        reasons: list[str] = []
        for where, number in _looks(op):
            tensor = self.graph.tensors[number]
            place = place_in(tensor, self.axes[value]) if tensor.value == value else None
            if place is None:
                continue
            reason = self.join(op, where, place)
            if not reason:
                return True
            reasons.append(reason)
        self.borders[next(iter(reasons), f"{op.label} looks at it in another way")] = None
        return False

    def _join_by_any(self, op: Op) -> bool:
        values = {self.graph.tensors[number].value for _, number in _looks(op)}
        return any(self._join_by(op, value) for value in values & self.axes.keys())

    def _between(self) -> Iterator[Op]:
        """Ops outside of the region that need results of it, and that it needs, all in one phase."""
        for phase in dict.fromkeys(self.graph.ops[number].phase for number in self.ops):
            ops = [op for op in self.graph.ops if op.phase is phase and op.section == self.section]
            after: set[int] = set()  # values
            for op in ops:
                if op.id in self.ops or not after.isdisjoint(op.reads):
                    after.update(op.creates)
            before: set[int] = set()
            for op in reversed(ops):
                if op.id in self.ops:
                    before.update(op.reads)
                elif not before.isdisjoint(op.creates):
                    before.update(op.reads)
                    if not after.isdisjoint(op.reads):
                        yield op


def summed(graph: Graph, region: Region) -> frozenset[int]:
    """The values that are sums over the slices: there when all of these are over, whoever looks at them."""
    return frozenset(
        graph.tensors[made].value
        for number, found in region.ops.items()
        for position, made in enumerate(graph.ops[number].outputs)
        if made is not None and position in found.summed
    )


def enumerate_sizes(shape: Ints) -> list[tuple[int, int]]:
    """The dimensions of a shape as a place."""
    return list(enumerate(shape))


def _looks(op: Op) -> Iterator[tuple[Slot | int, int]]:
    yield from ((at, made) for at, made in enumerate(op.outputs) if made is not None)
    yield from slots(op)


def described(graph: Graph, region: Region) -> str:
    """A region in a few words: the module, what it does, and along what."""
    ops = [graph.ops[number] for number in sorted(region.ops)]
    modules = dict.fromkeys(op.module for op in ops if op.module)
    shared = next(iter(modules), "")
    for module in modules:
        while shared and not f"{module}.".startswith(f"{shared}."):
            shared = shared.rpartition(".")[0]
    return shared or " ".join(dict.fromkeys(short_name(op.target) for op in ops[:3]))
