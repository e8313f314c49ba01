"""Torch's tensors in what an op takes and gives back, and the memory behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch.UntypedStorage._cdata", "what two tensors share if they share memory"),
    Private("torch.multiprocessing.reductions.StorageWeakRef", "knows a storage without keeping it alive"),
    Private("torch.Tensor._use_count", "how many references the engine would find to a tensor"),
    Private("torch._C._storage_Use_Count", "how many references the engine would find to a storage"),
    Private("torch._C._functorch.is_functorch_wrapped_tensor", "tells the tensors that torch.func makes"),
    Private("torch._C._functorch.get_unwrapped", "the tensor that one of torch.func's is made of"),
    Private("torch._neg_view", "the same memory, looked at as its negative"),
    Private("torch.Tensor._version", "tells whether a buffer was written to"),
    Private("torch.Tensor._backward_hooks", "hooks that a dry run does not call"),
    Private("torch.Tensor._post_accumulate_grad_hooks", "hooks that a dry run does not call"),
)


def tensors_in(*nests: object) -> Iterator[torch.Tensor]:
    """The tensors in an op's arguments or results, in order.

    These nest lists, tuples and dicts only; a general tree walk would cost more than the op itself.
    """
    for nest in nests:
        if isinstance(nest, torch.Tensor):
            yield nest
        elif isinstance(nest, list | tuple):
            yield from tensors_in(*nest)
        elif isinstance(nest, dict):
            yield from tensors_in(*nest.values())


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], nest: Any) -> Any:
    """An op's arguments or results with every tensor replaced."""
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if isinstance(nest, list | tuple):
        return type(nest)([map_tensors(change, item) for item in nest])
    if isinstance(nest, dict):
        return {key: map_tensors(change, item) for key, item in nest.items()}
    return nest


def leaves(nest: object) -> Iterator[object]:
    """Everything in an op's results that is not itself a list or tuple."""
    if isinstance(nest, list | tuple):
        for item in nest:
            yield from leaves(item)
    else:
        yield nest


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors share if and only if they share memory, while either is alive."""
    return key_of_storage(tensor.untyped_storage())


def key_of_storage(storage: torch.UntypedStorage) -> int:
    """What `storage_key` says of the tensors that look at `storage`."""
    return int(storage._cdata)


def with_signs(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """The memory of `tensor`, looked at as the conjugates or the negatives of what lies there."""
    looked_at = tensor.conj() if conjugate else tensor
    return torch._neg_view(looked_at) if negative else looked_at


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or the one inside of it that has memory, if `torch.func` has made it (as `vmap` does)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def reference_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """References to a tensor and to its storage, as seen from inside a dispatch mode."""
    return tensor._use_count(), torch._C._storage_Use_Count(storage_key(tensor))  # type: ignore[attr-defined]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of its storage, was written to; tensors of inference do not count."""
    return 0 if tensor.is_inference() else tensor._version


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a gradient of `parameter` would call hooks."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)
