"""Fakes lie in memory as what the CPU's kernels make, and are of its types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.compat.fake_layouts import laid_out_as_kernels_do

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
    "max_unpool": lambda x, y: F.max_unpool2d(
        x[..., :3, :3], torch.arange(9).expand(len(x), C, 9).view(-1, C, 3, 3), [2, 2]
    ),
    "hardswish's backward": torch.ops.aten.hardswish_backward.default,
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
