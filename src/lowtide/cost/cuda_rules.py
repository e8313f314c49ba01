"""What CUDA would do, on a machine that has none.

A step for CUDA is traced with fake CPU tensors here. Most ops are the same on both devices; where
PyTorch chooses a kernel by device in a way that changes memory, the CUDA choice is imitated while the
step is traced (`cuda_rules`), and what its kernels take beyond their outputs is known from measurements
on an H200 with torch 2.11, cuDNN 9 (`price`, and benchmarks/ for how well it holds).

Not imitated: kernels that only some cards have. Recurrent layers of cuDNN see to themselves: see
`lowtide.compat.cudnn_rnn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import get_overridable_functions

from lowtide.compat.kernels import cudnn_attention, efficient_attention
from lowtide.compat.patches import patched
from lowtide.cost.cache import BY_RULE
from lowtide.cost.cublas import (
    threads_using_biased_products,
    threads_using_matrix_products,
    with_library,
)
from lowtide.ir.graph import Graph, Op, Tensor, argument_tensors, short_name
from lowtide.ir.simulate import CUDA
from lowtide.ir.validate import item_bytes

CONTEXT_BYTES = 693 << 20  # what driver and libraries take for a process with torch; H200, CUDA 13
CUBLAS_BYTES = 32 << 20  # per thread on Hopper; 8.1 MiB on older cards
CUBLASLT_BYTES = 1 << 20  # per thread that adds a bias to a product; seen with torch 2.11
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def cuda_rules(*, for_real: bool = False) -> Iterator[None]:
    """While the block runs, dropout and attention choose their kernels as on CUDA, and autocast works.

    `for_real` says that the step is computed, by kernels that the CPU has: its attention, which keeps no
    scores either, unless something is dropped out of them; so nothing is.

    Autocast for CUDA is entered as autocast for the CPU tensors that stand for CUDA's. The two differ in
    which ops they run in 32 bits; of those only cross entropy, the one that weighs, is imitated.

    Functions are replaced where models look them up. A torch-function mode would be the other way, but
    PyTorch suspends it inside `backward`, where checkpointing runs the forward again.
    """
    get_overridable_functions()  # Dynamo asks once a process, and must not see what stands in for them
    dropout = partial(_dropout, F.dropout)
    attention = partial(_attention_of_cpu if for_real else _attention, F.scaled_dot_product_attention)
    cross_entropy = partial(_cross_entropy, F.cross_entropy)
    enter = torch.autocast.__init__

    def autocast(  # with the parameters of PyTorch's own, by whose names Dynamo reads a call
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        enter(self, device_type, dtype, enabled, cache_enabled)

    as_on_cuda = partial(patched, why="CUDA's choice of kernels, on fake CPU tensors", since="torch 2.11")
    with (
        as_on_cuda(F, "dropout", dropout),
        as_on_cuda(F, "scaled_dot_product_attention", attention),
        as_on_cuda(F, "cross_entropy", cross_entropy),
        as_on_cuda(torch.autocast, "__init__", autocast),
    ):
        yield


def _dropout(
    plain: Callable[..., torch.Tensor],
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """CUDA fuses it and keeps a mask of one byte an element; the CPU keeps the noise itself."""
    if not training or inplace or p in (0.0, 1.0):
        return plain(input, p, training, inplace)
    kept: torch.Tensor = torch.native_dropout(input, p, training)[0]
    return kept


def _cross_entropy(
    plain: Callable[..., torch.Tensor], input: torch.Tensor, target: torch.Tensor, *rest: Any, **more: Any
) -> torch.Tensor:
    """CUDA's autocast takes logarithms in half precision; the CPU's copies the scores to 32 bits first."""
    simple = not rest and more.keys() <= {"ignore_index", "reduction"} and not target.is_floating_point()
    if not (simple and input.dim() > 1 and input.dtype in _HALF and torch.is_autocast_enabled("cpu")):
        return plain(input, target, *rest, **more)
    with torch.autocast("cpu", enabled=False):
        return F.nll_loss(F.log_softmax(input, 1).float(), target, **more)


def _attention(
    plain: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """cuDNN's kernel for half precision, the memory-efficient one for the rest; neither keeps scores."""
    grouped = query.size(-3) != key.size(-3) if query.dim() == 4 else False
    if query.dim() != 4 or (grouped and query.dtype not in _HALF):
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), float("-inf")
        )
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.size(2))
    training = query.requires_grad or key.requires_grad or value.requires_grad
    result: tuple[torch.Tensor, ...]
    if query.dtype in _HALF:
        result = cudnn_attention(
            query, key, value, attn_mask, training, dropout_p, is_causal, False, scale=scale
        )
    else:
        result = efficient_attention(
            query, key, value, attn_mask, training, dropout_p, is_causal, scale=scale
        )
    return result[0]


