"""Recurrent layers of cuDNN as fakes: how much a forward keeps for its backward, and what a backward makes.

PyTorch's fake of the forward keeps nothing and lies otherwise in memory, and the backward has none: there the
real kernel runs on what the fakes stand for, and fails. What cuDNN keeps was read off 50 layers of all kinds
on an H200 (torch 2.11, CUDA 13), and is this to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
import torch._meta_registrations
import torch._subclasses.fake_tensor

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
)

aten = torch.ops.aten

_MODE, _HIDDEN, _PROJECTION, _LAYERS, _BATCH_FIRST, _DROPOUT, _TRAIN, _BOTH_WAYS, _LENGTHS = (
    6, 7, 8, 9, 10, 11, 12, 13, 14,
)  # fmt: skip
_RESERVE = 3  # among the results of a forward: what only its backward can read
_LSTM, _GRU = 2, 3  # cuDNN's modes; the others are plain layers
_STATES = {_LSTM: 5, _GRU: 6}  # kept of a step, each as large as its hidden state
_HEADER_BYTES = 256


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
    x, weight, weights_in_a_row = args[0], args[1], args[3]
    with fake_mode:
        made = list(torch._meta_registrations._cudnn_rnn(*args))
        made[0] = _steps_first(made[0], args[_BATCH_FIRST])
        if args[_TRAIN]:
            made[_RESERVE] = x.new_empty(_reserve_bytes(args), dtype=torch.uint8)
        if weights_in_a_row is None:  # the kernel lays them so
            made[_RESERVE + 1] = x.new_empty(_elements(weight))
    return tuple(made)


def _backward(fake_mode: Any, func: Any, *args: Any) -> Any:
    """Gradients of the weights lie in a row, as the weights do."""
    x, weight, hx, cx, wanted = args[0], args[1], args[4], args[5], args[-1]
    batch_first = args[_BATCH_FIRST + 4]  # after the output and three gradients
    with fake_mode:
        in_a_row = x.new_empty(_elements(weight) if wanted[3] else 0)
        pieces = in_a_row.split([each.numel() for each in weight]) if wanted[3] else []
        return (
            _steps_first(torch.empty_like(x), batch_first) if wanted[0] else None,
            torch.empty_like(hx) if wanted[1] else None,
            torch.empty_like(cx) if wanted[2] and cx is not None else None,
            [piece.view(each.shape) for piece, each in zip(pieces, weight, strict=False)],
        )


def _elements(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() for each in tensors)


def _steps_first(made: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """A tensor of this shape as cuDNN lays it out: one step of all sequences after the other."""
    if not batch_first or made.dim() < 3:
        return made.new_empty(made.shape)
    sequences, steps, features = made.shape
    return made.new_empty(steps, sequences, features).transpose(0, 1)


def _reserve_bytes(args: Sequence[Any]) -> int:
    """What a forward keeps for its backward."""
    x, mode, hidden, projection, layers = (
        args[0],
        args[_MODE],
        args[_HIDDEN],
        args[_PROJECTION],
        args[_LAYERS],
    )
    rows = x.shape[0] if args[_LENGTHS] else x.shape[0] * x.shape[1]  # steps of all sequences
    ways = 2 if args[_BOTH_WAYS] else 1
    of_a_layer = _STATES.get(mode, 1) * hidden + (hidden + projection if projection else 0)
    numbers = rows * ways * (of_a_layer * layers + hidden * (layers - 1))
    masks = rows * ways * hidden * (layers - 1) // 8 if args[_DROPOUT] else 0  # a bit for each number
    return int(numbers * x.element_size()) + masks + _HEADER_BYTES
