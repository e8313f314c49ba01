"""One slice of a block: the ops of a region on a part of what they run on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lowtide.errors import BadRequest
from lowtide.ir.graph import Arg, Op, Phase, Ref, Symbol, Tensor, short_name
from lowtide.ir.strides import contiguous, is_dense, same
from lowtide.ir.validate import item_bytes
from lowtide.tiles.ahead import Ahead
from lowtide.tiles.axis import Compact, Place, Range, extent, narrowed
from lowtide.tiles.building import HALF, Building
from lowtide.tiles.dropping import mask_of
from lowtide.tiles.region import Passage, Region
from lowtide.tiles.rules import Slot
from lowtide.tiles.sums import Sums

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


class Slice:
    """One slice of a block."""

    def __init__(
        self,
        building: Building,
        region: Region,
        ahead: Ahead,
        part: Range,
        phase: Phase,
        leaving: Collection[int],
        sums: Sums,
        number: int,
    ) -> None:
        self.building = building
        self.region = region
        self.ahead = ahead
        self.part = part
        self.phase = phase
        self.sums = sums
        self.number = number
        self._leaving = leaving
        self._made: dict[int, tuple[int, Compact]] = {}  # a value, and the slice of it

    def run(self, op: Op, is_own: bool) -> None:
        """Append the op for this slice."""
        building, found = self.building, self.region.ops[op.id]
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
            tensor = building.old.tensors[output]
            place = found.makes[number]
            if number in found.summed:
                made = self.sums.part(op, number, tensor)
                added.append((number, made))
            else:
                assert place is not None, "what is neither summed nor indexed is not made by a region"
                made = self._slice_of(tensor, place)
                if is_half and tensor.dtype in HALF:
                    rounded.append((self._wide(made), made))
                if tensor.value in self._leaving and is_own:
                    copies.append((tensor, place, made))
            if rounded and rounded[-1][1] == made:
                made = rounded[-1][0]
            outputs.append(made)
            creates.append(building.tensors[made].value)
        building.add(
            building.op(
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
        buffer = replace(tensor, value=self.ahead.made_as(tensor.value))
        changed = self.building.look(narrowed(buffer, place, self.part))
        self.building.add(
            self.building.op(
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
        building, dropped, place = self.building, op.outputs[0], found.makes[0]
        assert dropped is not None, "else nothing is dropped"
        assert place is not None, "it is indexed as what is given is"
        tensor = building.old.tensors[dropped]
        if tensor.value not in building.old.readers and tensor.value not in building.old.outputs:
            return
        x = self._item(op, found, (0, 0), op.args[0])
        mask = Ref(building.look(narrowed(building.old.tensors[mask_of(op)], place, self.part)))
        rate = op.args[1]
        assert isinstance(rate, float), "only then there is a rule for it"
        if building.old.device == "cpu":
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
        value = self.building.tensors[made].value
        self.building.add(
            self.building.op(
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
        if name not in _EXACT or not self.building.old.device.startswith("cuda"):
            return False
        first, later = _EXACT[name]
        if not self.number:
            total = self.sums.begin(op, 0)
            value = self.building.tensors[total].value
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
        self.building.add(
            self.building.op(
                op,
                target,
                args,
                options=options,
                outputs=(total,),
                creates=creates,
                mutates=() if creates else (self.building.tensors[total].value,),
                part=self._share,
                phase=self.phase,
            )
        )

    @property
    def _share(self) -> float:
        """Which part of everything this slice is."""
        return (self.part[1] - self.part[0]) / extent(enumerate(self.region.parts))

    def _slice_of(self, tensor: Tensor, place: Place) -> int:
        """A new value for this slice of what `tensor` shows."""
        compact = Compact(tensor, narrowed(tensor, place, self.part))
        size = extent(enumerate(compact.shape)) * item_bytes(tensor.dtype)
        value = self.building.value(size, tensor.value)
        self._made[tensor.value] = (value, compact)
        return self.building.look(
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
        tensor = self.building.old.tensors[arg.tensor]
        place = found.takes.get(slot)
        if place is None:
            return Ref(self.building.look(self.ahead.meanwhile(tensor)))
        narrow = self.ahead.meanwhile(narrowed(tensor, place, self.part))
        if tensor.value not in self._made:
            return Ref(self.building.look(narrow))
        value, compact = self._made[tensor.value]
        look = compact.look(narrow)
        if look is None:
            raise BadRequest(f"{op.label} looks at a slice in a way that is no view of it alone.")
        return Ref(self.building.look(replace(look, value=value)))

    def _widened(self, op: Op, arg: Arg) -> Arg:
        """A float32 copy of a tensor of half precision; anything else as it is."""
        if isinstance(arg, tuple):
            return tuple(self._widened(op, item) for item in arg)
        if not isinstance(arg, Ref) or self.building.tensors[arg.tensor].dtype not in HALF:
            return arg
        wide = self._wide(arg.tensor)
        self._convert(op, arg.tensor, wide)
        return Ref(wide)

    def _wide(self, number: int) -> int:
        """A new value that has room for the elements of a tensor in float32."""
        tensor = self.building.tensors[number]
        dense = is_dense(tensor.shape, tensor.stride)
        stride = tensor.stride if dense else contiguous(tensor.shape)
        value = self.building.value(extent(enumerate(tensor.shape)) * item_bytes("float32"), tensor.value)
        return self.building.look(Tensor(0, value, tensor.shape, stride, 0, "float32"))

    def _convert(self, op: Op, given: int, made: int) -> None:
        """Append a copy of one tensor as another, of another type."""
        building = self.building
        tensor = building.tensors[made]
        is_kept = tensor.stride == building.tensors[given].stride
        order: tuple[tuple[str, Arg], ...] = () if is_kept else (("memory_format", _CONTIGUOUS),)
        building.add(
            building.op(
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
        tensor = self.building.tensors[arg.tensor]
        packed = contiguous(tensor.shape)
        if same(tensor.shape, tensor.stride, packed):
            return arg
        size = extent(enumerate(tensor.shape)) * item_bytes(tensor.dtype)
        value = self.building.value(size, tensor.value)
        made = self.building.look(replace(tensor, value=value, stride=packed, offset=0))
        self.building.add(
            self.building.op(
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
