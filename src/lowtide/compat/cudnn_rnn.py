"""Recurrent layers on their way to cuDNN, for fakes.

On CUDA `nn.LSTM` and its kin call one kernel of cuDNN's. Fakes that play CUDA on a machine without it would
take the CPU's way. And where CUDA is there, PyTorch makes cuDNN's dropout state at the first call that drops
out, once a process and GPU, and keeps it where nobody can reach it: a fake must never get there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._VF", "the functions that recurrent layers call"),
    Private("torch.ops.aten._cudnn_rnn", "what they call on CUDA"),
)

DROPOUT_STATE_BYTES = 2 << 20  # what PyTorch's own sources say; it differs by GPU
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_FOR_CUDNN = (torch.float16, torch.float32, torch.float64)

Layer = Callable[..., tuple[torch.Tensor, ...]]


@contextmanager
def recurrent_layers_by_cudnn() -> Iterator[None]:
    """While the block runs, recurrent layers of fakes go to cuDNN, wherever the fakes are."""
    states: list[torch.Tensor] = []
    with ExitStack() as stack:
        for name, mode in _MODES.items():
            layer = partial(_layer, getattr(torch._VF, name), mode, states)
            why = "recurrent layers of CUDA are cuDNN's, and fakes must not make its dropout state"
            stack.enter_context(patched(torch._VF, name, layer, why=why, since="torch 2.11"))
        yield


def _layer(
    plain: Layer, mode: int, states: list[torch.Tensor], x: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    if isinstance(args[0], torch.Tensor) and isinstance(args[1], torch.Tensor | tuple):
        return plain(x, *args)  # sequences of several lengths, whose lengths are numbers in a tensor
    if not torch.backends.cudnn.enabled or x.dtype not in _FOR_CUDNN:
        return plain(x, *args)
    hidden, weights, has_biases, layers, dropout, train, both_ways, batch_first = args
    hx, cx = hidden if mode == _MODES["lstm"] else (hidden, None)
    if torch.is_autocast_enabled(x.device.type):
        half = torch.get_autocast_dtype(x.device.type)
        x, hx, cx = x.to(half), hx.to(half), None if cx is None else cx.to(half)
        weights = [weight.to(half) for weight in weights]
    width = (hx if cx is None else cx).shape[2]
    made = torch.ops.aten._cudnn_rnn(
        x,
        weights,
        4 if has_biases else 2,
        _in_a_row(weights),
        hx,
        cx,
        mode,
        width,
        hx.shape[2] if hx.shape[2] != width else 0,
        layers,
        batch_first,
        dropout,
        train,
        both_ways,
        [],
        _dropout_state(x, states) if train and dropout else None,
    )
    output, *after = made[: 2 if cx is None else 3]
    return (output, *after)


def _in_a_row(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """What stands for the memory in which all weights lie: `nn.Module.cuda` has put them there."""
    return weights[0].detach()


def _dropout_state(x: torch.Tensor, states: list[torch.Tensor]) -> torch.Tensor:
    """What cuDNN draws from: there from the first call on."""
    if not states:
        states.append(torch.empty(DROPOUT_STATE_BYTES, dtype=torch.uint8, device=x.device))
    return states[0]
