"""What a block adds up over its slices: in float32 where it is of half precision, and rounded once."""

from __future__ import annotations

from dataclasses import replace

from lowtide.ir.graph import Op, Phase, Ref, Symbol, Tensor
from lowtide.ir.validate import item_bytes
from lowtide.tiles.ahead import Ahead
from lowtide.tiles.axis import extent
from lowtide.tiles.building import HALF, Building
from lowtide.tiles.region import Passage, Region


class Sums:
    """What a block adds up over its slices."""

    def __init__(self, building: Building, region: Region, ahead: Ahead) -> None:
        self.building = building
        self.region = region
        self.ahead = ahead
        self._totals: dict[int, int] = {}  # an old value, and the tensor that it is added up in
        self._last: dict[int, tuple[Op, Tensor]] = {}
        self._averaged: dict[int, tuple[Op, Passage]] = {}

    def _tensor(self, op: Op, number: int) -> Tensor:
        output = op.outputs[number]
        assert output is not None
        return self.building.old.tensors[output]

    def is_half(self, op: Op, found: Passage) -> bool:
        """Whether sums that an op makes are of half precision, so that they are made in another type."""
        return any(self._tensor(op, number).dtype in HALF for number in found.summed)

    def begin(self, op: Op, number: int) -> int:
        """The tensor in which a result of `op` is added up: of float32, if that is of half precision."""
        building, tensor = self.building, self._tensor(op, number)
        value = self.ahead.made_as(tensor.value)
        if tensor.dtype in HALF:
            is_scaled = value != tensor.value
            size = building.old.values[tensor.value].bytes // item_bytes(tensor.dtype) * item_bytes("float32")
            value = value if is_scaled else building.value(size, tensor.value)
            building.values[value] = replace(building.values[value], bytes=size)
            self._last[tensor.value] = (op, tensor)
            tensor = replace(tensor, dtype="float32")
        total = self._totals[self._tensor(op, number).value] = building.look(replace(tensor, value=value))
        return total

    def total(self, op: Op, number: int) -> int:
        """The tensor that a sum is added up in."""
        return self._totals[self._tensor(op, number).value]

    def part(self, op: Op, number: int, tensor: Tensor) -> int:
        """The tensor that a slice makes: the first one is the total itself, if it is not to be divided."""
        found = self.region.ops[op.id].averaged
        averaged = found is not None and found.result == number
        if averaged and found is not None:
            self._averaged[tensor.value] = (op, self.region.ops[op.id])
        if tensor.value not in self._totals and not averaged:
            return self.begin(op, number)
        dtype = "float32" if tensor.dtype in HALF else tensor.dtype
        size = self.building.old.values[tensor.value].bytes // item_bytes(tensor.dtype) * item_bytes(dtype)
        value = self.building.value(size, tensor.value)
        return self.building.look(replace(tensor, value=value, dtype=dtype))

    def add(self, op: Op, number: int, made: int, phase: Phase) -> None:
        """Add what a slice made to the total, unless it is the total."""
        building, tensor = self.building, self._tensor(op, number)
        total = self._totals.setdefault(tensor.value, made)
        if total == made:
            return
        value = building.tensors[total].value
        building.add(
            building.op(
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
        building, tensor = self.building, self.building.tensors[made]
        result = building.look(replace(tensor, value=value, dtype=dtype))
        options = (("dtype", Symbol("dtype", dtype)),)
        building.add(
            building.op(
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
            if value not in self.ahead.unscaled:
                self._cast(op, self._totals[value], tensor.dtype, value, phase)
        for value, (op, found) in self._averaged.items():
            assert found.averaged is not None
            tensor = self._tensor(op, found.averaged.result)
            total, by = self._totals[value], self.total(op, found.averaged.by)
            exact = replace(tensor, dtype=self.building.tensors[total].dtype)
            if exact.dtype != tensor.dtype:
                size = item_bytes(exact.dtype) * extent(enumerate(tensor.shape))
                exact = replace(exact, value=self.building.value(size, value))
            made = self.building.look(exact)
            self.building.add(
                self.building.op(
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
