"""A backward that runs ahead: with ones in place of what comes late, and scaled when that is there."""

from __future__ import annotations

from dataclasses import replace

from lowtide.ir.graph import Arg, Op, Phase, Ref, Tensor
from lowtide.ir.validate import item_bytes
from lowtide.tiles.building import HALF, Building, options_of
from lowtide.tiles.early import NOTHING, Early, Factor


class Ahead:
    """What a region makes before it is known what it is to be multiplied by; with no `early`, nothing."""

    def __init__(self, building: Building, early: Early | None, sums: frozenset[int]) -> None:
        self.building = building
        self.early = early
        self.unscaled: dict[int, int] = {}  # what a backward makes that runs ahead, and what it makes it as
        self._sums = sums
        self._ones: dict[int, int] = {}
        self._scales: dict[Factor, int] = {}  # tensors

    def made_as(self, value: int) -> int:
        """The value that a block makes in place of an old one: itself, unless it is to be scaled."""
        factor = NOTHING if self.early is None else self.early.factors.get(value, NOTHING)
        if factor == NOTHING:
            return value
        if value not in self.unscaled:
            self.unscaled[value] = self.building.value(self.building.old.values[value].bytes, value)
        return self.unscaled[value]

    def make_ones(self, like: Op, phase: Phase) -> None:
        """What is taken for numbers that are not there yet."""
        for late in sorted(() if self.early is None else self.early.ones):
            dtype = next(tensor.dtype for tensor in self.building.old.tensors if tensor.value == late)
            value = self._ones[late] = self.building.value(item_bytes(dtype), late)
            made = self.building.look(Tensor(0, value, (), (), 0, dtype))
            self.building.add(
                self.building.op(
                    like,
                    "aten.full.default",
                    ((), 1.0),
                    options=options_of(dtype, self.building.old),
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
        assert self.early is not None, "only what runs ahead is scaled"
        for output in op.outputs:
            tensor = None if output is None else self.building.old.tensors[output]
            if tensor is None or tensor.value not in self.unscaled:
                continue
            number = self._scales_by(op, self.early.factors[tensor.value])
            unscaled = replace(tensor, value=self.unscaled[tensor.value], dtype=self._exact(tensor))
            args = (Ref(self.building.look(unscaled)), Ref(number))
            if unscaled.dtype == tensor.dtype:
                made = self.building.look(tensor)
                self.building.add(
                    self.building.op(op, "aten.mul.Tensor", args, outputs=(made,), creates=(tensor.value,))
                )
                continue
            self.building.empty(op, tensor, op.phase)
            made = self.building.look(tensor)
            self.building.add(
                self.building.op(
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
        is_summed = tensor.value in self._sums
        return "float32" if is_summed and tensor.dtype in HALF else tensor.dtype

    def _scales_by(self, op: Op, factor: Factor) -> int:
        """A number that stands for a factor, as a tensor."""
        if factor in self._scales:
            return self._scales[factor]
        total: int | None = None
        for target, values in (("aten.mul.Tensor", factor.times), ("aten.div.Tensor", factor.over)):
            for value in values:
                dtype = next(tensor.dtype for tensor in self.building.old.tensors if tensor.value == value)
                number = self.building.look(Tensor(0, value, (), (), 0, dtype))
                if target == "aten.div.Tensor":
                    number = self._never_zero(op, number)
                if total is None and target == "aten.mul.Tensor":
                    total = number
                    continue
                first = (Ref(total),) if total is not None else (1.0,)
                known = "bool" if total is None else self.building.tensors[total].dtype
                total = self._small(op, target, (*first, Ref(number)), _float_of(known, dtype))
        assert total is not None, "a factor is made of something"
        self._scales[factor] = total
        return total

    def _never_zero(self, op: Op, number: int) -> int:
        """One where a number is zero: there is nothing to be divided then, and plain kernels make zeros."""
        is_zero = self._small(op, "aten.eq.Scalar", (Ref(number), 0), "bool")
        return self._small(
            op, "aten.add.Tensor", (Ref(number), Ref(is_zero)), self.building.tensors[number].dtype
        )

    def _small(self, op: Op, target: str, args: tuple[Arg, ...], dtype: str) -> int:
        value = self.building.value(item_bytes(dtype), self.building.tensors[_first(args)].value)
        made = self.building.look(Tensor(0, value, (), (), 0, dtype))
        self.building.add(self.building.op(op, target, args, outputs=(made,), creates=(value,)))
        return made


def _float_of(one: str, other: str) -> str:
    """The type in which numbers of two types are multiplied or divided, of which one is floating."""
    found = {dtype for dtype in (one, other) if "float" in dtype}
    if len(found) == 1:
        return found.pop()
    return "float64" if "float64" in found else "float32"


def _first(args: tuple[Arg, ...]) -> int:
    """The first tensor among arguments."""
    return next(arg.tensor for arg in args if isinstance(arg, Ref))
