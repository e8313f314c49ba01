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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lowtide.errors import BadRequest
from lowtide.ir.graph import (
    Arg,
    Graph,
    Op,
    Phase,
    Ref,
    Role,
    Signs,
    Symbol,
    Tensor,
    Tile,
    Tiled,
    Value,
    argument_tensors,
    refs,
    short_name,
)
from lowtide.ir.strides import Ints, contiguous, is_dense, same
from lowtide.ir.validate import item_bytes, validate
from lowtide.tiles.axis import Compact, Place, Range, extent, narrowed, ranges
from lowtide.tiles.early import NOTHING, Early, Factor
from lowtide.tiles.region import Passage, Region, described, summed
from lowtide.tiles.rules import Slot, slots

_HALF = ("float16", "bfloat16")
_Looks: TypeAlias = tuple[int, Ints, Ints, int, str, Signs]  # a tensor but for its id
Stage: TypeAlias = "tuple[_Sliced, int]"  # of a region the stage of that number
_INTO = {"mm": "aten.addmm_.default", "bmm": "aten.baddbmm_.default"}  # kernels that add to what is there
# On CUDA, kernels for factors of half precision that make a product in another type, and that add it up so.
_EXACT = {
    "mm": ("aten.mm.dtype", "aten.addmm.dtype_out"),
    "bmm": ("aten.bmm.dtype", "aten.baddbmm.dtype_out"),
}
_FLOAT = Symbol("dtype", "float32")
# Arguments that kernels read one number after the other, whatever their strides say. A whole tensor of them
# is as one expects; a slice along an inner dimension is not.
_IN_A_ROW = {"native_layer_norm_backward": (3, 4), "_fused_rms_norm_backward": (3,)}
_CONTIGUOUS = Symbol("memory_format", "contiguous_format")


@dataclass(frozen=True)
class _MaskOf:
    """Where what an op drops is drawn."""

    op: Op


