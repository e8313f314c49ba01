"""Calls of kernels by name, with the tensors they make: the vocabulary of expressions and derivatives.

Each function appends the op of its name and returns the tensor that it makes. Operands are tensors or, where
the kernel takes them, numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lowtide.errors import ShapeMismatch
from lowtide.ir.builder import Form, Growing, dense
from lowtide.ir.graph import Arg, Ref, Symbol
from lowtide.ir.strides import Ints, broadcast, pointwise
from lowtide.ir.validate import item_bytes

_KINDS = ("bool", "int", "float", "complex")


def is_float(dtype: str) -> bool:
    """Whether tensors of a dtype can have gradients."""
    return _kind(dtype) >= _KINDS.index("float")


def apply(
    growing: Growing,
    target: str,
    *operands: Arg,
    kwargs: Mapping[str, Arg] | None = None,
    dtype: str | None = None,
) -> Ref:
    """A pointwise kernel: operands are stretched to one shape, and what it makes lies in memory as they do.

    `dtype` is what it makes, unless that follows from the operands.

    Raises:
        ShapeMismatch: the operands cannot be stretched to one shape.
    """
    tensors = [growing.tensors[arg.tensor] for arg in operands if isinstance(arg, Ref)]
    shape = broadcast(*(tensor.shape for tensor in tensors))
    if shape is None:
        named = [(growing.name(Ref(tensor.id)), tensor.shape) for tensor in tensors]
        raise ShapeMismatch(target.split(".")[1], named)
    stride = pointwise(shape, [(tensor.shape, tensor.stride) for tensor in tensors])
    made = dtype or promoted(growing, operands)
    return growing.call(target, operands, Form(shape, stride, made), kwargs)


def promoted(growing: Growing, operands: Iterable[Arg]) -> str:
    """The dtype that a pointwise kernel makes of these operands.

    Tensors with dimensions decide, unless a single number, as a tensor or not, is of a higher kind.
    """
    tensors = [growing.tensors[arg.tensor] for arg in operands if isinstance(arg, Ref)]
    with_dims = [tensor.dtype for tensor in tensors if tensor.shape]
    without = [tensor.dtype for tensor in tensors if not tensor.shape]
    numbers = [_of_number(arg) for arg in operands if isinstance(arg, bool | int | float)]
    found = ""
    for dtypes in (with_dims, without, numbers):
        if dtypes and (best := _largest(dtypes)) and (not found or _kind(best) > _kind(found)):
            found = best
    return found


def _of_number(number: bool | int | float) -> str:
    return "bool" if isinstance(number, bool) else "int64" if isinstance(number, int) else "float32"


def _largest(dtypes: Sequence[str]) -> str:
    if {"float16", "bfloat16"} <= set(dtypes):
        return _largest([*(set(dtypes) - {"float16", "bfloat16"}), "float32"])
    return max(dtypes, key=lambda dtype: (_kind(dtype), item_bytes(dtype)))


def _kind(dtype: str) -> int:
    plain = dtype.removeprefix("u").removeprefix("b")  # uint8, bfloat16
    return next((rank for rank, kind in enumerate(_KINDS) if plain.startswith(kind) or dtype == kind), 0)


# Arithmetic -------------------------------------------------------------------------------------------


def add(growing: Growing, a: Arg, b: Arg) -> Ref:
    """a + b."""
    return apply(growing, "aten.add.Tensor", a, b)


def sub(growing: Growing, a: Arg, b: Arg) -> Ref:
    """a - b."""
    return apply(growing, "aten.sub.Tensor", a, b)


def mul(growing: Growing, a: Arg, b: Arg) -> Ref:
    """a * b."""
    return apply(growing, "aten.mul.Tensor", a, b)


def div(growing: Growing, a: Arg, b: Arg) -> Ref:
    """a / b."""
    return apply(growing, "aten.div.Tensor", a, b)


def neg(growing: Growing, a: Arg) -> Ref:
    """-a."""
    return apply(growing, "aten.neg.default", a)


def power(growing: Growing, a: Arg, exponent: int | float) -> Ref:
    """a ** exponent, for a number."""
    return apply(growing, "aten.pow.Tensor_Scalar", a, exponent)


def unary(growing: Growing, kernel: str, a: Arg) -> Ref:
    """A pointwise kernel of one operand, by its short name: 'exp'."""
    return apply(growing, f"aten.{kernel}.default", a)


def scaled(growing: Growing, a: Ref, factor: Arg) -> Ref:
    """a * factor, or a itself if the factor is one."""
    return a if factor == 1 and not isinstance(factor, Ref) else mul(growing, a, factor)


def cast(growing: Growing, a: Ref, dtype: str) -> Ref:
    """a in another dtype, or a itself if it has that."""
    if growing.dtype(a) == dtype:
        return a
    return growing.call(
        "aten._to_copy.default", [a], growing.like(a, dtype), {"dtype": Symbol("dtype", dtype)}
    )


def full(growing: Growing, shape: Ints, number: float, dtype: str) -> Ref:
    """A new tensor with one number everywhere."""
    options: dict[str, Arg] = {
        "dtype": Symbol("dtype", dtype),
        "layout": Symbol("layout", "strided"),
        "device": Symbol("device", growing.graph.device),
        "pin_memory": False,
    }
    return growing.call("aten.full.default", [shape, number], dense(shape, dtype), options)


# Products ---------------------------------------------------------------------------------------------


def mm(growing: Growing, a: Ref, b: Ref) -> Ref:
    """The product of two matrices.

    Raises:
        ShapeMismatch: they are no matrices, or their inner sizes differ.
    """
    return _product(growing, "aten.mm.default", a, b, rank=2)


def bmm(growing: Growing, a: Ref, b: Ref) -> Ref:
    """The products of two batches of matrices.

    Raises:
        ShapeMismatch: they are no batches of matrices, or their sizes differ.
    """
    return _product(growing, "aten.bmm.default", a, b, rank=3)


def _product(growing: Growing, target: str, a: Ref, b: Ref, rank: int) -> Ref:
    left, right = growing.shape(a), growing.shape(b)
    if len(left) != rank or len(right) != rank or left[:-2] != right[:-2] or left[-1] != right[-2]:
        raise ShapeMismatch(target.split(".")[1], [(growing.name(a), left), (growing.name(b), right)])
    return growing.call(target, [a, b], dense((*left[:-1], right[-1]), growing.dtype(a)))


# Sums -------------------------------------------------------------------------------------------------


def total(growing: Growing, a: Ref) -> Ref:
    """The sum of everything."""
    return growing.call("aten.sum.default", [a], dense((), growing.dtype(a)))


def summed(growing: Growing, a: Ref, dims: Sequence[int], keepdim: bool = True) -> Ref:
    """The sum over some dimensions."""
    shape = reduced(growing.shape(a), dims, keepdim)
    arguments: list[Arg] = [a, tuple(dims), *([True] if keepdim else [])]
    return growing.call("aten.sum.dim_IntList", arguments, dense(shape, growing.dtype(a)))


def reduced(shape: Ints, dims: Sequence[int], keepdim: bool) -> Ints:
    """What is left of a shape when some dimensions are summed over; none named means all."""
    gone = {dim % max(len(shape), 1) for dim in dims} if dims else set(range(len(shape)))
    if keepdim:
        return tuple(1 if dim in gone else size for dim, size in enumerate(shape))
    return tuple(size for dim, size in enumerate(shape) if dim not in gone)


def unbroadcast(growing: Growing, a: Ref, shape: Ints) -> Ref:
    """a summed over what a kernel stretched, so that it has `shape` again."""
    found = growing.shape(a)
    if found == shape:
        return a
    leading = len(found) - len(shape)
    dims = [
        dim for dim, size in enumerate(found) if dim < leading or (shape[dim - leading] == 1 and size != 1)
    ]
    small = summed(growing, a, dims) if dims else a
    return growing.reshaped(small, shape)
