"""Recurrent layers of cuDNN as fakes: how much a forward keeps for its backward, and what a backward makes.

PyTorch's fake of the forward keeps nothing, and the backward has none: the real kernel runs on what the
fakes stand for, and fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import is_
from typing import Any

import torch
import torch._meta_registrations
import torch._subclasses.fake_tensor

from lowtide.compat.dispatch import without_modes
from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private(
        "torch._subclasses.fake_tensor.op_implementations_checks",
        "which ops have a fake that is no kernel for meta tensors, and what that is",
    ),
    Private(
        "torch._meta_registrations._cudnn_rnn",
        "the fake of a recurrent layer of cuDNN, which keeps no bytes for the backward",
    ),
    Private("torch.ops.aten._cudnn_rnn.default", "a recurrent layer of cuDNN"),
    Private("torch.ops.aten._cudnn_rnn_backward.default", "its backward"),
    Private("torch._cudnn_init_dropout_state", "where the random numbers of its dropout stand"),
)

aten = torch.ops.aten

_WEIGHTS_IN_A_ROW, _TRAIN = 3, 12  # among the arguments of a forward
_RESERVE = 3  # among its results: what only its backward can read
_GATES = {2: 4, 3: 3}  # by cuDNN's mode: an LSTM, a GRU; a plain layer has one
_BESIDE_GATES = 2  # what else is kept of a step, each as large as its hidden state


@contextmanager
def recurrent_layers_of_cudnn() -> Iterator[None]:
    """While the block runs, fakes of cuDNN's recurrent layers make what its kernels make."""
    ours = {aten._cudnn_rnn.default: _forward, aten._cudnn_rnn_backward.default: _backward}
    others: Sequence[Any] = vars(torch._subclasses.fake_tensor)["op_implementations_checks"]
    with patched(
        torch._subclasses.fake_tensor,
        "op_implementations_checks",
        [*((partial(is_, op), fake) for op, fake in ours.items()), *others],
        why="a forward of cuDNN's keeps bytes that its fake does not, and its backward has no fake",
        since="torch 2.11",
    ):
        yield


def _forward(fake_mode: Any, func: Any, *args: Any) -> Any:
    x, weight, weight_buf, train = args[0], args[1], args[3], args[_TRAIN]
    with fake_mode:
        made = list(torch._meta_registrations._cudnn_rnn(*args))
        if train:
            made[_RESERVE] = x.new_empty(_reserve_bytes(args), dtype=torch.uint8)
        if weight_buf is None:  # the kernel lays the weights in a row
            made[_RESERVE + 1] = x.new_empty(_elements(weight))
    return tuple(made)


def _backward(fake_mode: Any, func: Any, *args: Any) -> Any:
    """Gradients of the weights lie in a row, as the weights do."""
    x, weight, hx, cx, wanted = args[0], args[1], args[4], args[5], args[-1]
    with fake_mode:
        in_a_row = x.new_empty(_elements(weight) if wanted[3] else 0)
        pieces = in_a_row.split([each.numel() for each in weight]) if wanted[3] else []
        return (
            torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None,
            torch.empty_like(hx) if wanted[1] else None,
            torch.empty_like(cx) if wanted[2] and cx is not None else None,
            [piece.view(each.shape) for piece, each in zip(pieces, weight, strict=False)],
        )


def _elements(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() for each in tensors)


# What is kept -------------------------------------------------------------------------------------------


def _reserve_bytes(args: Sequence[Any]) -> int:
    """What the forward keeps: asked of the device if it is there."""
    x = args[0]
    if torch.cuda.is_available() and x.device.type == "cuda":
        return _asked(tuple(_Stand.of(arg) for arg in args))
    mode, hidden_size, layers, both_ways = args[6], args[7], args[9], args[13]
    steps = x.shape[0] if args[14] else x.shape[0] * x.shape[1]  # of all sequences of the batch
    numbers = steps * hidden_size * (_GATES.get(mode, 1) + _BESIDE_GATES) * layers * (2 if both_ways else 1)
    return int(numbers * x.element_size())


@dataclass(frozen=True)
class _Stand:
    """Stands for an argument: of a tensor, its shape, its type and where it is."""

    argument: Any
    kind: tuple[torch.dtype, torch.device] | None = None

    @classmethod
    def of(cls, argument: Any) -> _Stand:
        if isinstance(argument, torch.Tensor):
            return cls(tuple(argument.shape), (argument.dtype, argument.device))
        if isinstance(argument, (list, tuple)):
            return cls(tuple(cls.of(each) for each in argument))
        return cls(argument)

    def real(self) -> Any:
        """An argument that a kernel takes in its place."""
        if self.kind is not None:
            dtype, device = self.kind
            return torch.zeros(self.argument, dtype=dtype, device=device)
        if isinstance(self.argument, tuple):
            return [each.real() for each in self.argument]
        return self.argument


@lru_cache(maxsize=256)
def _asked(args: tuple[_Stand, ...]) -> int:
    """What the kernel keeps when it runs on zeros. Weights, which it would find in a row, are packed anew."""
    with without_modes(), torch.no_grad():
        given = [arg.real() for arg in args]
        given[_WEIGHTS_IN_A_ROW] = None
        if args[-1].kind is not None:  # where random numbers of the dropout stand
            dtype, device = args[-1].kind
            given[-1] = torch._cudnn_init_dropout_state(
                args[11].argument, True, 0, dtype=dtype, device=device
            )
        reserve: torch.Tensor = aten._cudnn_rnn.default(*given)[_RESERVE]
        return reserve.numel()
