"""Ops that PyTorch takes apart in one way when it traces them and in another when it runs them.

Tracing does so in Python, not always into the kernels that run otherwise: an `upsample_*` becomes sums of
products, a recurrent layer cell after cell, of which `dropout` is forgotten, and a product of rows of which
every second number counts one for each batch. So the results differ from plain training's. With these out of
the way, tracing goes the way that running does.

And one is not taken apart that has to be: the kernel that makes an affine grid calls a matrix product, which
autocast has in half precision, and nobody who sees only the grid knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._C.DispatchKey", "the steps on an op's way to its kernel"),
    Private("torch._ops.OpOverload.py_kernels", "the ways in Python to take an op apart"),
    Private("torch._ops.OpOverload._dispatch_cache", "the way that was chosen last"),
    Private(
        "torch.ops.aten.affine_grid_generator_backward.default", "the gradient of what a grid is made of"
    ),
)

_NAMES = (
    *("gru", "lstm", "rnn_relu", "rnn_tanh"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *(f"{kind}{axes}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *("hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward", "stft", "istft"),
    "matmul",
)
_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)

aten = torch.ops.aten


def _other_ways() -> Iterator[tuple[Any, dict[Any, Any]]]:
    """The ops in question, in each of their overloads, and the ways in Python that they are left or given."""
    for packet in (getattr(aten, name) for name in _NAMES):
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if any(key in op.py_kernels for key in _KEYS):
                yield op, {key: way for key, way in op.py_kernels.items() if key not in _KEYS}
    op = aten.affine_grid_generator.default
    yield op, {**op.py_kernels, torch._C.DispatchKey.Autograd: _affine_grid}


@contextmanager
def as_they_run() -> Iterator[None]:
    """While the block runs, tracing takes ops apart as running them does."""
    with ExitStack() as stack:
        for op, ways in list(_other_ways()):
            why = "tracing would take the op apart in another way than running it"
            stack.enter_context(sent_another_way(op, "py_kernels", ways, why))
        yield


def _affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    found: torch.Tensor = _AffineGrid.apply(theta, size, align_corners)  # type: ignore[no-untyped-call]
    return found


class _AffineGrid(torch.autograd.Function):
    """The ops that the kernel calls, forward, and the op that its gradient is, backward."""

    @staticmethod
    def forward(ctx: Any, theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
        ctx.size, ctx.align_corners = size, align_corners
        batch, _, *places = size
        corners = theta.new_empty((batch, *places, len(places) + 1))
        for axis, length in enumerate(reversed(places)):
            along = _from_minus_one(theta, length, align_corners)
            corners.select(-1, axis).copy_(along.view(-1, *(1,) * axis))
        corners.select(-1, len(places)).fill_(1)
        grid = corners.view(batch, -1, len(places) + 1).bmm(theta.transpose(1, 2))
        return grid.view(batch, *places, len(places))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return aten.affine_grid_generator_backward(gradient, ctx.size, ctx.align_corners), None, None


def _from_minus_one(like: torch.Tensor, length: int, align_corners: bool) -> torch.Tensor:
    """Where the centres of so many places are between -1 and 1, or with corners, that reach to both."""
    if length <= 1:
        return torch.zeros(1, dtype=like.dtype, device=like.device)
    places = torch.linspace(-1, 1, length, dtype=like.dtype, device=like.device)
    return places if align_corners else places * (length - 1) / length


@contextmanager
def sent_another_way(op: Any, table: str, ways: Any, why: str) -> Iterator[None]:
    """While the block runs, `ways` are what one of an op's tables says."""
    with (
        patched(op, table, ways, why=why, since="torch 2.11"),
        patched(op, "_dispatch_cache", {}, why=why, since="torch 2.11"),
    ):
        yield
