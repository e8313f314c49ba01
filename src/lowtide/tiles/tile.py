"""The pass: a region of a graph, run slice by slice.

    stage    ops of a region that can run in one go over the slices: what a later op needs whole, a sum over
             all slices say, has to be complete before
    block    the code of one stage: buffers for what leaves it, then the slices, one after the other
    repeat   an op of an earlier stage that a block runs again, slice by slice, for what it makes is never
             there as a whole

    plain      x ─ A ─ large ─ B ─ y          tiled      x[i] ─ A ─ part ─ B ─ y[i]      for each i

What is indexed by the dimension and leaves a block is written into its place in a buffer; what is summed over
it is accumulated, in float32 where it is of half precision. What a dropout drops is drawn as a whole where
that was done before, so that random numbers are those of the plain step. All that comes out are ordinary ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lowtide.errors import BadRequest
from lowtide.ir.graph import Arg, Graph, Op, Ref, Tiled
from lowtide.ir.validate import validate
from lowtide.tiles.building import Building
from lowtide.tiles.dropping import draw
from lowtide.tiles.early import Early
from lowtide.tiles.region import Region
from lowtide.tiles.sliced import Cut, SlicedRegion, before

Stage: TypeAlias = tuple[SlicedRegion, int]  # of a region the stage of that number


@dataclass(frozen=True)
class _MaskOf:
    """Where what an op drops is drawn."""

    op: Op


def tile(graph: Graph, region: Region, count: int, ahead: Early | None = None) -> Graph:
    """`graph` with the ops of `region` run in `count` slices, or a few more where shapes ask for it.

    Everything that the graph leaves behind is the same but for the order of sums. Costs of slices are
    parts of the costs of the whole op, until the graph is profiled. With `ahead` the backward of the region
    runs with its forward.

    Raises:
        BadRequest: the region cannot be cut so often, or not without changing the order of what is changed
            in place; the message says what is in the way.
    """
    return cut(graph, [Cut(region, count, ahead)])


def cut(graph: Graph, cuts: Sequence[Cut]) -> Graph:
    """`graph` with several regions in slices, of which no two have an op in common. See `tile`."""
    return _Tiling(graph, cuts).graph()


class _Tiling:
    """A graph with blocks while it is built."""

    def __init__(self, graph: Graph, cuts: Sequence[Cut]) -> None:
        self.old = graph
        self.building = Building(graph)
        self._stages: dict[int, Stage] = {}  # of the ops that are in regions
        for each in cuts:
            region = SlicedRegion(self.building, each)
            self._stages |= {number: (region, stage) for number, stage in region.stages.items()}

    def graph(self) -> Graph:
        """The tiled graph."""
        for unit in self._units():
            match unit:
                case Op():
                    self._stages[unit.id][0].ahead.scale(unit)
                case _MaskOf():
                    draw(self.building, unit.op)
                case range():
                    first = len(self.building.ops)
                    for number in unit:
                        self._carry_over(self.old.ops[number])
                    self._move_blocks(unit, first)
                case (region, stage):
                    region.block(stage)
        results = tuple((name, self._look(tensor)) for name, tensor in self.old.results)
        plain, origin, _ = before(self.old)
        tiled = Tiled(
            plain,
            tuple(-1 if number < 0 else origin[number] for number in self.building.origin),
            tuple(sorted(self.building.blocks, key=lambda block: block.first)),
        )
        graph = replace(
            self.old,
            ops=tuple(self.building.ops),
            values=tuple(self.building.values),
            tensors=tuple(self.building.tensors),
            results=results,
            tiled=tiled,
        )
        return validate(graph, knows_plain=True)

    def _units(self) -> list[range | Stage | Op | _MaskOf]:
        """Ranges of ops that stay as they are, and stages, in the order in which they run.

        A stage runs where its last op did. What needs its results before that waits until it is over. For an
        op that runs ahead there is the op itself: where it was, what it made is scaled. What is dropped is
        drawn where that was.
        """
        last: dict[Stage, int] = {}
        for number, own in self._stages.items():
            if own[0].is_in_time(number):
                last[own] = max(number, last.get(own, -1))
        found: list[range | Stage | Op | _MaskOf] = []
        waiting: dict[Stage, list[range]] = {}
        unfinished: dict[int, Stage] = {}  # value -> the stage that it has to wait for
        for unit in _atoms(self.old):
            number = unit.start
            touched = [value for op in unit for value in (*self.old.ops[op].reads, *self.old.ops[op].mutates)]
            held_up = {unfinished[value] for value in touched if value in unfinished}
            stage = self._stages.get(number)
            if stage is not None:
                if self.old.ops[number].random:
                    found.append(_MaskOf(self.old.ops[number]))
                if number > last[stage]:
                    found.append(self.old.ops[number])
                    continue
                if any(last[other] > last[stage] for other in held_up - {stage}):
                    raise BadRequest(f"{stage[0].name} and another region would have to wait for each other.")
                unfinished |= dict.fromkeys(self.old.ops[number].creates, stage)
                if number == last[stage]:
                    found += [stage, *waiting.pop(stage, [])]
                    unfinished = {value: at for value, at in unfinished.items() if at != stage}
                continue
            if not held_up:
                found.append(unit)
                continue
            later = max(held_up, key=lambda at: last[at])
            self._check_may_wait(unit, last[later], later[0].name)
            unfinished |= {value: later for op in unit for value in self.old.ops[op].creates}
            waiting.setdefault(later, []).append(unit)
        return found

    def _check_may_wait(self, unit: range, until: int, name: str) -> None:
        ops = [self.old.ops[number] for number in unit]
        touched = {value for op in ops for value in (*op.reads, *op.mutates, *op.updates)}
        between = self.old.ops[unit.stop : until + 1]
        changing = {value for op in (*ops, *between) for value in (*op.mutates, *op.updates)}
        made = {value for op in ops for value in op.creates}
        if any(op.random for op in ops) or (touched & changing) - made or ops[0].section < 0:
            raise BadRequest(
                f"{name} is not cut into slices: {ops[0].label} would have to wait for it, and draws random "
                "numbers or looks at what is changed in place."
            )

    def _carry_over(self, op: Op) -> None:
        self.building.add(
            replace(
                op,
                args=tuple(self._same(arg) for arg in op.args),
                kwargs=tuple((name, self._same(arg)) for name, arg in op.kwargs),
                outputs=tuple(None if output is None else self._look(output) for output in op.outputs),
            ),
            op.id,
        )

    def _move_blocks(self, unit: range, first: int) -> None:
        """Blocks of earlier tilings are where their ops are now."""
        for block in () if self.old.tiled is None else self.old.tiled.blocks:
            if block.first in unit:
                moved = first + block.first - unit.start
                self.building.blocks.append(
                    replace(block, first=moved, stop=moved + block.stop - block.first)
                )

    def _look(self, tensor: int) -> int:
        return self.building.look(self.old.tensors[tensor])

    def _same(self, arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(self._look(arg.tensor))
        return tuple(self._same(item) for item in arg) if isinstance(arg, tuple) else arg


def _atoms(graph: Graph) -> Iterator[range]:
    """Ops that stay together: blocks, and every other op by itself."""
    blocks = {block.first: block.stop for block in (() if graph.tiled is None else graph.tiled.blocks)}
    number = 0
    while number < len(graph.ops):
        stop = blocks.get(number, number + 1)
        yield range(number, stop)
        number = stop
