"""Convolutions and pooling.

Pooling can be differentiated again; the backward of a convolution has no derivative here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lowtide.autodiff.rules.rule import Contribution, Rules, Site, given, made, numbers, register
from lowtide.ir.builder import Form, Growing, dense
from lowtide.ir.graph import Arg, Ref
from lowtide.ir.strides import channels_last, contiguous, same

RULES: Rules = {}
_rule = partial(register, RULES)
_BOTH = (given(0), given(1))  # the one kernel for all gradients is handed both, whichever are asked for


@_rule("aten.convolution.default", needs={0: _BOTH, 1: _BOTH, 2: _BOTH})
def _convolution(site: Site) -> Iterator[Contribution]:
    growing, image, weight = site.growing, site.given(0), site.given(1)
    bias = site.op.args[2]
    count = growing.shape(bias) if isinstance(bias, Ref) else (0,)
    mask = site.mask(0, 1, 2)
    last = _is_channels_last(growing, image) or _is_channels_last(growing, weight)
    forms = (
        _image_form(growing, image, last),
        _image_form(growing, weight, last),
        dense(count, growing.dtype(image)),
    )
    yield from site.masked(
        "aten.convolution_backward.default",
        [site.grad, image, weight, count, *site.op.args[3:9], mask],
        dict(zip((0, 1, 2), forms, strict=True)),
    )


def _is_channels_last(growing: Growing, image: Ref) -> bool:
    found = growing.tensors[image.tensor]
    if len(found.shape) != 4 or same(found.shape, found.stride, contiguous(found.shape)):
        return False
    return same(found.shape, found.stride, channels_last(found.shape))


def _image_form(growing: Growing, image: Ref, last: bool) -> Form:
    shape = growing.shape(image)
    return Form(shape, channels_last(shape) if last else contiguous(shape), growing.dtype(image))


def _like_image(site: Site, image: Ref) -> Form:
    return _image_form(site.growing, image, _is_channels_last(site.growing, image))


@_rule("aten.max_pool2d_with_indices.default", needs={0: [given(0), made(1)]})
def _max_pool(site: Site) -> Iterator[Contribution]:
    image = site.given(0)
    kernel = numbers(site.op.args[1])
    options: list[Arg] = [
        kernel,
        numbers(site.option(2, "stride")) or kernel,
        numbers(site.option(3, "padding", (0, 0))),
        numbers(site.option(4, "dilation", (1, 1))),
        site.option(5, "ceil_mode", False),
    ]
    yield (
        0,
        site.growing.call(
            "aten.max_pool2d_with_indices_backward.default",
            [site.grad, image, *options, site.made(1)],
            _like_image(site, image),
        ),
    )


@_rule("aten.max_pool2d_with_indices_backward.default", needs={0: [given(7)], 1: ()})
def _max_pool_backward(site: Site) -> Iterator[Contribution]:
    """What a maximum got its gradient from is found again where the maximum was."""
    if not site.wants(0):
        return
    growing, places = site.growing, site.given(7)
    *outer, height, width = growing.shape(places)
    rows, columns = growing.shape(site.grad)[-2:]
    flat = growing.reshaped(site.grad, (*outer, rows * columns))
    where = growing.reshaped(places, (*outer, height * width))
    form = dense(growing.shape(where), growing.dtype(site.grad))
    found = growing.call("aten.gather.default", [flat, len(outer), where], form)
    yield 0, growing.reshaped(found, growing.shape(places))


@_rule("aten.avg_pool2d.default", needs={0: [given(0)]})
def _avg_pool(site: Site) -> Iterator[Contribution]:
    image = site.given(0)
    kernel = numbers(site.op.args[1])
    options: list[Arg] = [
        kernel,
        numbers(site.option(2, "stride")) or kernel,
        numbers(site.option(3, "padding", (0, 0))),
        site.option(4, "ceil_mode", False),
        site.option(5, "count_include_pad", True),
        site.option(6, "divisor_override"),
    ]
    target = "aten.avg_pool2d_backward.default"
    yield 0, site.growing.call(target, [site.grad, image, *options], _like_image(site, image))


@_rule("aten.avg_pool2d_backward.default", needs={0: (), 1: ()})
def _avg_pool_backward(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        args = [site.grad, *site.op.args[2:8]]
        yield 0, site.growing.call("aten.avg_pool2d.default", args, _like_image(site, site.given(0)))


@_rule("aten._adaptive_avg_pool2d.default", needs={0: [given(0)]})
def _adaptive_avg_pool(site: Site) -> Iterator[Contribution]:
    image = site.given(0)
    target = "aten._adaptive_avg_pool2d_backward.default"
    yield 0, site.growing.call(target, [site.grad, image], _like_image(site, image))


@_rule("aten._adaptive_avg_pool2d_backward.default", needs={0: (), 1: ()})
def _adaptive_avg_pool_backward(site: Site) -> Iterator[Contribution]:
    if site.wants(0):
        args: list[Arg] = [site.grad, site.shape(0)[-2:]]
        form = _like_image(site, site.given(0))
        yield 0, site.growing.call("aten._adaptive_avg_pool2d.default", args, form)
