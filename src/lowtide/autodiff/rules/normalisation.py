"""Normalisation by batch, layer and group, and softmax.

Softmax and its logarithm can be differentiated any number of times; the backward kernels of the others have
no derivative here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lowtide.autodiff.rules.rule import (
    Contribution,
    Needs,
    Rules,
    Site,
    given,
    made,
    number,
    numbers,
    register,
)
from lowtide.ir.builder import Form, dense
from lowtide.ir.calls import mul, neg, sub, summed, unary
from lowtide.ir.graph import Arg, Op, Ref, Symbol

RULES: Rules = {}
_rule = partial(register, RULES)


def _batch_norm_needs(op: Op) -> Needs:
    """In training the statistics of the batch, which the op makes, and else the running ones too."""
    statistics = (made(1), made(2)) if op.args[5] else (given(3), given(4), made(1), made(2))
    return dict.fromkeys((0, 1, 2), (given(0), given(1), *statistics))


@_rule("aten.native_batch_norm.default", needs=_batch_norm_needs)
def _batch_norm(site: Site) -> Iterator[Contribution]:
    growing, image, training = site.growing, site.given(0), site.op.args[5]
    running = (None, None) if training else site.op.args[3:5]
    channel = dense((growing.shape(image)[1],), growing.dtype(image))
    yield from site.masked(
        "aten.native_batch_norm_backward.default",
        [
            site.grad,
            image,
            site.op.args[1],
            *running,
            site.made(1),
            site.made(2),
            training,
            site.op.args[7],
            site.mask(0, 1, 2),
        ],
        {0: growing.like(image), 1: channel, 2: channel},
    )


@_rule(
    "aten.native_layer_norm.default",
    needs=dict.fromkeys((0, 2, 3), (given(0), given(2), given(3), made(1), made(2))),
)
def _layer_norm(site: Site) -> Iterator[Contribution]:
    growing, x = site.growing, site.given(0)
    normalised = numbers(site.op.args[1])
    weight = dense(normalised, growing.dtype(x))
    yield from site.masked(
        "aten.native_layer_norm_backward.default",
        [
            site.grad,
            x,
            normalised,
            site.made(1),
            site.made(2),
            site.option(2, "weight"),
            site.option(3, "bias"),
            site.mask(0, 2, 3),
        ],
        {0: dense(growing.shape(x), growing.dtype(x)), 2: weight, 3: weight},
    )


@_rule(
    "aten.native_group_norm.default",
    needs=dict.fromkeys((0, 1, 2), (given(0), given(1), made(1), made(2))),
)
def _group_norm(site: Site) -> Iterator[Contribution]:
    growing, x = site.growing, site.given(0)
    weight = dense((int(number(site.op.args[4])),), growing.dtype(x))
    sizes = site.op.args[3:7]
    yield from site.masked(
        "aten.native_group_norm_backward.default",
        [
            growing.packed(site.grad),
            x,
            site.made(1),
            site.made(2),
            site.op.args[1],
            *sizes,
            site.mask(0, 1, 2),
        ],
        {0: dense(growing.shape(x), growing.dtype(x)), 1: weight, 2: weight},
    )


# Softmax ----------------------------------------------------------------------------------------------


@_rule("aten._softmax.default", needs={0: [made(0)]})
def _softmax(site: Site) -> Iterator[Contribution]:
    yield 0, _backward(site, "aten._softmax_backward_data.default")


@_rule("aten._log_softmax.default", needs={0: [made(0)]})
def _log_softmax(site: Site) -> Iterator[Contribution]:
    yield 0, _backward(site, "aten._log_softmax_backward_data.default")


def _backward(site: Site, target: str) -> Ref:
    dtype = site.growing.dtype(site.given(0))
    args: list[Arg] = [site.grad, site.made(), site.op.args[1], Symbol("dtype", dtype)]
    return site.growing.call(target, args, dense(site.shape(0), dtype))


@_rule("aten._softmax_backward_data.default", needs={0: [given(1)], 1: [given(0), given(1)]})
def _softmax_backward(site: Site) -> Iterator[Contribution]:
    growing, (incoming, odds), dim = site.growing, (site.given(0), site.given(1)), _dim(site)
    if site.wants(0):
        yield 0, growing.call(site.op.target, [site.grad, *site.op.args[1:4]], _result_form(site))
    if site.wants(1):
        direct = mul(growing, incoming, site.grad)
        mean = summed(growing, mul(growing, odds, incoming), [dim])
        other = summed(growing, mul(growing, odds, site.grad), [dim])
        rest = sub(growing, direct, mul(growing, mean, site.grad))
        yield 1, sub(growing, rest, mul(growing, incoming, other))


@_rule("aten._log_softmax_backward_data.default", needs={0: [given(1)], 1: [given(0), given(1)]})
def _log_softmax_backward(site: Site) -> Iterator[Contribution]:
    growing, (incoming, logs), dim = site.growing, (site.given(0), site.given(1)), _dim(site)
    odds = unary(growing, "exp", logs)
    if site.wants(0):
        yield 0, sub(growing, site.grad, summed(growing, mul(growing, site.grad, odds), [dim]))
    if site.wants(1):
        whole = neg(growing, summed(growing, incoming, [dim]))
        yield 1, mul(growing, mul(growing, whole, odds), site.grad)


def _dim(site: Site) -> int:
    return int(number(site.op.args[2]))


def _result_form(site: Site) -> Form:
    return dense(site.shape(0), site.growing.dtype(site.made()))
