"""Pointwise arithmetic and functions. All of these can be differentiated any number of times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from lowtide.autodiff.rules.rule import Contribution, Rules, Site, given, made, number, register
from lowtide.ir.calls import add, apply, div, mul, neg, power, scaled, sub, unary
from lowtide.ir.graph import Ref

RULES: Rules = {}
_rule = partial(register, RULES)


# Sums: nothing of the forward is needed ----------------------------------------------------------------


@_rule("aten.add.Tensor", "aten.add.Scalar", needs={0: (), 1: ()})
def _add(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        yield 0, site.grad
    if site.wants(1):
        yield 1, scaled(site.growing, site.grad, site.option(2, "alpha", 1))


@_rule("aten.sub.Tensor", "aten.sub.Scalar", needs={0: (), 1: ()})
def _sub(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        yield 0, site.grad
    if site.wants(1):
        yield 1, scaled(site.growing, neg(site.growing, site.grad), site.option(2, "alpha", 1))


@_rule("aten.rsub.Scalar", "aten.rsub.Tensor", needs={0: (), 1: ()})
def _rsub(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        yield 0, scaled(site.growing, neg(site.growing, site.grad), site.option(2, "alpha", 1))
    if site.wants(1):
        yield 1, site.grad


@_rule("aten.neg.default", needs={0: ()})
def _neg(site: Site) -> Iterator[Contribution]:
    yield 0, neg(site.growing, site.grad)


# Products: the other factor ----------------------------------------------------------------------------


@_rule("aten.mul.Tensor", "aten.mul.Scalar", needs={0: [given(1)], 1: [given(0)]})
def _mul(site: Site) -> Iterator[Contribution]:
    for mine, other in ((0, 1), (1, 0)):
        if site.wants(mine):
            yield mine, mul(site.growing, site.grad, site.op.args[other])


@_rule("aten.div.Tensor", "aten.div.Scalar", needs={0: [given(1)], 1: [given(0), given(1)]})
def _div(site: Site) -> Iterator[Contribution]:
    growing, (top, bottom) = site.growing, site.op.args[:2]
    if site.wants(0):
        yield 0, div(growing, site.grad, bottom)
    if site.wants(1):
        quotient = div(growing, div(growing, top, bottom), bottom)
        yield 1, mul(growing, neg(growing, site.grad), quotient)


@_rule("aten.reciprocal.default", needs={0: [made(0)]})
def _reciprocal(site: Site) -> Iterator[Contribution]:
    square = mul(site.growing, site.made(), site.made())
    yield 0, mul(site.growing, neg(site.growing, site.grad), square)


# Powers and roots --------------------------------------------------------------------------------------


@_rule("aten.pow.Tensor_Scalar", needs={0: [given(0)]})
def _pow(site: Site) -> Iterator[Contribution]:
    growing, exponent = site.growing, number(site.op.args[1])
    if exponent != 0:
        slope = mul(growing, power(growing, site.given(0), exponent - 1), exponent)
        yield 0, mul(growing, site.grad, slope)


@_rule("aten.pow.Scalar", needs={1: [made(0)]})
def _pow_ofnumber(site: Site) -> Iterator[Contribution]:
    base = number(site.op.args[0])
    if base < 0:
        site.refuse(f"powers of {base} are mostly not real numbers", "Take powers of a positive number.")
    if base > 0:
        slope = mul(site.growing, site.made(), math.log(base))
        yield 1, mul(site.growing, site.grad, slope)


@_rule("aten.pow.Tensor_Tensor", needs={0: [given(0), given(1)], 1: [given(0), given(1), made(0)]})
def _pow_of_tensors(site: Site) -> Iterator[Contribution]:
    """Both slopes are zero where the formula would make nonsense of a zero."""
    growing, base, exponent = site.growing, site.given(0), site.given(1)
    if site.wants(0):
        lower = apply(growing, site.op.target, base, sub(growing, exponent, 1))
        slope = mul(growing, site.grad, mul(growing, exponent, lower))
        flat = apply(growing, "aten.eq.Scalar", exponent, 0, dtype="bool")
        yield 0, _zero_where(site, flat, slope)
    if site.wants(1):
        zero = apply(growing, "aten.eq.Scalar", base, 0, dtype="bool")
        not_below = apply(growing, "aten.ge.Scalar", exponent, 0, dtype="bool")
        flat = apply(growing, "aten.logical_and.default", zero, not_below, dtype="bool")
        steep = mul(growing, site.made(), unary(growing, "log", base))
        yield 1, mul(growing, site.grad, _zero_where(site, flat, steep))


def _zero_where(site: Site, condition: Ref, number: Ref) -> Ref:
    dtype = site.growing.dtype(number)
    return apply(site.growing, "aten.where.ScalarSelf", condition, 0, number, dtype=dtype)


@_rule("aten.sqrt.default", needs={0: [made(0)]})
def _sqrt(site: Site) -> Iterator[Contribution]:
    yield 0, div(site.growing, site.grad, mul(site.growing, site.made(), 2))


@_rule("aten.rsqrt.default", needs={0: [made(0)]})
def _rsqrt(site: Site) -> Iterator[Contribution]:
    half = mul(site.growing, site.grad, -0.5)
    yield 0, mul(site.growing, half, power(site.growing, site.made(), 3))


# Functions of one argument -----------------------------------------------------------------------------


@_rule("aten.exp.default", needs={0: [made(0)]})
def _exp(site: Site) -> Iterator[Contribution]:
    yield 0, mul(site.growing, site.grad, site.made())


@_rule("aten.log.default", needs={0: [given(0)]})
def _log(site: Site) -> Iterator[Contribution]:
    yield 0, div(site.growing, site.grad, site.given(0))


@_rule("aten.log1p.default", needs={0: [given(0)]})
def _log1p(site: Site) -> Iterator[Contribution]:
    yield 0, div(site.growing, site.grad, add(site.growing, site.given(0), 1))


@_rule("aten.sin.default", needs={0: [given(0)]})
def _sin(site: Site) -> Iterator[Contribution]:
    yield 0, mul(site.growing, site.grad, unary(site.growing, "cos", site.given(0)))


@_rule("aten.cos.default", needs={0: [given(0)]})
def _cos(site: Site) -> Iterator[Contribution]:
    slope = neg(site.growing, unary(site.growing, "sin", site.given(0)))
    yield 0, mul(site.growing, site.grad, slope)


@_rule("aten.abs.default", needs={0: [given(0)]})
def _abs(site: Site) -> Iterator[Contribution]:
    yield 0, mul(site.growing, site.grad, unary(site.growing, "sgn", site.given(0)))


@_rule("aten.sgn.default", "aten.sign.default", needs={0: ()})
def _flat(site: Site) -> Iterator[Contribution]:
    yield from ()


@_rule("aten.erf.default", needs={0: [given(0)]})
def _erf(site: Site) -> Iterator[Contribution]:
    growing = site.growing
    bell = unary(growing, "exp", neg(growing, power(growing, site.given(0), 2)))
    yield 0, mul(growing, mul(growing, bell, 2 / math.sqrt(math.pi)), site.grad)


# Choices -----------------------------------------------------------------------------------------------


@_rule("aten.where.self", needs={1: [given(0)], 2: [given(0)]})
def _where(site: Site) -> Iterator[Contribution]:
    growing, condition, dtype = site.growing, site.given(0), site.growing.dtype(site.grad)
    if site.wants(1):
        yield 1, apply(growing, "aten.where.ScalarOther", condition, site.grad, 0, dtype=dtype)
    if site.wants(2):
        yield 2, apply(growing, "aten.where.ScalarSelf", condition, 0, site.grad, dtype=dtype)


@_rule("aten.where.ScalarOther", needs={1: [given(0)]})
def _where_ornumber(site: Site) -> Iterator[Contribution]:
    dtype = site.growing.dtype(site.grad)
    yield 1, apply(site.growing, site.op.target, site.given(0), site.grad, 0, dtype=dtype)


@_rule("aten.where.ScalarSelf", needs={2: [given(0)]})
def _where_number_or(site: Site) -> Iterator[Contribution]:
    dtype = site.growing.dtype(site.grad)
    yield 2, apply(site.growing, site.op.target, site.given(0), 0, site.grad, dtype=dtype)


@_rule("aten.masked_fill.Scalar", needs={0: [given(1)]})
def _masked_fill(site: Site) -> Iterator[Contribution]:
    dtype = site.growing.dtype(site.grad)
    yield 0, apply(site.growing, site.op.target, site.grad, site.given(1), 0, dtype=dtype)


@_rule("aten.native_dropout.default", needs={0: [made(1)]})
def _dropout(site: Site) -> Iterator[Contribution]:
    share, trains = number(site.op.args[1]), site.option(2, "train")
    factor = 1.0 if not trains else 0.0 if share == 1 else 1.0 / (1.0 - share)
    yield 0, apply(site.growing, "aten.native_dropout_backward.default", site.grad, site.made(1), factor)


@_rule("aten.native_dropout_backward.default", needs={0: [given(1)]})
def _dropout_backward(site: Site) -> Iterator[Contribution]:
    yield 0, apply(site.growing, site.op.target, site.grad, *site.op.args[1:])
