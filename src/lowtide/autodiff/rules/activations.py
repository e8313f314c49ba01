"""Activations: their backward kernels look at results where these say enough.

All of these can be differentiated again; the backward of the backward is written out in plain arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from lowtide.autodiff.rules.rule import Contribution, Rules, Site, given, made, register
from lowtide.ir.calls import add, apply, mul, neg, power, sub, unary
from lowtide.ir.graph import Ref

RULES: Rules = {}
_rule = partial(register, RULES)


@_rule("aten.relu.default", needs={0: [made(0)]})
def _relu(site: Site) -> Iterator[Contribution]:
    yield 0, apply(site.growing, "aten.threshold_backward.default", site.grad, site.made(), 0)


@_rule("aten.threshold_backward.default", needs={0: [given(1)], 1: ()})
def _threshold_backward(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        yield 0, apply(site.growing, site.op.target, site.grad, *site.op.args[1:])


@_rule("aten.tanh.default", needs={0: [made(0)]})
def _tanh(site: Site) -> Iterator[Contribution]:
    yield 0, apply(site.growing, "aten.tanh_backward.default", site.grad, site.made())


@_rule("aten.tanh_backward.default", needs={0: [given(1)], 1: [given(0), given(1)]})
def _tanh_backward(site: Site) -> Iterator[Contribution]:
    growing = site.growing
    if site.wants(0):
        yield 0, apply(growing, site.op.target, site.grad, site.given(1))
    if site.wants(1):
        slope = mul(growing, mul(growing, site.given(1), -2), site.given(0))
        yield 1, mul(growing, site.grad, slope)


@_rule("aten.sigmoid.default", needs={0: [made(0)]})
def _sigmoid(site: Site) -> Iterator[Contribution]:
    yield 0, apply(site.growing, "aten.sigmoid_backward.default", site.grad, site.made())


@_rule("aten.sigmoid_backward.default", needs={0: [given(1)], 1: [given(0), given(1)]})
def _sigmoid_backward(site: Site) -> Iterator[Contribution]:
    growing = site.growing
    if site.wants(0):
        yield 0, apply(growing, site.op.target, site.grad, site.given(1))
    if site.wants(1):
        slope = add(growing, mul(growing, site.given(1), -2), 1)
        yield 1, mul(growing, mul(growing, site.grad, site.given(0)), slope)


@_rule("aten.leaky_relu.default", needs={0: [given(0)]})
def _leaky_relu(site: Site) -> Iterator[Contribution]:
    options = (site.given(0), site.option(1, "negative_slope", 0.01), False)
    yield 0, apply(site.growing, "aten.leaky_relu_backward.default", site.grad, *options)


@_rule("aten.leaky_relu_backward.default", needs={0: [given(1)], 1: ()})
def _leaky_relu_backward(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        yield 0, apply(site.growing, site.op.target, site.grad, *site.op.args[1:])


@_rule("aten.silu.default", needs={0: [given(0)]})
def _silu(site: Site) -> Iterator[Contribution]:
    yield 0, apply(site.growing, "aten.silu_backward.default", site.grad, site.given(0))


@_rule("aten.silu_backward.default", needs={0: [given(1)], 1: [given(0), given(1)]})
def _silu_backward(site: Site) -> Iterator[Contribution]:
    """With s = sigmoid(x), the slope is s + x s (1 - s), and its own slope s (1 - s) (2 + x (1 - 2 s))."""
    growing, x = site.growing, site.given(1)
    if site.wants(0):
        yield 0, apply(growing, site.op.target, site.grad, x)
    if site.wants(1):
        s = unary(growing, "sigmoid", x)
        steep = mul(growing, s, add(growing, neg(growing, s), 1))
        bend = add(growing, mul(growing, x, add(growing, mul(growing, s, -2), 1)), 2)
        yield 1, mul(growing, mul(growing, site.grad, site.given(0)), mul(growing, steep, bend))


@_rule("aten.gelu.default", needs={0: [given(0)]})
def _gelu(site: Site) -> Iterator[Contribution]:
    target, kwargs = "aten.gelu_backward.default", dict(site.op.kwargs)
    yield 0, apply(site.growing, target, site.grad, site.given(0), kwargs=kwargs)


@_rule("aten.gelu_backward.default", needs={0: [given(1)], 1: [given(0), given(1)]})
def _gelu_backward(site: Site) -> Iterator[Contribution]:
    growing, x, kwargs = site.growing, site.given(1), dict(site.op.kwargs)
    if site.wants(0):
        yield 0, apply(growing, site.op.target, site.grad, x, kwargs=kwargs)
    if site.wants(1):
        bend = _bend_of_tanh_gelu(site) if kwargs.get("approximate") == "tanh" else _bend_of_gelu(site)
        yield 1, mul(growing, mul(growing, site.grad, site.given(0)), bend)


def _bend_of_gelu(site: Site) -> Ref:
    """The second derivative of x Φ(x): φ(x) (2 - x²)."""
    growing = site.growing
    square = power(growing, site.given(1), 2)
    bell = mul(growing, unary(growing, "exp", mul(growing, square, -0.5)), 1 / math.sqrt(2 * math.pi))
    return mul(growing, bell, add(growing, neg(growing, square), 2))


def _bend_of_tanh_gelu(site: Site) -> Ref:
    """The second derivative of x (1 + t) / 2 with t = tanh u, u = a (x + b x³).

    It is (1 - t²) (u' + x u'' / 2 - x t u'²), where u' = a (1 + 3 b x²) and u'' = 6 a b x.
    """
    growing, x, a, b = site.growing, site.given(1), math.sqrt(2 / math.pi), 0.044715
    square = power(growing, x, 2)
    t = unary(growing, "tanh", mul(growing, x, add(growing, mul(growing, square, a * b), a)))
    first = add(growing, mul(growing, square, 3 * a * b), a)
    curved = add(growing, first, mul(growing, square, 3 * a * b))
    turned = mul(growing, mul(growing, x, t), power(growing, first, 2))
    flatness = add(growing, neg(growing, power(growing, t, 2)), 1)
    return mul(growing, flatness, sub(growing, curved, turned))
