"""Ops that PyTorch takes apart in one way when it traces them and in another when it runs them.

Tracing does so in Python, not always into the kernels that run otherwise: an `upsample_*` becomes sums of
products, a recurrent layer cell after cell, of which `dropout` is forgotten. So the results differ from plain
training's. With these out of the way, tracing goes the way that running does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._C.DispatchKey", "the steps on an op's way to its kernel"),
    Private("torch._ops.OpOverload.py_kernels", "the ways in Python to take an op apart"),
    Private("torch._ops.OpOverload._dispatch_cache", "the way that was chosen last"),
)

_NAMES = (
    *("gru", "lstm", "rnn_relu", "rnn_tanh"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *(f"{kind}{axes}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    *("hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward", "stft", "istft"),
)
_KEYS = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


def _taken_apart() -> Iterator[Any]:
    """The ops in question, in each of their overloads."""
    for packet in (getattr(torch.ops.aten, name) for name in _NAMES):
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if any(key in op.py_kernels for key in _KEYS):
                yield op


@contextmanager
def as_they_run() -> Iterator[None]:
    """While the block runs, tracing takes ops apart as running them does."""
    with ExitStack() as stack:
        for op in list(_taken_apart()):
            ways = {key: way for key, way in op.py_kernels.items() if key not in _KEYS}
            why = "tracing would take the op apart in another way than running it"
            stack.enter_context(sent_another_way(op, "py_kernels", ways, why))
        yield


@contextmanager
def sent_another_way(op: Any, table: str, ways: Any, why: str) -> Iterator[None]:
    """While the block runs, `ways` are what one of an op's tables says."""
    with (
        patched(op, table, ways, why=why, since="torch 2.11"),
        patched(op, "_dispatch_cache", {}, why=why, since="torch 2.11"),
    ):
        yield