def _attention_of_cpu(
    plain: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What keeps no scores on the CPU: its own kernel, which drops nothing out."""
    return plain(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


# Costs ----------------------------------------------------------------------------------------------


def price(graph: Graph) -> Graph:
    """`graph` with the workspaces that CUDA's kernels are known to take, and cuBLAS's own memory.

    Seconds stay what they are: `roofline` estimates them.
    """
    ops = tuple(
        replace(op, workspace_bytes=CUDA.held(_WORKSPACE[name](op, graph)))
        if (name := short_name(op.target)) in _WORKSPACE
        else op
        for op in graph.ops
    )
    library = CUBLAS_BYTES * sum(threads_using_matrix_products(graph))
    library += CUBLASLT_BYTES * sum(threads_using_biased_products(graph))
    return with_library(replace(graph, ops=ops, profiled_on=BY_RULE), library)


def takes_workspace(target: str) -> bool:
    """Whether kernels of an op are known to take more than their outputs."""
    return short_name(target) in _WORKSPACE


def _convolution(op: Op, graph: Graph) -> int:
    """cuDNN works channels-last: it copies input, output and weight in its workspace.

    A 1×1 convolution of stride one is a plain matrix product and needs no copies forward.
    """
    data, weight, *_ = _arguments(op, graph)
    output = graph.tensors[op.outputs[0]] if op.outputs[0] is not None else data
    if _is_pointwise(weight) and data.shape[2:] == output.shape[2:]:
        return 0
    return _copy(data) + _copy(output) + _dense(weight)


def _convolution_backward(op: Op, graph: Graph) -> int:
    gradient, data, weight, *_ = _arguments(op, graph)
    whole = _copy(data) + _copy(gradient) + 2 * _dense(weight)
    return whole // 2 if _is_pointwise(weight) and data.shape[2:] == gradient.shape[2:] else whole


def _attention_backward(op: Op, graph: Graph) -> int:
    """Gradients of the queries are summed in 32 bits; those of shared keys and values once a query head."""
    _, query, key, _, _, sums, *_ = _arguments(op, graph)
    spread = 2 * _dense(query) if query.shape[1] != key.shape[1] else 0
    return 4 * math.prod(query.shape) + spread + _dense(sums)


_WORKSPACE: Mapping[str, Callable[[Op, Graph], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
}


def _arguments(op: Op, graph: Graph) -> list[Tensor]:
    return [graph.tensors[tensor] for tensor in argument_tensors(op)]


def _is_pointwise(weight: Tensor) -> bool:
    return all(extent == 1 for extent in weight.shape[2:])


def _copy(tensor: Tensor) -> int:
    """Bytes of a copy in channels-last order: none if it is in that order already."""
    channels_last = len(tensor.stride) > 2 and tensor.stride[1] == 1 and tensor.shape[1] > 1
    return 0 if channels_last else _dense(tensor)


def _dense(tensor: Tensor) -> int:
    """Bytes of the elements alone: a slice of something larger is copied without the rest."""
    return math.prod(tensor.shape) * item_bytes(tensor.dtype)
