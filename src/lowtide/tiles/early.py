"""The backward of a region that ends in a loss, run with its forward: slices need not be made twice.

What the backward is given late, the gradient of the loss and sums over all slices, are single numbers, and
all that it makes is proportional to them. So it is run with ones in their place, and what it has made is
scaled when they are there:

    plain    y = f(x[i])           …  g · df/dx[i]
    early    y, u = f, df/dx[i]    …  g · u

It goes with any loss, and with a gradient that is scaled, accumulated or added to others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lowtide.ir.graph import Graph, Op, Phase, Role, short_name
from lowtide.ir.validate import item_bytes
from lowtide.tiles.region import Region, summed
from lowtide.tiles.rules import LINEAR, SUMS, Slot, slots

_LOSS = ("nll_loss_backward", "nll_loss2d_backward")  # its last argument is what it divides by
_REDUCTION, _WEIGHT = 4, 6
_MEAN = 1


@dataclass(frozen=True)
class Factor:
    """What a value is to be multiplied by when that is known: numbers, by their values, over others."""

    times: tuple[int, ...] = ()
    over: tuple[int, ...] = ()

    def __mul__(self, other: Factor) -> Factor:
        return Factor(tuple(sorted(self.times + other.times)), tuple(sorted(self.over + other.over)))

    def inverse(self) -> Factor:
        """One over it."""
        return Factor(self.over, self.times)


NOTHING = Factor()


@dataclass(frozen=True)
class Early:
    """How the backward of a region is run early.

    `factors` has one for each value that it makes; `ones` are the values that are taken for one meanwhile.
    """

    factors: Mapping[int, Factor]
    ones: frozenset[int]


def early(graph: Graph, region: Region) -> Early | None:
    """How to run the backward of `region` with its forward; None if that cannot be.

    It cannot where it needs more than single numbers that come later, or is not proportional to them, nor
    where all slices have to be there before one can go on, nor in float16, where ones in place of small
    numbers may be too large.
    """
    phases = {graph.ops[number].phase for number in region.ops}
    if phases != {Phase.FORWARD, Phase.BACKWARD}:
        return None
    late, sums = _late(graph, region), summed(graph, region)
    factors: dict[int, Factor] = {}
    ones: set[int] = set()
    for number in sorted(region.ops):
        op = graph.ops[number]
        for slot, tensor in slots(op):
            look = graph.tensors[tensor]
            is_whole = region.ops[number].takes.get(slot) is None or look.value in sums
            if graph.creator.get(look.value) in region.ops and look.value not in late and is_whole:
                return None
            if look.value in late:
                if op.phase is Phase.FORWARD:
                    return None
                if graph.values[look.value].bytes != item_bytes(look.dtype):
                    return None
                ones.add(look.value)
        if op.phase is Phase.FORWARD:
            continue
        found = _factor(graph, op, factors, late)
        if found is None or any(_dtype(graph, made) == "float16" for made in op.outputs):
            return None
        factors |= dict.fromkeys(op.creates, found)
    return Early(factors, frozenset(ones))


def _late(graph: Graph, region: Region) -> frozenset[int]:
    """What is there only when the forward of the region is over."""
    late: set[int] = set()
    sums = summed(graph, region)
    inside = {value for number in region.ops for value in graph.ops[number].creates}
    in_forward = {value for op in graph.ops if op.phase is Phase.FORWARD for value in op.reads}
    for value in graph.resident:
        if value not in in_forward and graph.values[value].role not in (Role.PARAMETER, Role.BUFFER):
            late.add(value)
    for op in graph.ops:
        if op.id not in region.ops:
            waits = not (late.isdisjoint(op.reads) and inside.isdisjoint(op.reads))
            if op.phase is not Phase.FORWARD or waits:
                late.update(op.creates)
        elif op.phase is Phase.FORWARD:
            late.update(sums.intersection(op.creates))
    return frozenset(late)


def _factor(graph: Graph, op: Op, factors: Mapping[int, Factor], late: frozenset[int]) -> Factor | None:
    """What everything that `op` makes is to be multiplied by; None if there is no such number."""
    name = short_name(op.target)
    given = dict(_given(graph, op, factors, late))
    if not given:
        return NOTHING
    if name in SUMS:
        both = [given.get((position, 0)) for position in (0, 1)]
        return both[0] if both[0] == both[1] else None
    total = NOTHING
    for (position, item), factor in given.items():
        if item == 0 and position in LINEAR.get(name, ()):
            total *= factor
        elif item == 0 and name == "div" and position == 1:
            total *= factor.inverse()
        elif name in _LOSS and position == _WEIGHT:
            total *= factor.inverse() if op.args[_REDUCTION] == _MEAN else NOTHING
        else:
            return None
    return total


def _given(
    graph: Graph, op: Op, factors: Mapping[int, Factor], late: frozenset[int]
) -> Iterator[tuple[Slot, Factor]]:
    for slot, number in slots(op):
        tensor = graph.tensors[number]
        if tensor.value in late:
            yield slot, Factor((tensor.value,))
        elif factors.get(tensor.value, NOTHING) != NOTHING:
            yield slot, factors[tensor.value]


def _dtype(graph: Graph, number: int | None) -> str:
    return "" if number is None else graph.tensors[number].dtype