@dataclass(frozen=True)
class Cut:
    """A region, and in how many slices it is to run; with `ahead` its backward runs with its forward."""

    region: Region
    count: int
    ahead: Early | None = None


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
        self.tensors: list[Tensor] = []
        self._tensor_ids: dict[_Looks, int] = {}
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.origin: list[int] = []
        self.blocks: list[Tile] = []
        self._stages: dict[int, Stage] = {}  # of the ops that are in regions
        for each in cuts:
            region = _Sliced(self, each)
            self._stages |= {number: (region, stage) for number, stage in region.stages.items()}

    def graph(self) -> Graph:
        """The tiled graph."""
        for unit in self._units():
            match unit:
                case Op():
                    self._stages[unit.id][0].scale(unit)
                case _MaskOf():
                    self._stages[unit.op.id][0].draw(unit.op)
                case range():
                    first = len(self.ops)
                    for number in unit:
                        self._carry_over(self.old.ops[number])
                    self._move_blocks(unit, first)
                case (region, stage):
                    region.block(stage)
        results = tuple((name, self.look(self.old.tensors[tensor])) for name, tensor in self.old.results)
        plain, origin, _ = _before(self.old)
        tiled = Tiled(
            plain,
            tuple(-1 if number < 0 else origin[number] for number in self.origin),
            tuple(sorted(self.blocks, key=lambda block: block.first)),
        )
        graph = replace(
            self.old,
            ops=tuple(self.ops),
            values=tuple(self.values),
            tensors=tuple(self.tensors),
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
        self.add(
            replace(
                op,
                args=tuple(self._same(arg) for arg in op.args),
                kwargs=tuple((name, self._same(arg)) for name, arg in op.kwargs),
                outputs=tuple(
                    None if output is None else self.look(self.old.tensors[output]) for output in op.outputs
                ),
            ),
            op.id,
        )

    def _move_blocks(self, unit: range, first: int) -> None:
        """Blocks of earlier tilings are where their ops are now."""
        for block in () if self.old.tiled is None else self.old.tiled.blocks:
            if block.first in unit:
                moved = first + block.first - unit.start
                self.blocks.append(replace(block, first=moved, stop=moved + block.stop - block.first))

    # Building -----------------------------------------------------------------------------------------

    def op(
        self,
        like: Op,
        target: str,
        args: tuple[Arg, ...],
        *,
        options: tuple[tuple[str, Arg], ...] = (),
        outputs: tuple[int | None, ...] = (),
        creates: tuple[int, ...] = (),
        mutates: tuple[int, ...] = (),
        part: float = 0.0,
        phase: Phase | None = None,
        random: bool = False,
    ) -> Op:
        """A new op where `like` was. It reads every value that it is handed."""
        handed = refs((*args, *(arg for _, arg in options)))
        reads = tuple(dict.fromkeys(self.tensors[tensor].value for tensor in handed))
        return replace(
            like,
            id=len(self.ops),
            target=target,
            args=args,
            kwargs=options,
            outputs=outputs,
            reads=reads,
            creates=creates,
            mutates=mutates,
            phase=like.phase if phase is None else phase,
            random=random,
            seconds=like.seconds * part,
            workspace_bytes=int(like.workspace_bytes * part),
            extrapolated=True,
        )

    def add(self, op: Op, origin: int = -1) -> None:
        """Append an op, which is in a block unless it has an origin."""
        self.ops.append(op if op.id == len(self.ops) else replace(op, id=len(self.ops)))
        self.origin.append(origin)

    def value(self, size: int, like: int) -> int:
        """A new value, named like an old one."""
        old = self.values[like]
        number = len(self.values)
        self.values.append(Value(number, size, Role.INTERMEDIATE, old.name, old.module, old.device))
        return number

    def look(self, tensor: Tensor) -> int:
        """The id of a tensor; equal looks are one tensor."""
        key = (tensor.value, tensor.shape, tensor.stride, tensor.offset, tensor.dtype, tensor.signs)
        found = self._tensor_ids.setdefault(key, len(self.tensors))
        if found == len(self.tensors):
            self.tensors.append(Tensor(found, *key))
        return found

    def _same(self, arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(self.look(self.old.tensors[arg.tensor]))
        return tuple(self._same(item) for item in arg) if isinstance(arg, tuple) else arg


class _Sliced:
    """One region on its way into blocks."""

    def __init__(self, tiling: _Tiling, given: Cut) -> None:
        self.tiling = tiling
        self.old = tiling.old
        self.region = given.region
        self.ahead = given.ahead
        self.name = described(self.old, self.region)
        self.slices = ranges(self.region.parts, given.count)
        if given.count < 2 or len(self.slices) < 2:
            raise BadRequest(
                f"{self.name} cannot be cut into {given.count} slices: there are "
                f"{extent(enumerate(self.region.parts))} elements to share out. Ask for 2 or more slices, "
                "and for no more than that."
            )
        self.stages = _stages(self.old, self.region)
        if self.ahead is not None:
            self.stages = dict.fromkeys(self.stages, 0)
        self._largest_bytes = max(self.old.values[each].bytes for each in self.region.axes)
        self._summed = summed(self.old, self.region)
        self.whole = frozenset(self._made_whole())
        self.unscaled: dict[int, int] = {}  # what a backward makes that runs ahead, and what it makes it as
        self._ones: dict[int, int] = {}
        self._scales: dict[Factor, int] = {}  # tensors
        for number in self.region.ops:
            for value in self.old.ops[number].creates:
                if value not in self.whole and value not in self._summed:
                    tiling.values[value] = replace(tiling.values[value], bytes=0)

    def is_in_time(self, number: int) -> bool:
        """Whether an op runs about where it was, and not ahead."""
        return self.ahead is None or self.old.ops[number].phase is Phase.FORWARD

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
        return op.random and self.old.tensors[_mask(op)].value == value

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
        first = len(self.tiling.ops)
        phase = self.old.ops[own[0]].phase
        self._make_ones(self.old.ops[own[-1]], phase)
        leaving = {value for number in own for value in self.old.ops[number].creates if value in self.whole}
        for number in own:
            self._make_room(self.old.ops[number], leaving, phase)
        sums = _Sums(self)
        own_ops = frozenset(own)
        for number, part in enumerate(self.slices):
            parts = _Slice(self, part, phase, frozenset(op.id for op in ops), leaving, sums, number)
            for op in ops:
                parts.run(op, is_own=op.id in own_ops)
        sums.finish(phase)
        if len(self.tiling.ops) == first:
            raise BadRequest(f"{self.name} is not cut into slices: all that it does there is draw numbers.")
        _, origin, _ = _before(self.old)
        inner = [value for op in ops for value in op.creates if value not in self.whole]
        self.tiling.blocks.append(
            Tile(
                first,
                len(self.tiling.ops),
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
            if output is None or self.old.tensors[output].value not in leaving:
                continue
            if self._is_drawn(self.old.tensors[output].value):
                continue
            tensor = replace(self.old.tensors[output], value=self.made_as(self.old.tensors[output].value))
            self._empty(op, tensor, phase)

    def _empty(self, op: Op, tensor: Tensor, phase: Phase) -> None:
        self.tiling.add(
            self.tiling.op(
                op,
                "aten.empty_strided.default",
                (tensor.shape, tensor.stride),
                options=_options(tensor.dtype, self.old),
                outputs=(self.tiling.look(tensor),),
                creates=(tensor.value,),
                phase=phase,
            )
        )

    # What is drawn ------------------------------------------------------------------------------------

    def draw(self, op: Op) -> None:
        """Append what draws the numbers that `op` draws, for all of its elements, without looking at them.

        On the CPU its kernel draws a mask by itself. Elsewhere kernels do all at once, and how many elements
        there are, of what type, decides what is drawn: so it is handed some.
        """
        tiling, mask = self.tiling, self.old.tensors[_mask(op)]
        rate = op.args[1]
        assert isinstance(rate, float), "only then there is a rule for it"
        drawn = tiling.look(mask)
        if self.old.device == "cpu":
            self._empty(op, mask, op.phase)
            tiling.add(
                tiling.op(
                    op,
                    "aten.bernoulli_.float",
                    (Ref(drawn), 1 - rate),
                    outputs=(drawn,),
                    mutates=(mask.value,),
                    part=1.0,
                    random=True,
                )
            )
            return
        x = self.old.tensors[next(argument_tensors(op))]
        some, dropped = (
            replace(x, value=tiling.value(self.old.values[x.value].bytes, x.value)) for _ in range(2)
        )
        self._empty(op, some, op.phase)
        tiling.add(
            tiling.op(
                op,
                op.target,
                (Ref(tiling.look(some)), *op.args[1:]),
                outputs=(tiling.look(dropped), drawn),
                creates=(dropped.value, mask.value),
                part=1.0,
                random=True,
            )
        )

    # What runs ahead ----------------------------------------------------------------------------------

    def made_as(self, value: int) -> int:
        """The value that a block makes in place of an old one: itself, unless it is to be scaled."""
        factor = NOTHING if self.ahead is None else self.ahead.factors.get(value, NOTHING)
        if factor == NOTHING:
            return value
        if value not in self.unscaled:
            self.unscaled[value] = self.tiling.value(self.old.values[value].bytes, value)
        return self.unscaled[value]

    def _make_ones(self, like: Op, phase: Phase) -> None:
        """What is taken for numbers that are not there yet."""
        for late in sorted(() if self.ahead is None else self.ahead.ones):
            dtype = next(tensor.dtype for tensor in self.old.tensors if tensor.value == late)
            value = self._ones[late] = self.tiling.value(item_bytes(dtype), late)
            made = self.tiling.look(Tensor(0, value, (), (), 0, dtype))
            self.tiling.add(
                self.tiling.op(
                    like,
                    "aten.full.default",
                    ((), 1.0),
                    options=_options(dtype, self.old),
                    outputs=(made,),
                    creates=(value,),
                    phase=phase,
                )
            )

    def meanwhile(self, tensor: Tensor) -> Tensor:
        """What a block looks at in place of `tensor`."""
        if tensor.value not in self._ones:
            return tensor
        return replace(tensor, value=self._ones[tensor.value], offset=0)

    def scale(self, op: Op) -> None:
        """Append ops that make what `op` made: what was made ahead, multiplied by what is known by now."""
        assert self.ahead is not None, "only what runs ahead is scaled"
        for output in op.outputs:
            tensor = None if output is None else self.old.tensors[output]
            if tensor is None or tensor.value not in self.unscaled:
                continue
            number = self._scales_by(op, self.ahead.factors[tensor.value])
            unscaled = replace(tensor, value=self.unscaled[tensor.value], dtype=self._exact(tensor))
            args = (Ref(self.tiling.look(unscaled)), Ref(number))
            if unscaled.dtype == tensor.dtype:
                made = self.tiling.look(tensor)
                self.tiling.add(
                    self.tiling.op(op, "aten.mul.Tensor", args, outputs=(made,), creates=(tensor.value,))
                )
                continue
            self._empty(op, tensor, op.phase)
            made = self.tiling.look(tensor)
            self.tiling.add(
                self.tiling.op(
                    op,
                    "aten.mul.out",
                    args,
                    options=(("out", Ref(made)),),
                    outputs=(made,),
                    mutates=(tensor.value,),
                )
            )

    def _exact(self, tensor: Tensor) -> str:
        """The type in which a value is made that is to be scaled."""
        is_summed = tensor.value in self._summed
        return "float32" if is_summed and tensor.dtype in _HALF else tensor.dtype

    def _scales_by(self, op: Op, factor: Factor) -> int:
        """A number that stands for a factor, as a tensor."""
        if factor in self._scales:
            return self._scales[factor]
        total: int | None = None
        for target, values in (("aten.mul.Tensor", factor.times), ("aten.div.Tensor", factor.over)):
            for value in values:
                dtype = next(tensor.dtype for tensor in self.old.tensors if tensor.value == value)
                number = self.tiling.look(Tensor(0, value, (), (), 0, dtype))
                if target == "aten.div.Tensor":
                    number = self._never_zero(op, number)
                if total is None and target == "aten.mul.Tensor":
                    total = number
                    continue
                first = (Ref(total),) if total is not None else (1.0,)
                known = "bool" if total is None else self.tiling.tensors[total].dtype
                total = self._small(op, target, (*first, Ref(number)), _float_of(known, dtype))
        assert total is not None, "a factor is made of something"
        self._scales[factor] = total
        return total

    def _never_zero(self, op: Op, number: int) -> int:
        """One where a number is zero: there is nothing to be divided then, and plain kernels make zeros."""
        is_zero = self._small(op, "aten.eq.Scalar", (Ref(number), 0), "bool")
        return self._small(
            op, "aten.add.Tensor", (Ref(number), Ref(is_zero)), self.tiling.tensors[number].dtype
        )

    def _small(self, op: Op, target: str, args: tuple[Arg, ...], dtype: str) -> int:
        value = self.tiling.value(item_bytes(dtype), self.tiling.tensors[_first(args)].value)
        made = self.tiling.look(Tensor(0, value, (), (), 0, dtype))
        self.tiling.add(self.tiling.op(op, target, args, outputs=(made,), creates=(value,)))
        return made


class _Slice:
    """One slice of a block."""

    def __init__(
        self,
        region: _Sliced,
        part: Range,
        phase: Phase,
        ops: frozenset[int],
        leaving: Collection[int],
        sums: _Sums,
        number: int,
    ) -> None:
        self.region = region
        self.tiling = region.tiling
        self.part = part
        self.phase = phase
        self.sums = sums
        self.number = number
        self._ops = ops
        self._leaving = leaving
        self._made: dict[int, tuple[int, Compact]] = {}  # a value, and the slice of it

    def run(self, op: Op, is_own: bool) -> None:
        """Append the op for this slice."""
        tiling, found = self.tiling, self.region.region.ops[op.id]
        if op.random:
            self._drop(op, found, is_own)
            return
        args = tuple(self._arg(op, found, position, arg) for position, arg in enumerate(op.args))
        options = tuple((name, self._arg(op, found, name, arg)) for name, arg in op.kwargs)
        for position in _IN_A_ROW.get(short_name(op.target), ()):
            args = (*args[:position], self._in_a_row(op, args[position]), *args[position + 1 :])
        if found.averaged is not None:
            averaged = found.averaged
            args = (*args[: averaged.position], averaged.number, *args[averaged.position + 1 :])
        if found.summed and not is_own:
            raise BadRequest(
                f"{op.label} makes both slices and sums over them, and the slices are needed again later."
            )
        is_half = self.sums.is_half(op, found)
        if is_half and self._adds_half_by_kernel(op, args):
            return
        if is_half and short_name(op.target) == "sum":
            options = (*((name, arg) for name, arg in options if name != "dtype"), ("dtype", _FLOAT))
        elif is_half:
            args = tuple(self._widened(op, arg) for arg in args)
        if found.summed and self._adds_by_kernel(op, args):
            return
        outputs: list[int | None] = []
        creates: list[int] = []
        rounded: list[tuple[int, int]] = []
        copies: list[tuple[Tensor, Place, int]] = []
        added: list[tuple[int, int]] = []
        for number, output in enumerate(op.outputs):
            if output is None:
                outputs.append(None)
                continue
            tensor = tiling.old.tensors[output]
            place = found.makes[number]
            if number in found.summed:
                made = self.sums.part(op, number, tensor)
                added.append((number, made))
            else:
                assert place is not None, "what is neither summed nor indexed is not made by a region"
                made = self._slice_of(tensor, place)
                if is_half and tensor.dtype in _HALF:
                    rounded.append((self._wide(made), made))
                if tensor.value in self._leaving and is_own:
                    copies.append((tensor, place, made))
            if rounded and rounded[-1][1] == made:
                made = rounded[-1][0]
            outputs.append(made)
            creates.append(tiling.tensors[made].value)
        tiling.add(
            tiling.op(
                op,
                op.target,
                args,
                options=options,
                outputs=tuple(outputs),
                creates=tuple(creates),
                part=self._share,
                phase=self.phase,
            )
        )
        for wide, made in rounded:
            self._convert(op, wide, made)
        for tensor, place, made in copies:
            self._hand_out(op, tensor, place, made)
        for number, made in added:
            self.sums.add(op, number, made, self.phase)

    def _hand_out(self, op: Op, tensor: Tensor, place: Place, made: int) -> None:
        """Append a copy of this slice of a tensor into its place in the buffer for all of it."""
        buffer = replace(tensor, value=self.region.made_as(tensor.value))
        changed = self.tiling.look(narrowed(buffer, place, self.part))
        self.tiling.add(
            self.tiling.op(
                op,
                "aten.copy_.default",
                (Ref(changed), Ref(made)),
                outputs=(changed,),
                mutates=(buffer.value,),
                phase=self.phase,
            )
        )

    def _drop(self, op: Op, found: Passage, is_own: bool) -> None:
        """Append what `op` makes of a slice, given what it drops; nothing, if nobody looks at that.

        As its own kernels do it: the CPU's rounds the scale to the type of what it is given.
        """
        tiling, dropped, place = self.tiling, op.outputs[0], found.makes[0]
        assert dropped is not None, "else nothing is dropped"
        assert place is not None, "it is indexed as what is given is"
        tensor = tiling.old.tensors[dropped]
        if tensor.value not in tiling.old.readers and tensor.value not in tiling.old.outputs:
            return
        x = self._item(op, found, (0, 0), op.args[0])
        mask = Ref(tiling.look(narrowed(tiling.old.tensors[_mask(op)], place, self.part)))
        rate = op.args[1]
        assert isinstance(rate, float), "only then there is a rule for it"
        if tiling.old.device == "cpu":
            dtype = (("dtype", Symbol("dtype", tensor.dtype)),)
            kept = self._made_of(op, "aten._to_copy.default", (mask,), tensor, place, dtype)
            scale = self._made_of(op, "aten.mul.Tensor", (kept, 1 / (1 - rate)), tensor, place)
            made = self._made_of(op, "aten.mul.Tensor", (x, scale), tensor, place)
        else:
            args = (x, mask, 1 / (1 - rate))
            made = self._made_of(op, "aten.native_dropout_backward.default", args, tensor, place)
        if tensor.value in self._leaving and is_own:
            self._hand_out(op, tensor, place, made.tensor)

    def _made_of(
        self,
        op: Op,
        target: str,
        args: tuple[Arg, ...],
        tensor: Tensor,
        place: Place,
        options: tuple[tuple[str, Arg], ...] = (),
    ) -> Ref:
        """Append an op that makes a slice of a tensor."""
        made = self._slice_of(tensor, place)
        value = self.tiling.tensors[made].value
        self.tiling.add(
            self.tiling.op(
                op,
                target,
                args,
                options=options,
                outputs=(made,),
                creates=(value,),
                part=self._share,
                phase=self.phase,
            )
        )
        return Ref(made)

    def _adds_half_by_kernel(self, op: Op, args: tuple[Arg, ...]) -> bool:
        """Append a kernel that takes half precision and adds up in float32 by itself, if there is one."""
        name = short_name(op.target)
        if name not in _EXACT or not self.tiling.old.device.startswith("cuda"):
            return False
        first, later = _EXACT[name]
        if not self.number:
            total = self.sums.begin(op, 0)
            value = self.tiling.tensors[total].value
            self._product(op, first, (*args, _FLOAT), total, creates=(value,))
            return True
        total = self.sums.total(op, 0)
        self._product(op, later, (Ref(total), *args, _FLOAT), total, options=(("out", Ref(total)),))
        return True

    def _adds_by_kernel(self, op: Op, args: tuple[Arg, ...]) -> bool:
        """Append a kernel that adds up by itself what `op` makes, if there is one."""
        name = short_name(op.target)
        if name not in _INTO or not self.number:
            return False
        total = self.sums.total(op, 0)
        self._product(op, _INTO[name], (Ref(total), *args), total)
        return True

    def _product(
        self,
        op: Op,
        target: str,
        args: tuple[Arg, ...],
        total: int,
        *,
        options: tuple[tuple[str, Arg], ...] = (),
        creates: tuple[int, ...] = (),
    ) -> None:
        self.tiling.add(
            self.tiling.op(
                op,
                target,
                args,
                options=options,
                outputs=(total,),
                creates=creates,
                mutates=() if creates else (self.tiling.tensors[total].value,),
                part=self._share,
                phase=self.phase,
            )
        )

    @property
    def _share(self) -> float:
        """Which part of everything this slice is."""
        return (self.part[1] - self.part[0]) / extent(enumerate(self.region.region.parts))

    def _slice_of(self, tensor: Tensor, place: Place) -> int:
        """A new value for this slice of what `tensor` shows."""
        compact = Compact(tensor, narrowed(tensor, place, self.part))
        size = extent(enumerate(compact.shape)) * item_bytes(tensor.dtype)
        value = self.tiling.value(size, tensor.value)
        self._made[tensor.value] = (value, compact)
        return self.tiling.look(
            Tensor(0, value, compact.shape, compact.stride, 0, tensor.dtype, tensor.signs)
        )

    def _arg(self, op: Op, found: Passage, key: int | str, arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(self._item(op, found, (key, item), each) for item, each in enumerate(arg))
        return self._item(op, found, (key, 0), arg)

    def _item(self, op: Op, found: Passage, slot: Slot, arg: Arg) -> Arg:
        if slot in found.sized and isinstance(arg, int):
            return self._size(found, found.sized[slot], arg)
        if isinstance(arg, tuple):
            return tuple(self._item(op, found, slot, each) for each in arg)
        if not isinstance(arg, Ref):
            return arg
        tensor = self.tiling.old.tensors[arg.tensor]
        place = found.takes.get(slot)
        if place is None:
            return Ref(self.tiling.look(self.region.meanwhile(tensor)))
        narrow = self.region.meanwhile(narrowed(tensor, place, self.part))
        if tensor.value not in self._made:
            return Ref(self.tiling.look(narrow))
        value, compact = self._made[tensor.value]
        look = compact.look(narrow)
        if look is None:
            raise BadRequest(f"{op.label} looks at a slice in a way that is no view of it alone.")
        return Ref(self.tiling.look(replace(look, value=value)))

    def _widened(self, op: Op, arg: Arg) -> Arg:
        """A float32 copy of a tensor of half precision; anything else as it is."""
        if isinstance(arg, tuple):
            return tuple(self._widened(op, item) for item in arg)
        if not isinstance(arg, Ref) or self.tiling.tensors[arg.tensor].dtype not in _HALF:
            return arg
        wide = self._wide(arg.tensor)
        self._convert(op, arg.tensor, wide)
        return Ref(wide)

    def _wide(self, number: int) -> int:
        """A new value that has room for the elements of a tensor in float32."""
        tensor = self.tiling.tensors[number]
        dense = is_dense(tensor.shape, tensor.stride)
        stride = tensor.stride if dense else contiguous(tensor.shape)
        value = self.tiling.value(extent(enumerate(tensor.shape)) * item_bytes("float32"), tensor.value)
        return self.tiling.look(Tensor(0, value, tensor.shape, stride, 0, "float32"))

    def _convert(self, op: Op, given: int, made: int) -> None:
        """Append a copy of one tensor as another, of another type."""
        tiling = self.tiling
        tensor = tiling.tensors[made]
        is_kept = tensor.stride == tiling.tensors[given].stride
        order: tuple[tuple[str, Arg], ...] = () if is_kept else (("memory_format", _CONTIGUOUS),)
        tiling.add(
            tiling.op(
                op,
                "aten._to_copy.default",
                (Ref(given),),
                options=(("dtype", Symbol("dtype", tensor.dtype)), *order),
                outputs=(made,),
                creates=(tensor.value,),
                phase=self.phase,
            )
        )

    def _in_a_row(self, op: Op, arg: Arg) -> Arg:
        """The same numbers one after the other in memory: a copy, if they are not."""
        if not isinstance(arg, Ref):
            return arg
        tensor = self.tiling.tensors[arg.tensor]
        packed = contiguous(tensor.shape)
        if same(tensor.shape, tensor.stride, packed):
            return arg
        size = extent(enumerate(tensor.shape)) * item_bytes(tensor.dtype)
        value = self.tiling.value(size, tensor.value)
        made = self.tiling.look(replace(tensor, value=value, stride=packed, offset=0))
        self.tiling.add(
            self.tiling.op(
                op,
                "aten.clone.default",
                (arg,),
                options=(("memory_format", _CONTIGUOUS),),
                outputs=(made,),
                creates=(value,),
                phase=self.phase,
            )
        )
        return Ref(made)

    def _size(self, found: Passage, at: int, size: int) -> int:
        """How long one part of the sliced dimension, or what it is the outer part of, is in this slice."""
        place = next(each for each in (*found.makes, *found.takes.values()) if each is not None)
        shape = [size for _, size in place]
        unit = Tensor(0, 0, tuple(shape), contiguous(shape), 0, "uint8")
        return narrowed(unit, tuple(enumerate(shape)), self.part).shape[at] * (size // shape[at])


class _Sums:
    """What a block adds up over its slices."""

    def __init__(self, region: _Sliced) -> None:
        self.region = region
        self.tiling = region.tiling
        self._totals: dict[int, int] = {}  # an old value, and the tensor that it is added up in
        self._last: dict[int, tuple[Op, Tensor]] = {}
        self._averaged: dict[int, tuple[Op, Passage]] = {}

    def _tensor(self, op: Op, number: int) -> Tensor:
        output = op.outputs[number]
        assert output is not None
        return self.tiling.old.tensors[output]

    def is_half(self, op: Op, found: Passage) -> bool:
        """Whether sums that an op makes are of half precision, so that they are made in another type."""
        return any(self._tensor(op, number).dtype in _HALF for number in found.summed)

    def begin(self, op: Op, number: int) -> int:
        """The tensor in which a result of `op` is added up: of float32, if that is of half precision."""
        tiling, tensor = self.tiling, self._tensor(op, number)
        value = self.region.made_as(tensor.value)
        if tensor.dtype in _HALF:
            is_scaled = value != tensor.value
            size = tiling.old.values[tensor.value].bytes // item_bytes(tensor.dtype) * item_bytes("float32")
            value = value if is_scaled else tiling.value(size, tensor.value)
            tiling.values[value] = replace(tiling.values[value], bytes=size)
            self._last[tensor.value] = (op, tensor)
            tensor = replace(tensor, dtype="float32")
        total = self._totals[self._tensor(op, number).value] = tiling.look(replace(tensor, value=value))
        return total

    def total(self, op: Op, number: int) -> int:
        """The tensor that a sum is added up in."""
        return self._totals[self._tensor(op, number).value]

    def part(self, op: Op, number: int, tensor: Tensor) -> int:
        """The tensor that a slice makes: the first one is the total itself, if it is not to be divided."""
        found = self.region.region.ops[op.id].averaged
        averaged = found is not None and found.result == number
        if averaged and found is not None:
            self._averaged[tensor.value] = (op, self.region.region.ops[op.id])
        if tensor.value not in self._totals and not averaged:
            return self.begin(op, number)
        dtype = "float32" if tensor.dtype in _HALF else tensor.dtype
        size = self.tiling.old.values[tensor.value].bytes // item_bytes(tensor.dtype) * item_bytes(dtype)
        value = self.tiling.value(size, tensor.value)
        return self.tiling.look(replace(tensor, value=value, dtype=dtype))

    def add(self, op: Op, number: int, made: int, phase: Phase) -> None:
        """Add what a slice made to the total, unless it is the total."""
        tiling, tensor = self.tiling, self._tensor(op, number)
        total = self._totals.setdefault(tensor.value, made)
        if total == made:
            return
        value = tiling.tensors[total].value
        tiling.add(
            tiling.op(
                op,
                "aten.add_.Tensor",
                (Ref(total), Ref(made)),
                outputs=(total,),
                mutates=(value,),
                phase=phase,
            )
        )

    def _cast(self, op: Op, made: int, dtype: str, value: int, phase: Phase) -> None:
        """A copy of another type, as a value that is there already."""
        tiling, tensor = self.tiling, self.tiling.tensors[made]
        result = tiling.look(replace(tensor, value=value, dtype=dtype))
        options = (("dtype", Symbol("dtype", dtype)),)
        tiling.add(
            tiling.op(
                op,
                "aten._to_copy.default",
                (Ref(made),),
                options=options,
                outputs=(result,),
                creates=(value,),
                phase=phase,
            )
        )

    def finish(self, phase: Phase) -> None:
        """Make of the totals what the plain ops made."""
        for value, (op, tensor) in self._last.items():
            if value not in self.region.unscaled:
                self._cast(op, self._totals[value], tensor.dtype, value, phase)
        for value, (op, found) in self._averaged.items():
            assert found.averaged is not None
            tensor = self._tensor(op, found.averaged.result)
            total, by = self._totals[value], self.total(op, found.averaged.by)
            exact = replace(tensor, dtype=self.tiling.tensors[total].dtype)
            if exact.dtype != tensor.dtype:
                size = item_bytes(exact.dtype) * extent(enumerate(tensor.shape))
                exact = replace(exact, value=self.tiling.value(size, value))
            made = self.tiling.look(exact)
            self.tiling.add(
                self.tiling.op(
                    op,
                    "aten.div.Tensor",
                    (Ref(total), Ref(by)),
                    outputs=(made,),
                    creates=(exact.value,),
                    phase=phase,
                )
            )
            if exact.dtype != tensor.dtype:
                self._cast(op, made, tensor.dtype, value, phase)


def _before(graph: Graph) -> tuple[Graph, Sequence[int], tuple[Tile, ...]]:
    """The graph without slices, the numbers of this graph's ops in it, and the blocks that there are."""
    if graph.tiled is None:
        return graph, range(len(graph.ops)), ()
    return graph.tiled.plain, graph.tiled.origin, graph.tiled.blocks


def _atoms(graph: Graph) -> Iterator[range]:
    """Ops that stay together: blocks, and every other op by itself."""
    blocks = {block.first: block.stop for block in (() if graph.tiled is None else graph.tiled.blocks)}
    number = 0
    while number < len(graph.ops):
        stop = blocks.get(number, number + 1)
        yield range(number, stop)
        number = stop


def _stages(graph: Graph, region: Region) -> dict[int, int]:
    """For each op of the region its stage."""
    stages: dict[int, int] = {}
    complete: dict[int, int] = {}  # the first stage that may have a value as a whole
    sums = summed(graph, region)
    base = 0
    phase: Phase | None = None
    for op in graph.ops:
        found = region.ops.get(op.id)
        if found is None:
            level = max((_available(value, stages, complete, graph, region) for value in op.reads), default=0)
            complete |= dict.fromkeys((*op.creates, *op.mutates), level)
            continue
        if phase is not None and op.phase is not phase:
            base = 1 + max(stages.values())
        phase = op.phase
        stage = base
        for slot, number in slots(op):
            value = graph.tensors[number].value
            maker = graph.creator.get(value)
            is_sliced = value in region.axes and value not in sums
            if found.takes.get(slot) is not None and maker in stages and is_sliced:
                stage = max(stage, stages[maker])
            else:
                stage = max(stage, _available(value, stages, complete, graph, region))
        stages[op.id] = stage
    return stages


def _available(
    value: int, stages: Mapping[int, int], complete: Mapping[int, int], graph: Graph, region: Region
) -> int:
    maker = graph.creator.get(value)
    if maker in stages and maker is not None:
        return stages[maker] + 1
    return complete.get(value, 0)


def _float_of(one: str, other: str) -> str:
    """The type in which numbers of two types are multiplied or divided, of which one is floating."""
    found = {dtype for dtype in (one, other) if "float" in dtype}
    if len(found) == 1:
        return found.pop()
    return "float64" if "float64" in found else "float32"


def _mask(op: Op) -> int:
    """The tensor that tells what a dropout drops."""
    mask = op.outputs[1]
    assert mask is not None, "a dropout makes a mask"
    return mask


def _first(args: tuple[Arg, ...]) -> int:
    """The first tensor among arguments."""
    return next(arg.tensor for arg in args if isinstance(arg, Ref))


def _options(dtype: str, graph: Graph) -> tuple[tuple[str, Arg], ...]:
    return (
        ("dtype", Symbol("dtype", dtype)),
        ("layout", Symbol("layout", "strided")),
        ("device", Symbol("device", graph.device)),
        ("pin_memory", False),
    )
