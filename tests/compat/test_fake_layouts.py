"""Fakes lie in memory as what the CPU's kernels make, and are of its types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.compat.fake_layouts import laid_out_as_kernels_do
from lowtide.compat.kernels import functional_batch_norm
from lowtide.compat.tensors import storage_key, tensors_in

aten = torch.ops.aten

C = 8
LAST = torch.channels_last
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row by row": lambda x: x,
    "channels last": lambda x: x.to(memory_format=LAST),
    "another order": lambda x: x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    "a part": lambda x: torch.cat([x, x], 1).to(memory_format=LAST)[:, :C],
    "one image": lambda x: x[:1].to(memory_format=LAST),
}
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, *_affine(), training=True),
    "batch_norm, evaluated": lambda x, y: F.batch_norm(x, *_affine(), *_affine()),
    "batch_norm's backward": lambda x, y: torch.ops.aten.native_batch_norm_backward(
        x, y, torch.ones(C), None, None, *_affine(), True, 1e-5, [True] * 3
    )[0],
    "group_norm": lambda x, y: F.group_norm(x, 2, *_affine()),
    "group_norm's backward": lambda x, y: torch.ops.aten.native_group_norm_backward(
        x, y, *_groups(x), torch.ones(C), x.shape[0], C, 36, 2, [True] * 3
    )[0],
    "layer_norm's backward": lambda x, y: torch.ops.aten.native_layer_norm_backward(
        x.mT, y.mT, [6], *(torch.ones(*x.shape[:-1], 1),) * 2, torch.ones(6), torch.ones(6), [True] * 3
    )[0],
    "max_unpool": lambda x, y: F.max_unpool2d(
        x[..., :3, :3], torch.arange(9).expand(len(x), C, 9).view(-1, C, 3, 3), [2, 2]
    ),
    "dropout's backward": lambda x, y: torch.ops.aten.native_dropout_backward(x, y > 0, 2.0),
    "elu's backward": lambda x, y: torch.ops.aten.elu_backward(x, 1, 1, 1, False, y),
    "hardsigmoid's backward": torch.ops.aten.hardsigmoid_backward.default,
    "hardswish's backward": torch.ops.aten.hardswish_backward.default,
    "hardtanh's backward": lambda x, y: torch.ops.aten.hardtanh_backward(x, y, -1, 1),
    "log_softmax's backward": lambda x, y: torch.ops.aten._log_softmax_backward_data(x, y, 1, x.dtype),
    "mse_loss's backward": lambda x, y: torch.ops.aten.mse_loss_backward(torch.ones(()), x, y, 1),
    "smooth_l1_loss' backward": lambda x, y: torch.ops.aten.smooth_l1_loss_backward(
        torch.ones(()), x, y, 1, 1.0
    ),
    "huber_loss' backward": lambda x, y: torch.ops.aten.huber_loss_backward(torch.ones(()), x, y, 1, 1.0),
    "softplus' backward": lambda x, y: torch.ops.aten.softplus_backward(x, y, 1, 20),
    "reflection's backward": lambda x, y: torch.ops.aten.reflection_pad2d_backward(
        F.pad(x, [1] * 4), y, [1] * 4
    ),
    "replication's backward": lambda x, y: torch.ops.aten.replication_pad2d_backward(
        F.pad(x, [1] * 4), y, [1] * 4
    ),
    "rrelu": lambda x, y: F.rrelu(x, training=True),
}


MIXED: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "layer_norm": lambda x: torch.native_layer_norm(x, [6], torch.ones(6), torch.zeros(6), 1e-5),
    "group_norm": lambda x: torch.native_group_norm(x, *_affine(), 3, C, 36, 2, 1e-5),
    "group_norm's backward": lambda x: torch.ops.aten.native_group_norm_backward(
        x, x, *_groups(x), torch.ones(C), 3, C, 36, 2, [True] * 3
    ),
    "batch_norm": lambda x: torch.native_batch_norm(x, *_affine(), None, None, True, 0.1, 1e-5),
    "batch_norm with statistics": lambda x: torch.native_batch_norm(
        x, None, None, *_affine(), True, 0.1, 1e-5
    ),
    "batch_norm, evaluated": lambda x: torch.native_batch_norm(x, *_affine(), *_affine(), False, 0.1, 1e-5),
}


def _affine() -> tuple[Tensor, Tensor]:
    return torch.ones(C), torch.ones(C)


def _groups(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones(x.shape[0], 2), torch.ones(x.shape[0], 2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_result_has_the_strides_that_its_kernel_gives_it(op: str, layout: str) -> None:
    def strides() -> list[tuple[int, ...]]:
        plain = torch.randn(3, C, 6, 6)
        other = LAYOUTS[layout](plain)
        pairs = [(other, other), (plain[: len(other)], other), (other, plain[: len(other)])]
        return [OPS[op](x, y).stride() for x, y in pairs]

    with FakeTensorMode(), laid_out_as_kernels_do():
        fakes = strides()
    assert fakes == strides()


@pytest.mark.parametrize("op", MIXED)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_result_is_of_the_type_that_its_kernel_makes(op: str, kind: torch.dtype) -> None:
    """Half precision with weights, or statistics, in full is what norms meet under autocast."""
    with FakeTensorMode(), laid_out_as_kernels_do():
        fakes = [made.dtype for made in MIXED[op](torch.randn(3, C, 6, 6, dtype=kind))]
    assert fakes == [made.dtype for made in MIXED[op](torch.randn(3, C, 6, 6, dtype=kind))]


def _in_memory(made: Any) -> list[tuple[Any, ...]]:
    return [
        (each.stride(), each.storage_offset(), each.untyped_storage().nbytes(), each.dtype)
        for each in tensors_in(made)
    ]


def _half() -> Tensor:
    return torch.randn(3, C, 6, 6).bfloat16()


def _part() -> Tensor:
    """A part of something larger, in an order of its own."""
    return torch.randn(6, 5, C).transpose(0, 1)[1:4]


IN_MEMORY: dict[str, Callable[[], Any]] = {
    "a norm's statistics": lambda: torch.ops.aten.native_batch_norm(
        _half(), *_affine(), *_affine(), True, 0.1, 1e-5
    ),
    "a captured norm's statistics": lambda: functional_batch_norm(
        _half(), None, None, *_affine(), True, 0.1, 1e-5
    ),
    "an evaluated norm's statistics": lambda: torch.ops.aten._native_batch_norm_legit_no_training(
        _half(), *_affine(), *_affine(), 0.1, 1e-5
    ),
    "layer norm's statistics": lambda: torch.ops.aten.native_layer_norm(_half(), [6], *_sixes(), 1e-5),
    "group norm's statistics": lambda: torch.ops.aten.native_group_norm(
        _half(), *_affine(), 3, C, 36, 2, 1e-5
    ),
    "a part written anew": lambda: torch.ops.aten.copy(_part(), torch.ones(C)),
    "a number repeated, written anew": lambda: torch.ops.aten.copy(
        torch.ones(()).expand(3, 4), torch.ones(4)
    ),
    "a slice scattered": lambda: torch.ops.aten.slice_scatter(_part(), torch.ones(1, 6, C), 0, 1, 2),
    "a place scattered": lambda: torch.ops.aten.select_scatter(_part(), torch.ones(6, C), 0, 1),
    "a diagonal scattered": lambda: torch.ops.aten.diagonal_scatter(_part(), torch.ones(C, 3)),
    "a mean square": lambda: F.mse_loss(_part(), torch.ones(3, 6, C)),
    "all squares": lambda: F.mse_loss(_part(), torch.ones(3, 6, C), reduction="none"),
    "a smooth distance": lambda: F.smooth_l1_loss(_part(), torch.ones(3, 6, C)),
    "a soft margin": lambda: F.soft_margin_loss(_part(), torch.ones(3, 6, C)),
    "a cross entropy of two": lambda: F.binary_cross_entropy(torch.ones(3, 4), torch.ones(3, 4)),
    "a number repeated": lambda: torch.ones(()).expand(1, 1),
    "a result of one place": lambda: torch.ones(3, C, 1, 1).to(memory_format=LAST).relu(),
    "one place changed": lambda: torch.ones(3, C, 1, 1).to(memory_format=LAST).relu_(),
    "one place in half the bytes": lambda: torch.ones(3, C, 1, 1).to(memory_format=LAST).bfloat16(),
}


def _sixes() -> tuple[Tensor, Tensor]:
    return torch.ones(6), torch.ones(6)


@pytest.mark.parametrize("what", IN_MEMORY)
def test_a_result_has_the_memory_that_its_kernel_leaves_behind_it(what: str) -> None:
    with FakeTensorMode(), laid_out_as_kernels_do():
        fakes = _in_memory(IN_MEMORY[what]())
    assert fakes == _in_memory(IN_MEMORY[what]())


def test_a_norm_over_transposed_places_trains_by_a_plan_to_the_bit() -> None:
    """Its result lies row by row, and is copied where a linear layer looks at it in two dimensions."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(C, C), nn.BatchNorm1d(C), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)).square().mean()
            return out

    torch.manual_seed(0)
    model, x = Turned(), torch.randn(3, 10, C)
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    lowtide.optimize(model, x, budget="min", effort="quick")
    model(x).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


def test_the_two_biases_of_a_recurrent_layer_get_gradients_of_their_own() -> None:
    def storages() -> list[int]:
        x, hx, cx = torch.ones(4, 6, C), torch.ones(6, C), torch.ones(6, C)
        weights = [torch.ones(4 * C, C), torch.ones(4 * C, C), torch.ones(4 * C), torch.ones(4 * C)]
        how: tuple[Any, ...] = (2, C, 1, True, True, False, [], False)
        made = aten.mkldnn_rnn_layer(x, *weights, hx, cx, False, [], 2, C, 1, True, False, False, True)
        output, hy, cy, kept = made
        gradients = aten.mkldnn_rnn_layer_backward(
            x, *weights, hx, cx, output, hy, cy, output, None, None, False, *how, kept
        )
        return [
            each.untyped_storage().nbytes()
            for each in {storage_key(each): each for each in gradients}.values()
        ]

    with laid_out_as_kernels_do(), FakeTensorMode():
        fakes = storages()
    assert fakes == storages()
