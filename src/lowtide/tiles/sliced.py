"""A region on its way into blocks: what leaves them as a whole, and what they run again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Op, Phase, Tile
from lowtide.tiles.ahead import Ahead
from lowtide.tiles.axis import extent, ranges
from lowtide.tiles.building import Building
from lowtide.tiles.dropping import mask_of
from lowtide.tiles.early import Early
from lowtide.tiles.one_slice import Slice
from lowtide.tiles.region import Region, described, summed
from lowtide.tiles.rules import slots
from lowtide.tiles.stages import stages_of
from lowtide.tiles.sums import Sums


@dataclass(frozen=True)
class Cut:
    """A region, and in how many slices it is to run; with `ahead` its backward runs with its forward."""

    region: Region
    count: int
    ahead: Early | None = None


class SlicedRegion:
    """One region on its way into blocks."""

    def __init__(self, building: Building, given: Cut) -> None:
        self.building = building
        self.old = building.old
        self.region = given.region
        self.name = described(self.old, self.region)
        self.slices = ranges(self.region.parts, given.count)
        if given.count < 2 or len(self.slices) < 2:
            raise BadRequest(
                f"{self.name} cannot be cut into {given.count} slices: there are "
                f"{extent(enumerate(self.region.parts))} elements to share out. Ask for 2 or more slices, "
                "and for no more than that."
            )
        self.stages = stages_of(self.old, self.region)
        if given.ahead is not None:
            self.stages = dict.fromkeys(self.stages, 0)
        self._largest_bytes = max(self.old.values[each].bytes for each in self.region.axes)
        self._summed = summed(self.old, self.region)
        self.whole = frozenset(self._made_whole())
        self.ahead = Ahead(building, given.ahead, self._summed)
        for number in self.region.ops:
            for value in self.old.ops[number].creates:
                if value not in self.whole and value not in self._summed:
                    building.values[value] = replace(building.values[value], bytes=0)

    def is_in_time(self, number: int) -> bool:
        """Whether an op runs about where it was, and not ahead."""
        return self.ahead.early is None or self.old.ops[number].phase is Phase.FORWARD

    # What leaves a block ------------------------------------------------------------------------------

    def _made_whole(self) -> Iterator[int]:
        """What the region makes slice by slice and somebody needs as a whole."""
        for number in self.region.ops:
            for value in self.old.ops[number].creates:
                is_sliced = value in self.region.axes and value not in self._summed
                if is_sliced and (self._is_drawn(value) or self._is_needed_whole(value, number)):
                    yield value

    def _is_drawn(self, value: int) -> bool:
        """Whether a value tells what is dropped."""
        op = self.old.ops[self.old.creator[value]]
        return op.random and self.old.tensors[mask_of(op)].value == value

    def _is_needed_whole(self, value: int, maker: int) -> bool:
        if value in self.old.outputs:
            return True
        for reader in self.old.readers.get(value, ()):
            found = self.region.ops.get(reader)
            if found is None:
                return True
            op = self.old.ops[reader]
            looks = [slot for slot, tensor in slots(op) if self.old.tensors[tensor].value == value]
            if any(found.takes.get(slot) is None for slot in looks):
                return True
            elsewhere = self.stages[reader] != self.stages[maker]
            if elsewhere and self._is_small(value):
                return True
        return False

    def _is_small(self, value: int) -> bool:
        """Not worth being made again in each stage that needs it."""
        return self.old.values[value].bytes <= self._largest_bytes / 16

    # One block ----------------------------------------------------------------------------------------

    def block(self, stage: int) -> None:
        """Append the block of a stage."""
        own = sorted(op for op, at in self.stages.items() if at == stage)
        ops = [self.old.ops[number] for number in self._with_repeats(own)]
        first = len(self.building.ops)
        phase = self.old.ops[own[0]].phase
        self.ahead.make_ones(self.old.ops[own[-1]], phase)
        leaving = {value for number in own for value in self.old.ops[number].creates if value in self.whole}
        for number in own:
            self._make_room(self.old.ops[number], leaving, phase)
        sums = Sums(self.building, self.region, self.ahead)
        own_ops = frozenset(own)
        for number, part in enumerate(self.slices):
            parts = Slice(self.building, self.region, self.ahead, part, phase, leaving, sums, number)
            for op in ops:
                parts.run(op, is_own=op.id in own_ops)
        sums.finish(phase)
        if len(self.building.ops) == first:
            raise BadRequest(f"{self.name} is not cut into slices: all that it does there is draw numbers.")
        _, origin, _ = before(self.old)
        inner = [value for op in ops for value in op.creates if value not in self.whole]
        self.building.blocks.append(
            Tile(
                first,
                len(self.building.ops),
                tuple(origin[number] for number in own),
                len(self.slices),
                self.slices[-1][1],
                self.name,
                max((self.old.values[value].bytes for value in inner), default=0),
            )
        )

    def _with_repeats(self, own: Sequence[int]) -> list[int]:
        """The ops of a stage, and those of earlier ones that make what it needs and is not there."""
        wanted = set(own)
        waiting = list(own)
        while waiting:
            op = self.old.ops[waiting.pop()]
            for value in op.reads:
                maker = self.old.creator.get(value)
                if maker is None or maker in wanted or maker not in self.stages:
                    continue
                if value in self.whole or value in self._summed:
                    continue
                wanted.add(maker)
                waiting.append(maker)
        return sorted(wanted)

    def _make_room(self, op: Op, leaving: Collection[int], phase: Phase) -> None:
        """Buffers for what leaves the block, under the names and ids that the values had."""
        for output in op.outputs:
            tensor = None if output is None else self.old.tensors[output]
            if tensor is None or tensor.value not in leaving or self._is_drawn(tensor.value):
                continue
            buffer = replace(tensor, value=self.ahead.made_as(tensor.value))
            self.building.empty(op, buffer, phase)


def before(graph: Graph) -> tuple[Graph, Sequence[int], tuple[Tile, ...]]:
    """The graph without slices, the numbers of this graph's ops in it, and the blocks that there are."""
    if graph.tiled is None:
        return graph, range(len(graph.ops)), ()
    return graph.tiled.plain, graph.tiled.origin, graph.tiled.blocks
