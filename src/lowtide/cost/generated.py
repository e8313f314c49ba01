"""What ops cost where Inductor generates code around them: library kernels are called in another way there.

convolutions   lie channels-last, where libraries take other kernels with other workspaces; images and weights
               that lie otherwise are copied for each
embeddings     add their gradients up in 32 bits, in a tensor of their own
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lowtide.ir.graph import Graph, Op, Tensor, argument_tensors, short_name
from lowtide.ir.strides import channels_last, same
from lowtide.ir.validate import item_bytes

CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_SUMS = frozenset({"embedding_dense_backward", "index_put", "_unsafe_index_put"})
_WIDE_BYTES = 4


def with_generated_costs(graph: Graph, price: Callable[[Graph], Graph]) -> Graph:
    """`graph` with costs: what `price` says of it as Inductor has it run."""
    priced = price(_channels_last(graph))
    ops = (
        replace(
            op,
            seconds=as_run.seconds,
            workspace_bytes=as_run.workspace_bytes + _summed_bytes(graph, op) + copied_bytes(graph, op),
            extrapolated=as_run.extrapolated,
        )
        for op, as_run in zip(graph.ops, priced.ops, strict=True)
    )
    return replace(graph, ops=tuple(ops), profiled_on=priced.profiled_on)


def copied_bytes(graph: Graph, op: Op) -> int:
    """What a convolution is given from outside that is copied to have its channels last."""
    if short_name(op.target) not in CONVOLUTIONS:
        return 0
    given = (graph.tensors[number] for number in argument_tensors(op))
    copied = {tensor.value for tensor in given if _is_resident(graph, tensor) and _would_move(tensor)}
    return sum(map(graph.counted_bytes, copied))


def _is_resident(graph: Graph, tensor: Tensor) -> bool:
    return tensor.value not in graph.creator


def _would_move(tensor: Tensor) -> bool:
    """Whether an image or its like lies otherwise than with its channels last."""
    shape = tensor.shape
    return len(shape) == 4 and not same(shape, tensor.stride, channels_last(shape))


def _channels_last(graph: Graph) -> Graph:
    """`graph` with what its convolutions take and make lying channels-last."""
    turned: dict[int, Tensor] = {}
    for op in graph.ops:
        if short_name(op.target) not in CONVOLUTIONS:
            continue
        for number in (*argument_tensors(op), *(out for out in op.outputs if out is not None)):
            tensor = graph.tensors[number]
            if len(tensor.shape) == 4 and tensor.offset == 0 and _is_whole(graph, tensor):
                turned[number] = replace(tensor, stride=channels_last(tensor.shape))
    return replace(graph, tensors=tuple(turned.get(tensor.id, tensor) for tensor in graph.tensors))


def _is_whole(graph: Graph, tensor: Tensor) -> bool:
    return math.prod(tensor.shape) * item_bytes(tensor.dtype) == graph.values[tensor.value].bytes


def _summed_bytes(graph: Graph, op: Op) -> int:
    """What an op adds up in, where that is wider than what it makes."""
    if short_name(op.target) not in _SUMS or not op.outputs or op.outputs[0] is None:
        return 0
    made = graph.tensors[op.outputs[0]]
    return _WIDE_BYTES * math.prod(made.shape) if item_bytes(made.dtype) < _WIDE_BYTES else 0
