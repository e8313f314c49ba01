"""What a dropout drops: drawn for all elements where that was done before, whatever is cut into slices."""

from __future__ import annotations

from dataclasses import replace

from lowtide.ir.graph import Op, Ref, argument_tensors
from lowtide.tiles.building import Building


def draw(building: Building, op: Op) -> None:
    """Append what draws the numbers that `op` draws, for all of its elements, without looking at them.

    On the CPU its kernel draws a mask by itself. Elsewhere kernels do all at once, and how many elements
    there are, of what type, decides what is drawn: so it is handed some.
    """
    old = building.old
    mask = old.tensors[mask_of(op)]
    rate = op.args[1]
    assert isinstance(rate, float), "only then there is a rule for it"
    drawn = building.look(mask)
    if old.device == "cpu":
        building.empty(op, mask, op.phase)
        building.add(
            building.op(
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
    x = old.tensors[next(argument_tensors(op))]
    some, dropped = (replace(x, value=building.value(old.values[x.value].bytes, x.value)) for _ in range(2))
    building.empty(op, some, op.phase)
    building.add(
        building.op(
            op,
            op.target,
            (Ref(building.look(some)), *op.args[1:]),
            outputs=(building.look(dropped), drawn),
            creates=(dropped.value, mask.value),
            part=1.0,
            random=True,
        )
    )


def mask_of(op: Op) -> int:
    """The tensor that tells what a dropout drops."""
    mask = op.outputs[1]
    assert mask is not None, "a dropout makes a mask"
    return mask
