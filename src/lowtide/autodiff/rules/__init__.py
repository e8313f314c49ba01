"""The derivatives of kernels, by name, and what each looks at.

    elementwise    + - * / powers, exp, log, sin, … , where, dropout
    activations    relu, tanh, sigmoid, gelu, silu
    products       mm, addmm, bmm, baddbmm
    images         convolution, pooling
    normalisation  by batch, layer and group; softmax
    attention      embedding, fused attention
    losses         nll_loss, mse_loss
    shapes         sums, means, copies, cat, stack

The formulas are those that PyTorch's autograd uses, in the same order of operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lowtide.autodiff.rules import (
    activations,
    attention,
    elementwise,
    images,
    losses,
    normalisation,
    products,
    shapes,
)
from lowtide.autodiff.rules.rule import Rule, Site, Slot, slots
from lowtide.errors import NotDifferentiable
from lowtide.ir.graph import Op, Ref

__all__ = ["CONSTANT", "RULES", "Rule", "Site", "Slot", "is_constant", "needs", "rule_of", "slots"]

RULES: Mapping[str, Rule] = {
    **elementwise.RULES,
    **activations.RULES,
    **products.RULES,
    **images.RULES,
    **normalisation.RULES,
    **attention.RULES,
    **losses.RULES,
    **shapes.RULES,
}

# Kernels that are handed a tensor for its shape only: what they make does not depend on its numbers.
CONSTANT = frozenset(
    f"aten.{kernel}.default"
    for kernel in (
        "detach",
        "empty_like",
        "full_like",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randn_like",
        "zeros_like",
    )
)
_ADVICE = "Ask for gradients that do not pass it, or write the step with other functions."


def rule_of(op: Op) -> Rule:
    """The rule for an op.

    Raises:
        NotDifferentiable: there is none.
    """
    rule = RULES.get(op.target)
    if rule is None:
        reason = "it draws random numbers" if op.random else f"there is no rule for {op.target}"
        raise NotDifferentiable(op.id, op.label, reason, _ADVICE)
    return rule


def is_constant(op: Op, result: int) -> bool:
    """Whether a result of an op stays the same when the op's arguments change a little."""
    rule = RULES.get(op.target)
    return op.target in CONSTANT or (rule is not None and result in rule.constant)


def needs(op: Op, wanted: Collection[Slot]) -> tuple[int, ...]:
    """The tensors of the forward that the backward of `op` looks at, for these gradients of its arguments.

    Raises:
        NotDifferentiable: there is no rule for the op, or none for one of these arguments.
    """
    declared = rule_of(op).needs_of(op)
    found: dict[int, None] = {}
    for position in sorted({position for position, _ in wanted}):
        if position not in declared:
            reason = f"its derivative by argument {position} is not known"
            raise NotDifferentiable(op.id, op.label, reason, _ADVICE)
        for need in declared[position]:
            tensor = op.outputs[need.position] if need.made else _argument(op, need.position)
            if tensor is not None:
                found[tensor] = None
    return tuple(found)


def _argument(op: Op, position: int) -> int | None:
    arg = op.args[position] if position < len(op.args) else None
    return arg.tensor if isinstance(arg, Ref) else None
