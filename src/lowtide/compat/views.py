"""How a fake tensor is looked at in another shape.

Fake tensors work that out in Python, and choose other strides for dimensions of one element than the kernels
do. To these the strides tell whether a batch of one image has its channels last, and what they make then has
another layout, and needs copies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_impls

from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._subclasses.fake_impls.op_implementations_dict", "how fakes do what they do on their own"),
    Private("torch.ops.aten._unsafe_view.default", "looks at a new tensor in another shape"),
)

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)  # as strides allow

Ints = tuple[int, ...]
Strides = Callable[[Ints, Ints, Ints], Ints | None]  # of a shape, its strides and another shape


@contextmanager
def views_as_they_run(strides_of: Strides) -> Iterator[None]:
    """While the block runs, fakes looked at in another shape have the strides that `strides_of` says."""
    before = fake_impls.op_implementations_dict
    ops = VIEWS

    def look(mode: Any, op: Any, tensor: torch.Tensor, *shape: Any, **options: Any) -> Any:
        found = before[op](mode, op, tensor, *shape, **options)
        whole = all(type(size) is int for size in (*tensor.shape, *tensor.stride(), *found.shape))
        strides = strides_of(tuple(tensor.shape), tensor.stride(), tuple(found.shape)) if whole else None
        if strides is None or strides == found.stride():
            return found
        return found.as_strided(found.shape, strides, found.storage_offset())

    now = {**before, **dict.fromkeys(ops, look)}
    why = "strides are those that kernels choose"
    with patched(fake_impls, "op_implementations_dict", now, why=why, since="torch 2.11"):
        yield
