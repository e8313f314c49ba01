"""Gradients that meet: in place or not, as the autograd engine would have decided for plain tensors.

Where several gradients flow into one tensor the engine adds them, and it adds in place when it holds
the only reference to the first. For tensor subclasses, which fake tensors are, it never does. So the
dry run recognises these additions and repeats the engine's decision.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowtide.compat.autograd import in_backward, number_of, running_node
from lowtide.compat.dispatch import TorchDispatchMode
from lowtide.compat.fake import FakeTensorMode
from lowtide.compat.tensors import reference_counts, storage_key

aten = torch.ops.aten


class Accumulation:
    """Tells the engine's own additions apart, and which of them happen in place."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._sole = _counts_of_a_sole_reference(mode)
        self._maker: dict[int, int] = {}  # storage -> the autograd node whose backward made it

    def made(self, key: int) -> None:
        """The storage `key` was created by the backward of the node that is running now."""
        self._maker[key] = _current_node()

    def in_place(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether this op, dispatched in a backward, is an addition that the engine does in place.

        The engine adds what the running node has just made to what an earlier one left. A formula that
        adds within one node touches only tensors of its own.
        """
        if func is not aten.add.Tensor or kwargs or len(args) != 2:
            return False
        old, new = args
        if not isinstance(new, torch.Tensor) or old.shape != new.shape or old.dtype != new.dtype:
            return False
        running = _current_node()
        if self._maker.get(storage_key(old), running) == running:
            return False
        return _is_dense(old) and reference_counts(old) == self._sole


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills the stretch of memory it spans."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == span


def _current_node() -> int:
    node = running_node()
    return -1 if node is None else number_of(node)


class _CountReferences(TorchDispatchMode):
    """Reads the counts at the one addition of a tiny backward, where the first term has no other owner."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = (0, 0)
        self.watched: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.add.Tensor and in_backward():
            self.counts = reference_counts(args[0])
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.watched.append(weakref.ref(result.untyped_storage()))
        return result


def _counts_of_a_sole_reference(mode: FakeTensorMode) -> tuple[int, int]:
    """The counts include what dispatching itself holds, which differs between releases: so measure it."""
    with mode, torch.enable_grad(), _CountReferences() as reader:
        leaf = torch.empty(2, requires_grad=True)
        middle = leaf.neg()
        (middle.sin() + middle.cos()).sum().backward()
    counts: tuple[int, int] = reader.counts
    return counts
