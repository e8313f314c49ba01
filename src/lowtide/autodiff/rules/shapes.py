"""Sums, means, copies, and what puts tensors together or picks from them; all can be differentiated again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from lowtide.autodiff.rules.rule import Contribution, Rules, Site, given, number, numbers, register
from lowtide.ir.builder import dense
from lowtide.ir.calls import apply, cast, full
from lowtide.ir.graph import Arg, Ref

RULES: Rules = {}
_rule = partial(register, RULES)


@_rule("aten.sum.default", needs={0: ()})
def _sum(site: Site) -> Iterator[Contribution]:
    yield 0, site.growing.expanded(site.grad, site.shape(0))


@_rule("aten.mean.default", needs={0: ()})
def _mean(site: Site) -> Iterator[Contribution]:
    spread = site.growing.expanded(site.grad, site.shape(0))
    yield 0, apply(site.growing, "aten.div.Scalar", spread, math.prod(site.shape(0)))


@_rule("aten.sum.dim_IntList", needs={0: ()})
def _sum_of_dims(site: Site) -> Iterator[Contribution]:
    yield 0, _spread(site)


@_rule("aten.mean.dim", needs={0: ()})
def _mean_of_dims(site: Site) -> Iterator[Contribution]:
    shape = site.shape(0)
    count = math.prod(shape[dim] for dim in numbers(site.option(1, "dim")) or range(len(shape)))
    yield 0, apply(site.growing, "aten.div.Scalar", _spread(site), count)


def _spread(site: Site) -> Ref:
    """The gradient of a sum, for everything that was summed up."""
    shape = site.shape(0)
    dims = numbers(site.option(1, "dim")) or tuple(range(len(shape)))
    grad = site.grad
    if not site.option(2, "keepdim", False):
        grad = site.growing.unsqueezed(grad, [dim % len(shape) for dim in dims] if shape else [])
    return site.growing.expanded(grad, shape)


@_rule("aten.clone.default", "aten.alias.default", needs={0: ()})
def _clone(site: Site) -> Iterator[Contribution]:
    yield 0, site.grad


@_rule("aten._to_copy.default", needs={0: ()})
def _to_copy(site: Site) -> Iterator[Contribution]:
    yield 0, cast(site.growing, site.grad, site.growing.dtype(site.given(0)))


@_rule("aten.cat.default", needs={0: ()})
def _cat(site: Site) -> Iterator[Contribution]:
    parts = site.op.args[0]
    assert isinstance(parts, tuple)
    dim = int(number(site.option(1, "dim", 0)))
    start = 0
    for item, part in enumerate(parts):
        assert isinstance(part, Ref)
        shape = site.growing.shape(part)
        if shape == (0,):  # such a part joins in whatever the others look like
            continue
        stop = start + shape[dim]
        if site.wants(0, item):
            yield (0, item), site.growing.sliced(site.grad, dim, start, stop)
        start = stop


@_rule("aten.stack.default", needs={0: ()})
def _stack(site: Site) -> Iterator[Contribution]:
    parts = site.op.args[0]
    assert isinstance(parts, tuple)
    dim = int(number(site.option(1, "dim", 0)))
    for item in range(len(parts)):
        if site.wants(0, item):
            yield (0, item), site.growing.selected(site.grad, dim, item)


@_rule("aten.gather.default", needs={0: [given(2)]})
def _gather(site: Site) -> Iterator[Contribution]:
    growing, shape, dtype = site.growing, site.shape(0), site.growing.dtype(site.grad)
    zeros = full(growing, shape, 0, dtype)
    args: list[Arg] = [zeros, site.op.args[1], site.given(2), site.grad]
    yield 0, growing.call("aten.scatter_add.default", args, dense(shape, dtype))


@_rule("aten.scatter_add.default", needs={0: (), 3: [given(2)]})
def _scatter_add(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        yield 0, site.grad
    if site.wants(3):
        form = dense(site.shape(2), site.growing.dtype(site.grad))
        yield 3, site.growing.call("aten.gather.default", [site.grad, *site.op.args[1:3]], form)


# What adjoints of parts are put into place with ------------------------------------------------------------


@_rule("aten.slice_backward.default", needs={0: ()})
def _slice_backward(site: Site) -> Iterator[Contribution]:
    dim, start, stop, step = (int(number(arg)) for arg in site.op.args[2:6])
    piece = site.growing.sliced(site.grad, dim, start, min(stop, site.growing.shape(site.grad)[dim]))
    yield 0, site.growing.stepped(piece, dim, step)


@_rule("aten.select_backward.default", needs={0: ()})
def _select_backward(site: Site) -> Iterator[Contribution]:
    dim, index = (int(number(arg)) for arg in site.op.args[2:4])
    yield 0, site.growing.selected(site.grad, dim, index)


@_rule("aten.as_strided_scatter.default", needs={1: ()})
def _as_strided_scatter(site: Site) -> Iterator[Contribution]:
    """What is scattered into is zeros, wherever it is made here, and asks for no gradient."""
    growing = site.growing
    whole = growing.tensors[growing.packed(site.grad).tensor]
    shape, stride, offset = numbers(site.op.args[2]), numbers(site.op.args[3]), number(site.op.args[4])
    yield 1, growing.look(whole.value, shape, stride, whole.offset + int(offset), whole.dtype)
