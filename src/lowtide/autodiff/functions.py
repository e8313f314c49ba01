"""What expressions become: for every function the kernels it calls, as a captured graph has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from lowtide.errors import BadRequest, ShapeMismatch
from lowtide.ir.builder import Growing, dense
from lowtide.ir.calls import add, apply, bmm, div, is_float, mm, mul, power, reduced, sub, unary
from lowtide.ir.graph import Arg, Ref
from lowtide.ir.strides import Ints, broadcast

Number: TypeAlias = int | float
Operand: TypeAlias = Ref | Number


def plus(growing: Growing, a: Operand, b: Operand) -> Ref:
    """a + b. Kernels take a number in second place only."""
    return add(growing, a, b) if isinstance(a, Ref) else add(growing, b, a)


def minus(growing: Growing, a: Operand, b: Operand) -> Ref:
    """a - b."""
    return sub(growing, a, b) if isinstance(a, Ref) else apply(growing, "aten.rsub.Scalar", b, a)


def times(growing: Growing, a: Operand, b: Operand) -> Ref:
    """a * b."""
    return mul(growing, a, b) if isinstance(a, Ref) else mul(growing, b, a)


def over(growing: Growing, a: Operand, b: Operand) -> Ref:
    """a / b."""
    if isinstance(a, Ref):
        return div(growing, a, b)
    inverse = unary(growing, "reciprocal", b)
    return inverse if a == 1 else mul(growing, inverse, a)


def raised(growing: Growing, a: Operand, b: Operand) -> Ref:
    """a ** b."""
    if not isinstance(b, Ref):
        return power(growing, a, b)
    return apply(growing, f"aten.pow.{'Tensor_Tensor' if isinstance(a, Ref) else 'Scalar'}", a, b)


def itself(growing: Growing, a: Ref) -> Ref:
    """Nothing new: the same tensor under another name."""
    return a


def pointwise(kernel: str, growing: Growing, a: Ref) -> Ref:
    """A function of one operand that has a kernel of its own."""
    return unary(growing, kernel, a)


def product(growing: Growing, a: Ref, b: Ref) -> Ref:
    """The product of matrices, or of batches of them; a batch times one matrix is one large product.

    A vector is a row on the left and a column on the right.
    """
    left, right = growing.shape(a), growing.shape(b)
    if not left or not right or left[-1] != right[max(len(right) - 2, 0)]:
        raise ShapeMismatch("matmul", [(growing.name(a), left), (growing.name(b), right)])
    if len(left) == 1:
        made = product(growing, growing.unsqueezed(a, [0]), b)
        found = growing.shape(made)
        return growing.reshaped(made, (*found[:-2], *found[-1:]) if len(right) > 1 else ())
    if len(right) == 1:
        return growing.reshaped(product(growing, a, growing.unsqueezed(b, [1])), left[:-1])
    if len(right) == 2:
        rows = growing.reshaped(a, (math.prod(left[:-1]), left[-1]))
        return growing.reshaped(mm(growing, rows, b), (*left[:-1], right[-1]))
    return _batched(growing, a, b)


def _batched(growing: Growing, a: Ref, b: Ref) -> Ref:
    left, right = growing.shape(a), growing.shape(b)
    batch = broadcast(left[:-2], right[:-2])
    if batch is None:
        raise ShapeMismatch("matmul", [(growing.name(a), left), (growing.name(b), right)])
    flat = [
        growing.reshaped(growing.expanded(matrix, (*batch, *shape[-2:])), (math.prod(batch), *shape[-2:]))
        for matrix, shape in ((a, left), (b, right))
    ]
    return growing.reshaped(bmm(growing, *flat), (*batch, left[-2], right[-1]))


def linear(growing: Growing, x: Ref, weight: Ref, bias: Ref) -> Ref:
    """x times the transposed weight, plus the bias, as torch.nn.Linear has them."""
    rows, weights = growing.shape(x), growing.shape(weight)
    if len(weights) != 2 or not rows or rows[-1] != weights[1] or growing.shape(bias) != weights[:1]:
        operands = (x, weight, bias)
        raise ShapeMismatch("linear", [(growing.name(each), growing.shape(each)) for each in operands])
    flat = growing.reshaped(x, (math.prod(rows[:-1]), rows[-1]))
    form = dense((math.prod(rows[:-1]), weights[0]), growing.dtype(x))
    made = growing.call("aten.addmm.default", [bias, flat, growing.transposed(weight)], form)
    return growing.reshaped(made, (*rows[:-1], weights[0]))


def reduction(kernel: str, dims: Sequence[int], keepdim: bool, growing: Growing, a: Ref) -> Ref:
    """A sum or mean, over everything if no dimensions are named."""
    shape = growing.shape(a)
    for dim in dims:
        check_dim(kernel, growing, a, dim)
    if not dims and not keepdim:
        return growing.call(f"aten.{kernel}.default", [a], dense((), growing.dtype(a)))
    over_all = tuple(dims) or tuple(range(len(shape)))
    target = {"sum": "aten.sum.dim_IntList", "mean": "aten.mean.dim"}[kernel]
    args: list[Arg] = [a, over_all, *([True] if keepdim else [])]
    return growing.call(target, args, dense(reduced(shape, over_all, keepdim), growing.dtype(a)))


def normalised(kernel: str, dim: int, growing: Growing, a: Ref) -> Ref:
    """A softmax or its logarithm along a dimension."""
    check_dim(kernel.removeprefix("_"), growing, a, dim)
    along = dim % max(len(growing.shape(a)), 1)
    form = dense(growing.shape(a), growing.dtype(a))
    return growing.call(f"aten.{kernel}.default", [a, along, False], form)


def nll_loss(growing: Growing, logs: Ref, labels: Ref) -> Ref:
    """The mean of what the logarithms of probabilities (batch, classes) say against the labels (batch)."""
    shape, batch = growing.shape(logs), growing.shape(labels)
    if len(shape) != 2 or batch != shape[:1]:
        raise ShapeMismatch("nll_loss", [(growing.name(logs), shape), (growing.name(labels), batch)])
    if is_float(growing.dtype(labels)):
        raise BadRequest(
            f"nll_loss: '{growing.name(labels)}' holds labels, so its dtype must be int64, not "
            f"{growing.dtype(labels)}. Give it that dtype."
        )
    number = dense((), growing.dtype(logs))
    made = growing.calls("aten.nll_loss_forward.default", [logs, labels, None, 1, -100], [number, number])
    assert made[0] is not None
    return made[0]


def cross_entropy(growing: Growing, scores: Ref, labels: Ref) -> Ref:
    """The mean cross entropy of scores (batch, classes) against labels (batch)."""
    return nll_loss(growing, normalised("_log_softmax", -1, growing, scores), labels)


def transposition(first: int, second: int, growing: Growing, a: Ref) -> Ref:
    """Two dimensions exchanged: another look at the same value."""
    for dim in (first, second):
        check_dim("transpose", growing, a, dim)
    return growing.transposed(a, first, second)


def reshaping(shape: Ints, growing: Growing, a: Ref) -> Ref:
    """Another shape; one size may be -1, and is what is left."""
    if shape.count(-1) == 1:
        rest = -math.prod(shape)
        found = math.prod(growing.shape(a)) // rest if rest else 0
        shape = tuple(found if size == -1 else size for size in shape)
    if min(shape, default=0) < 0:
        raise ShapeMismatch("reshape", [(growing.name(a), growing.shape(a)), ("the new shape", shape)])
    return growing.reshaped(a, shape)


def concatenation(dim: int, growing: Growing, *parts: Ref) -> Ref:
    """Tensors side by side along a dimension."""
    shapes = [growing.shape(part) for part in parts]
    check_dim("concat", growing, parts[0], dim)
    along = dim % len(shapes[0])
    for part, shape in zip(parts, shapes, strict=True):
        if (shape[:along], shape[along + 1 :]) != (shapes[0][:along], shapes[0][along + 1 :]):
            raise ShapeMismatch("concat", [(growing.name(parts[0]), shapes[0]), (growing.name(part), shape)])
    whole = (*shapes[0][:along], sum(shape[along] for shape in shapes), *shapes[0][along + 1 :])
    return growing.call("aten.cat.default", [tuple(parts), along], dense(whole, growing.dtype(parts[0])))


def check_dim(function: str, growing: Growing, a: Ref, dim: int) -> None:
    """Raise BadRequest for a dimension that a tensor does not have."""
    rank = len(growing.shape(a))
    if not -rank <= dim < max(rank, 1):
        raise BadRequest(
            f"{function}: '{growing.name(a)}' has shape {growing.shape(a)}, so there is no dimension {dim}. "
            f"Name one of {', '.join(map(str, range(rank))) or 'none'}."
        )
