"""Losses. Each can be differentiated any number of times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from lowtide.autodiff.rules.rule import Contribution, Rules, Site, given, made, register
from lowtide.ir.builder import dense
from lowtide.ir.calls import mul, neg
from lowtide.ir.graph import Arg, Ref

RULES: Rules = {}
_rule = partial(register, RULES)
_MEAN = 1  # how kernels are told to take the mean; 0 leaves a loss per item, 2 sums


@_rule(
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
    needs={0: [given(0), given(1), given(2), made(1)]},
    constant=(1,),  # the weight of all labels together
)
def _nll_loss(site: Site) -> Iterator[Contribution]:
    target = site.op.target.replace("_forward", "_backward")
    logs = site.given(0)
    form = dense(site.shape(0), site.growing.dtype(logs))
    yield 0, site.growing.call(target, [site.grad, logs, *site.op.args[1:5], site.made(1)], form)


@_rule(
    "aten.nll_loss_backward.default",
    "aten.nll_loss2d_backward.default",
    needs={0: [given(2), given(3)], 1: ()},
)
def _nll_loss_backward(site: Site) -> Iterator[Contribution]:
    """The loss is linear in the logarithms, so its backward goes back by the loss itself."""
    if not site.wants(0):
        return
    target = site.op.target.replace("_backward", "_forward")
    dtype = site.growing.dtype(site.grad)
    forms = [dense(site.shape(0), dtype), dense((), dtype)]
    loss = site.growing.calls(target, [site.grad, *site.op.args[2:6]], forms)[0]
    assert loss is not None
    yield 0, loss


@_rule("aten.mse_loss.default", needs=dict.fromkeys((0, 1), (given(0), given(1))))
def _mse_loss(site: Site) -> Iterator[Contribution]:
    for mine, other in ((0, 1), (1, 0)):
        if site.wants(mine):
            pair = (site.given(mine), site.given(other))
            yield mine, _mse_backward(site, pair, site.option(2, "reduction", _MEAN))


def _mse_backward(site: Site, pair: tuple[Ref, Ref], reduction: Arg) -> Ref:
    form = dense(site.growing.shape(pair[0]), site.growing.dtype(pair[0]))
    return site.growing.call("aten.mse_loss_backward.default", [site.grad, *pair, reduction], form)


@_rule("aten.mse_loss_backward.default", needs={0: [given(1), given(2)], 1: [given(0)], 2: [given(0)]})
def _mse_loss_backward(site: Site) -> Iterator[Contribution]:
    growing, reduction = site.growing, site.op.args[3]
    if site.wants(0):
        yield 0, _mse_backward(site, (site.given(1), site.given(2)), reduction)
    if site.wants(1) or site.wants(2):
        count = math.prod(site.shape(1)) if reduction == _MEAN else 1
        twice = mul(growing, mul(growing, site.grad, site.given(0)), 2.0 / count)
        if site.wants(1):
            yield 1, twice
        if site.wants(2):
            yield 2, neg(growing, twice)
