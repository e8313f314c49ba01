"""Products of matrices. Each can be differentiated any number of times.

The gradient by a factor that lies in memory by columns is made by columns too, as PyTorch does: then a weight
that is looked at transposed gets its gradient in its own layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lowtide.autodiff.rules.rule import Contribution, Rules, Site, given, register
from lowtide.ir.builder import Growing
from lowtide.ir.calls import bmm, mm, scaled
from lowtide.ir.graph import Arg, Ref

RULES: Rules = {}
_rule = partial(register, RULES)


@_rule("aten.mm.default", needs={0: [given(1)], 1: [given(0)]})
def _mm(site: Site) -> Iterator[Contribution]:
    yield from _factors(site, 0, 1, 1)


@_rule("aten.addmm.default", needs={0: (), 1: [given(2)], 2: [given(1)]})
def _addmm(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        yield 0, scaled(site.growing, site.grad, site.option(3, "beta", 1))
    yield from _factors(site, 1, 2, site.option(4, "alpha", 1))


def _factors(site: Site, left: int, right: int, alpha: Arg) -> Iterator[Contribution]:
    growing, grad, a, b = site.growing, site.grad, site.given(left), site.given(right)
    if site.wants(left):
        if _by_columns(growing, a):
            product = growing.transposed(mm(growing, b, growing.transposed(grad)))
        else:
            product = mm(growing, grad, growing.transposed(b))
        yield left, scaled(growing, product, alpha)
    if site.wants(right):
        if _by_columns(growing, b):
            product = growing.transposed(mm(growing, growing.transposed(grad), a))
        else:
            product = mm(growing, growing.transposed(a), grad)
        yield right, scaled(growing, product, alpha)


def _by_columns(growing: Growing, matrix: Ref) -> bool:
    tensor = growing.tensors[matrix.tensor]
    return tensor.stride == (1, tensor.shape[0])


@_rule("aten.bmm.default", needs={0: [given(1)], 1: [given(0)]})
def _bmm(site: Site) -> Iterator[Contribution]:
    yield from _batches(site, 0, 1, 1)


@_rule("aten.baddbmm.default", needs={0: (), 1: [given(2)], 2: [given(1)]})
def _baddbmm(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        yield 0, scaled(site.growing, site.grad, site.option(3, "beta", 1))
    yield from _batches(site, 1, 2, site.option(4, "alpha", 1))


def _batches(site: Site, left: int, right: int, alpha: Arg) -> Iterator[Contribution]:
    growing, grad = site.growing, site.grad
    if site.wants(left):
        yield left, scaled(growing, bmm(growing, grad, growing.transposed(site.given(right))), alpha)
    if site.wants(right):
        yield right, scaled(growing, bmm(growing, growing.transposed(site.given(left)), grad), alpha)
