"""Results that are written where they should be, or computed and moved there: the same bits either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowtide.cost.measure import growth, record_cpu
from lowtide.cost.op_bench import resolve
from lowtide.execute.out_variants import Way, Writer, kernel, leaves_what_it_returns, tensor_leaves, writer

X = torch.linspace(-1.0, 1.0, 24).reshape(4, 6)
IMAGE = torch.linspace(-1.0, 1.0, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
LABELS = torch.tensor([0, 5, 2, 1])
KERNEL = torch.linspace(-0.5, 0.5, 4 * 3 * 3 * 3).reshape(4, 3, 3, 3)

CALLS: dict[str, tuple[Way, Callable[[], tuple[list[Any], dict[str, Any]]]]] = {
    "aten.mm.default": (Way.WRITTEN, lambda: ([X, X.t()], {})),
    "aten.add.Tensor": (Way.WRITTEN, lambda: ([X, X], {"alpha": 2})),
    "aten.relu.default": (Way.WRITTEN, lambda: ([X], {})),
    "aten.clone.default": (Way.WRITTEN, lambda: ([X.t()], {"memory_format": torch.contiguous_format})),
    "aten.embedding.default": (Way.WRITTEN, lambda: ([X.t().contiguous(), LABELS.reshape(2, 2)], {})),
    "aten.sum.dim_IntList": (Way.WRITTEN, lambda: ([X, [0], True], {})),
    "aten.threshold_backward.default": (Way.WRITTEN, lambda: ([X, X, 0], {})),
    "aten._log_softmax.default": (Way.WRITTEN, lambda: ([X, 1, False], {})),
    "aten.nll_loss_forward.default": (Way.WRITTEN, lambda: ([X, LABELS, None, 1, -100], {})),
    "aten.max_pool2d_with_indices.default": (Way.WRITTEN, lambda: ([IMAGE, [2, 2], [2, 2]], {})),
    "aten.native_batch_norm.default": (
        Way.WRITTEN,
        lambda: ([IMAGE, torch.ones(3), torch.zeros(3), None, None, True, 0.1, 1e-5], {}),
    ),
    "aten.zeros_like.default": (Way.WRITTEN, lambda: ([X], {"pin_memory": False})),
    "aten.full.default": (Way.WRITTEN, lambda: ([[4, 6], 2.5], {"dtype": torch.float32})),
    "aten.copy.default": (Way.WRITTEN, lambda: ([X, X.flip(0)], {})),
    "aten.select_scatter.default": (Way.WRITTEN, lambda: ([X, X[0], 0, 2], {})),
    "aten.slice_scatter.default": (Way.WRITTEN, lambda: ([X, X[:, :2], 1], {"end": -2, "step": 2})),
    "aten.diagonal_scatter.default": (Way.WRITTEN, lambda: ([X, X[0, :4], 1], {})),
    "aten.mse_loss.default": (Way.MOVED, lambda: ([X, X.flip(0)], {})),
    "aten.convolution.default": (
        Way.MOVED,
        lambda: ([IMAGE, KERNEL, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1], {}),
    ),
    "aten._fft_r2c.default": (Way.MOVED, lambda: ([X, [0], 0, True], {})),
    "aten._fft_c2c.default": (Way.MOVED, lambda: ([X.to(torch.complex64), [0], 0, True], {})),
    "aten._fft_c2r.default": (Way.MOVED, lambda: ([X.to(torch.complex64), [1], 0, 10], {})),
    "aten.native_layer_norm.default": (Way.MOVED, lambda: ([X, [6], None, None, 1e-5], {})),
}


@pytest.mark.parametrize("target", CALLS)
def test_what_is_written_is_what_the_op_returns(target: str) -> None:
    way, make = CALLS[target]
    args, kwargs = make()
    expected = tensor_leaves(resolve(target)(*args, **kwargs))
    outs = [None if found is None else torch.full_like(found, 77) for found in expected]
    found = writer(target, "cpu", args)
    found.bind(args, kwargs, outs)()
    assert found.way is way
    for out, result in zip(outs, expected, strict=True):
        assert out is not None
        assert result is not None
        assert torch.equal(out, result)


@pytest.mark.parametrize("target", [name for name, (way, _) in CALLS.items() if way is Way.WRITTEN])
def test_a_kernel_that_writes_where_it_is_told_allocates_no_result(target: str) -> None:
    args, kwargs = CALLS[target][1]()
    expected = [result for result in tensor_leaves(resolve(target)(*args, **kwargs)) if result is not None]
    largest = max(result.nbytes for result in expected)
    outs = [torch.empty_like(result) for result in expected]
    thunk = writer(target, "cpu", args).bind(args, kwargs, outs)
    thunk()
    blocks, _ = record_cpu(thunk)
    assert largest >= 4
    assert max(growth(blocks)) < max(largest, 64)


def test_a_result_that_nobody_wants_is_not_written_anywhere() -> None:
    args = [IMAGE, torch.ones(3), torch.zeros(3), None, None, True, 0.1, 1e-5]
    out = torch.empty_like(IMAGE)
    writer("aten.native_batch_norm.default", "cpu", args).bind(args, {}, [out, None, None])()
    assert torch.equal(out, torch.ops.aten.native_batch_norm.default(*args)[0])


@pytest.mark.parametrize("turned", [False, True])
def test_a_variant_that_does_something_else_than_its_op_is_found_out(turned: bool) -> None:
    x = IMAGE.transpose(1, 3).contiguous().transpose(1, 3)[..., 0] if turned else IMAGE
    args = [x, torch.ones(3), torch.zeros(3), None, None, True, 0.1, 1e-5]
    outs = tensor_leaves(torch.ops.aten.native_batch_norm.default(*args))
    found = writer("aten.native_batch_norm.default", "cpu", args)
    assert leaves_what_it_returns(found, "aten.native_batch_norm.default", args, {}, outs) is not turned


def test_a_variant_that_makes_its_place_larger_is_found_out() -> None:
    def larger(args: list[Any], kwargs: dict[str, Any], outs: Any) -> Callable[[], object]:
        return lambda: outs[0].resize_(99).resize_(4, 6).copy_(X.sin())

    outs = [torch.empty(4, 6)]
    exact = writer("aten.sin.default", "cpu", [X])
    assert leaves_what_it_returns(exact, "aten.sin.default", [X], {}, outs)
    assert not leaves_what_it_returns(Writer(Way.WRITTEN, larger), "aten.sin.default", [X], {}, outs)


def test_a_variant_that_refuses_its_place_is_found_out() -> None:
    def refuses(args: list[Any], kwargs: dict[str, Any], outs: Any) -> Callable[[], object]:
        return lambda: outs[0].view(5, 5)

    assert not leaves_what_it_returns(
        Writer(Way.WRITTEN, refuses), "aten.sin.default", [X], {}, [torch.empty(4, 6)]
    )


def test_a_batch_norm_can_be_written_over_its_own_input() -> None:
    x = IMAGE.clone()
    args = [x, torch.ones(3), torch.zeros(3), None, None, True, 0.1, 1e-5]
    expected = torch.ops.aten.native_batch_norm.default(*args)
    outs = [x, torch.empty(3), torch.empty(3)]
    writer("aten.native_batch_norm.default", "cpu", args).bind(args, {}, outs)()
    for out, result in zip(outs, expected, strict=True):
        assert torch.equal(out, result)


def test_a_batch_norms_backward_from_its_output_is_the_usual_one_up_to_rounding() -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    weight, bias = torch.tensor([0.5, -2.0, 1.5]), torch.tensor([1.0, 0.0, -3.0])
    y, mean, deviation = torch.ops.aten.native_batch_norm.default(
        x, weight, bias, None, None, True, 0.1, 1e-5
    )
    expected = torch.ops.aten.native_batch_norm_backward.default(
        gradient, x, weight, None, None, mean, deviation, True, 1e-5, [True, True, True]
    )
    found = kernel("lowtide.batch_norm_backward_from_output.default")(
        gradient, y, weight, bias, mean, deviation, [True, True, True]
    )
    for usual, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, usual, rtol=1e-4, atol=1e-5)
    masked = kernel("lowtide.batch_norm_backward_from_output.default")(
        gradient, y, None, None, mean, deviation, [True, False, False]
    )
    assert masked[1] is masked[2] is None
