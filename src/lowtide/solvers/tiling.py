"""Which regions of a step to run in slices, and in how many.

    need      what has to be there while an op runs, whatever is recomputed; where it is largest, a region is
              proposed
    family    that region, and those around ops like its seed: every block of a model has the same
    rung      a graph with more in slices than the one before, so that less is needed; the first has none

A budget is kept by the rung whose best schedule takes the least time. So what slices save is spent on keeping
what would be recomputed, and what does not pay is not cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.errors import BadRequest
from lowtide.fusion.fuse import last_op
from lowtide.ir.bounds import needed_bytes
from lowtide.ir.graph import Graph, Op, Phase, Role
from lowtide.ir.simulate import allocator_of
from lowtide.solvers.solution import GraphSolution
from lowtide.tiles.blocks import TARGET, contracted
from lowtide.tiles.early import early
from lowtide.tiles.region import Region, grown, largest
from lowtide.tiles.sliced import Cut
from lowtide.tiles.tile import cut

COUNTS = (2, 4, 8, 16, 32)
MOST_RUNGS = 6
_MOST_OPS = 8000  # of all regions of a family together, in slices: more take long to plan, and to launch
_PATIENCE = 1  # rungs in a row that are no better than the best
_FAST = 1.01  # times the time of plain training: a plan that takes no more need not be improved on
_NEAR = 1.02  # times what is needed: a schedule that peaks there peaks where no schedule can do without
_PAYS = 0.99  # of what was needed before: what does not lower it by more is not worth its time
_HELPS = 0.9  # of what a region took before: where it is no single op's need, more slices have to save more
_PARTS = 4  # what a region at the peak of a schedule takes is to be so much less
_ALIKE = 1.02  # of the least that is needed: ways that are as good as that are told apart by their time


@dataclass(frozen=True)
class Kin:
    """Regions that are cut in the same way."""

    cuts: tuple[Cut, ...]

    @cached_property
    def ops(self) -> frozenset[int]:
        """All of their ops."""
        return frozenset(number for each in self.cuts for number in each.region.ops)

    def into(self, count: int) -> Kin:
        """The same in `count` slices."""
        return Kin(tuple(replace(each, count=count) for each in self.cuts))


@dataclass(frozen=True)
class Rung:
    """A graph, and the families of the plain one that are in slices there."""

    plain: Graph
    families: tuple[Kin, ...] = ()

    @cached_property
    def graph(self) -> Graph:
        """The graph with slices."""
        cuts = [each for family in self.families for each in family.cuts]
        return cut(self.plain, cuts) if cuts else self.plain

    @cached_property
    def ops(self) -> frozenset[int]:
        """The ops of the plain graph that are in slices."""
        return frozenset(number for family in self.families for number in family.ops)

    def lower(self) -> Rung | None:
        """The next rung; None if nothing that can be cut lowers what is needed."""
        whole = contracted(self.graph)
        needed = needed_bytes(whole.graph)
        worst = max(range(len(needed)), key=needed.__getitem__, default=None)
        if worst is None:
            return None
        seed = self._plain_op(whole.origin(worst))
        if seed is None:
            return self._finer(whole.origin(worst), needed[worst])
        return self._best_way(seed, needed[worst])

    def lower_at(self, number: int) -> Rung | None:
        """A rung with slices where a schedule of this one peaks, at op `number`.

        No single op needs what it holds there. But every byte less is one for what is recomputed otherwise.
        """
        seed = self._plain_op(number)
        if seed is None:
            return None
        needed = _touched(self.plain, seed, self.plain)
        return self._best_way(seed, needed, within=needed // _PARTS)

    def _plain_op(self, number: int) -> Op | None:
        """The op of the plain graph that an op is; None if it is in a block."""
        tiled = self.graph.tiled
        origin = number if tiled is None else tiled.origin[number]
        return None if origin < 0 else self.plain.ops[origin]

    def _finer(self, first: int, needed: int) -> Rung | None:
        """With more slices in the family that the block at `first` is of; None if no block is there."""
        assert self.graph.tiled is not None, "only then there are blocks"
        block = next((block for block in self.graph.tiled.blocks if block.first == first), None)
        if block is None:
            return None  # it scales what a block has made
        for at, family in enumerate(self.families):
            if block.ops[0] not in family.ops:
                continue
            for count in COUNTS:
                if count <= max(each.count for each in family.cuts):
                    continue
                finer = (*self.families[:at], family.into(count), *self.families[at + 1 :])
                rung = replace(self, families=finer)
                if rung.buildable and max(needed_bytes(contracted(rung.graph).graph)) < _PAYS * needed:
                    return rung
        return None

    @cached_property
    def _kinds(self) -> list[tuple[object, ...]]:
        return [_kind(self.plain, op) for op in self.plain.ops]

    @cached_property
    def _needed(self) -> list[int]:
        return needed_bytes(self.plain)

    @cached_property
    def buildable(self) -> bool:
        """Whether its regions can be cut as often as that."""
        try:
            return bool(self.graph.ops)
        except BadRequest:
            return False

    def _best_way(self, seed: Op, needed: int, within: int | None = None) -> Rung | None:
        """This rung with what `seed` needs in slices, and what ops like it need; None if no way helps."""
        allowed = frozenset(range(len(self.plain.ops))) - self.ops
        in_backward = frozenset(op.id for op in self.plain.ops if op.phase is Phase.BACKWARD)
        found: list[_Choice] = []
        for dims in _dimensions(self.plain, seed):
            for only in (allowed, allowed & in_backward):
                region = grown(self.plain, seed.id, dims, only=only)
                if isinstance(region, Region):
                    ways = self._counts(region, within)
                    found += (_Choice(*way, dims, only) for way in ways if way[0] < _PAYS * needed)
        best = min(found, default=None)
        if best is None:
            return None
        regions = [best.region, *self._others(seed, best)]
        alike = Kin(tuple(Cut(each, best.count, early(self.plain, each)) for each in regions))
        return replace(self, families=(*self.families, alike))

    def _counts(self, region: Region, within: int | None) -> Iterator[tuple[int, float, int, Region]]:
        """A region in as many slices as it takes until something else needs more, as far as that helps.

        Or, if it is to be `within` so many bytes, until it is. What is needed, the time that it takes, and
        the number of slices.
        """
        kinds = {self._kinds[number] for number in region.ops}
        rest = within
        if rest is None:
            others = (op for op in self.plain.ops if op.id not in self.ops)
            rest = max((self._needed[op.id] for op in others if self._kinds[op.id] not in kinds), default=0)
        alone = _alone(self.plain, region)
        beside = 0 if within is not None else self._beside(region)
        most = _MOST_OPS // (len(region.ops) * max(1, self._alike_to(region)))
        reached = math.inf
        helps = _PAYS if within is None else _HELPS
        for count in (count for count in COUNTS if count <= max(2, most)):
            try:
                tiled = cut(alone.graph, [Cut(alone.region, count, early(alone.graph, alone.region))])
            except BadRequest:
                return
            whole = contracted(tiled).graph
            blocks = (op for op in whole.ops if op.target == TARGET)
            of_blocks = beside + max(_touched(whole, op, self.plain) for op in blocks)
            if of_blocks > helps * reached:
                return
            reached = of_blocks
            extra = sum(op.seconds for op in tiled.ops) - sum(op.seconds for op in alone.graph.ops)
            yield max(of_blocks, rest), extra, count, region
            if of_blocks <= rest:
                return

    def _alike_to(self, region: Region) -> int:
        """How many regions there are like one, about: as often as its rarest op is there."""
        return min(self._kinds.count(self._kinds[number]) for number in region.ops)

    def _beside(self, region: Region) -> int:
        """What has to be there while ops of a region run beside what they touch, and what they have made."""
        held = allocator_of(self.plain.device).held
        own = {value: self.plain.creator[value] for value in self.plain.outputs & self.plain.creator.keys()}
        own = {value: maker for value, maker in own.items() if maker in region.ops}

        def beside(number: int) -> int:
            op = self.plain.ops[number]
            made = (
                held(self.plain.counted_bytes(value))
                for value, maker in own.items()
                if maker < number and value not in (*op.reads, *op.mutates)
            )
            return self._needed[number] - _touched(self.plain, op, self.plain) - sum(made)

        return max(0, *map(beside, region.ops))

    def _others(self, seed: Op, way: _Choice) -> Iterator[Region]:
        """Regions like that of `way`, around ops like `seed`."""
        alike, taken = self._kinds[seed.id], set(way.region.ops)
        for op in self.plain.ops:
            if op.id in taken or op.id not in way.only or self._kinds[op.id] != alike:
                continue
            found = grown(self.plain, op.id, way.dims, only=way.only)
            if isinstance(found, Region) and taken.isdisjoint(found.ops) and found.parts == way.region.parts:
                taken |= found.ops.keys()
                yield found


def best_tiled(
    graph: Graph,
    price: Callable[[Graph], Graph],
    solve: Callable[[Graph], GraphSolution | None],
    lowest: Callable[[Graph], GraphSolution],
    is_lowest: bool,
) -> GraphSolution | None:
    """The best that `solve` makes of `graph` in slices, or of the graph as it is; None if all of that fails.

    The best is what takes the least time in all, or what peaks lowest if `is_lowest`. `price` tells what
    slices cost, and `lowest` finds the lowest peak of a graph. Both may be quick: they tell what is best, and
    that may be solved again.
    """
    best: GraphSolution | None = None
    of_best = Rung(graph)
    rung: Rung | None = Rung(graph)
    in_vain = 0
    for _ in range(MOST_RUNGS):
        if rung is None or in_vain > _PATIENCE or not rung.buildable:
            break
        priced = price(rung.graph) if rung.families else graph
        solution = solve(priced)
        if solution is not None and (best is None or _is_better(solution, best, is_lowest)):
            best, of_best, in_vain = solution, rung, 0
        elif best is not None:
            in_vain += 1
        if best is not None and not is_lowest and _takes(best) <= _FAST * sum(op.seconds for op in graph.ops):
            break
        rung = _next(rung, solution or lowest(priced))
    return best if best is None or is_lowest else _coarser(best, of_best, price, solve)


def _coarser(
    best: GraphSolution,
    rung: Rung,
    price: Callable[[Graph], Graph],
    solve: Callable[[Graph], GraphSolution | None],
) -> GraphSolution:
    """The same with fewer slices, as long as that takes less time: half as many, or three quarters."""
    for at, kin in enumerate(rung.families):
        count = max(each.count for each in kin.cuts)
        fewer = [count // 2, 3 * count // 4]
        while fewer and fewer[0] >= COUNTS[0]:
            count = fewer.pop(0)
            coarser = replace(rung, families=(*rung.families[:at], kin.into(count), *rung.families[at + 1 :]))
            solution = solve(price(coarser.graph))
            if solution is not None and _takes(solution) < _takes(best):
                best, rung, fewer = solution, coarser, [count // 2, 3 * count // 4]
    return best


def _is_better(solution: GraphSolution, best: GraphSolution, is_lowest: bool) -> bool:
    if is_lowest:
        return solution.peak_bytes < _PAYS * best.peak_bytes
    return _takes(solution) < _PAYS * _takes(best)


def _next(rung: Rung, solution: GraphSolution) -> Rung | None:
    """A rung that has less where this solution peaks."""
    peak = solution.timeline.peak_op
    if peak is None or solution.peak_bytes <= _NEAR * solution.lower_bound_bytes:
        return rung.lower()
    return rung.lower_at(last_op(solution.graph, peak.id)) or rung.lower()


def _takes(solution: GraphSolution) -> float:
    return solution.seconds + solution.extra_seconds


@dataclass(frozen=True)
class _Choice:
    """A region to cut, in so many slices: what is needed then, and what it takes."""

    needed: int
    extra_seconds: float
    count: int
    region: Region
    dims: tuple[int | tuple[int, int], ...]
    only: frozenset[int]  # which ops may join

    def __lt__(self, other: _Choice) -> bool:
        if self.needed > _ALIKE * other.needed or other.needed > _ALIKE * self.needed:
            return self.needed < other.needed
        return (self.extra_seconds, self.count) < (other.extra_seconds, other.count)


def _touched(graph: Graph, op: Op, plain: Graph) -> int:
    """What an op makes, takes beside, and reads of what the step makes, of which `graph` may be a part."""
    held = allocator_of(graph.device).held
    touched = {value for value in (*op.reads, *op.mutates) if value in plain.creator} | {*op.creates}
    return op.workspace_bytes + sum(held(graph.counted_bytes(value)) for value in touched)


@dataclass(frozen=True)
class _Alone:
    """The ops of a region as a graph of their own, and the region in it."""

    graph: Graph
    region: Region


def _alone(graph: Graph, region: Region) -> _Alone:
    """A region without the rest of the step, which is quick to cut. What others need of it is an output."""
    number_of = {number: position for position, number in enumerate(sorted(region.ops))}
    ops = tuple(replace(graph.ops[number], id=position) for number, position in number_of.items())
    needed = {
        value
        for op in ops
        for value in op.creates
        if value in graph.outputs or any(each not in region.ops for each in graph.readers.get(value, ()))
    }
    inside = {number_of[number]: found for number, found in region.ops.items()}
    return _Alone(
        replace(graph, ops=ops, outputs=frozenset(needed), results=(), tiled=None),
        replace(region, ops=inside),
    )


def _dimensions(graph: Graph, seed: Op) -> Iterator[tuple[int | tuple[int, int], ...]]:
    """Along what the largest tensor of an op may be cut.

    Its leading dimensions together, any alone, or as many parts of the first as the batch has examples: where
    tokens are shifted, those of all examples are not one dimension everywhere.
    """
    _, number = largest(graph, seed)
    shape = graph.tensors[number].shape
    leading = (tuple(range(stop)) for stop in range(1, len(shape)))
    for dims in dict.fromkeys((*leading, *((dim,) for dim in range(len(shape))))):
        if any(shape[dim] > 1 for dim in dims):
            yield dims
    for examples in _batch_sizes(graph):
        if shape and 1 < examples < shape[0] and not shape[0] % examples:
            yield ((0, examples),)


def _batch_sizes(graph: Graph) -> dict[int, None]:
    """How many examples there may be in the batch: the lengths of its tensors."""
    given = {value for value in graph.resident if graph.values[value].role is Role.BATCH}
    return dict.fromkeys(each.shape[0] for each in graph.tensors if each.value in given and each.shape)


def _kind(graph: Graph, op: Op) -> tuple[object, ...]:
    """What ops have in common that are alike: kernel, phase, and shapes."""
    shapes = tuple(None if made is None else graph.tensors[made].shape for made in op.outputs)
    return op.target, op.phase, op.section, shapes
