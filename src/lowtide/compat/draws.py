"""Tensors that are filled with random bits in place: masks of dropout.

They are filled in the order in which they lie in memory. Tracing makes a new tensor of each, which is filled
row by row: another mask, where channels come last. Here the new one is filled, and lies, as the old one does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from lowtide.compat.composites import sent_another_way
from lowtide.compat.private import Private

PRIVATE = (
    Private(
        "torch._subclasses.functional_tensor.FunctionalTensorMode",
        "makes functions of ops in place while a graph is traced",
    ),
    Private(
        "torch._subclasses.functional_tensor.FunctionalTensor.from_functional", "the fake that is traced"
    ),
    Private("torch._subclasses.functional_tensor.FunctionalTensor.replace_", "puts another in its place"),
    Private("torch._subclasses.functional_tensor.FunctionalTensor.commit_update", "says that it is another"),
    Private("torch._subclasses.functional_tensor.FunctionalTensor.sync", "tells its views"),
    Private("torch._ops.OpOverload.python_key_table", "what a mode does with an op"),
)


@contextmanager
def filled_as_they_lie() -> Iterator[None]:
    """While the block runs, tracing fills tensors with random bits in the order in which they lie."""
    why = "tracing would fill a tensor in another order than running it"
    with ExitStack() as stack:
        for op in (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli_.Tensor):
            table = {FunctionalTensorMode: _filled}
            stack.enter_context(sent_another_way(op, "python_key_table", table, why))
        yield


def _filled(_: FunctionalTensorMode, tensor: Any, p: Any = 0.5, **kwargs: Any) -> Any:
    before: torch.Tensor = FunctionalTensor.from_functional(tensor)
    order = sorted(range(before.dim()), key=before.stride, reverse=True)
    back = [order.index(axis) for axis in range(before.dim())]
    if isinstance(p, FunctionalTensor):
        p = FunctionalTensor.from_functional(p).expand(before.shape).permute(order)
    drawn = torch.ops.aten.bernoulli(before.permute(order), p, **kwargs)
    tensor.replace_(drawn.permute(back))
    tensor.commit_update()
    tensor.sync()
    return tensor
