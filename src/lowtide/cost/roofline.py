"""How long CUDA's kernels take, estimated from what they compute and what they move.

A kernel takes as long as the slower of the two takes at the rate that is usual for its kind, and never less
than it takes to launch one. The rates are those of an H200 with PyTorch's defaults (convolutions in TF32,
matrix products in full 32 bits), fitted to whole measured steps and rounded;
`benchmarks/prediction/roofline.py` fits them, and says how well they hold for steps that were not fitted.

Another card is taken to reach the same part of what its vendor names as an H200 does of its own: `rates_of`.
Nobody has measured how well that holds.

It is an estimate: measured steps were off by up to a quarter. A plan made with it is legal all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from lowtide.cost.flops import flops_of
from lowtide.ir.graph import Graph, Op, Ref, argument_tensors, short_name
from lowtide.ir.validate import item_bytes

_HALF = ("float16", "bfloat16")
# What reads with strides, gathers, scatters or sums up, by a part of its name.
_ROUNDABOUT = ("norm", "pool", "softmax", "sum", "mean", "embedding", "nll", "cat", "copy", "index")


class Pace(StrEnum):
    """Kinds of kernels, by what sets their pace."""

    CONVOLUTION = "convolution"
    MATRIX = "matrix product"
    MATRIX_HALF = "matrix product, half precision"
    ATTENTION = "attention"
    ATTENTION_HALF = "attention, half precision"
    ROUNDABOUT = "reduction, normalisation, copy"
    STRAIGHT = "element by element"


@dataclass(frozen=True)
class Rate:
    """What a kind of kernel reaches: operations a second, and bytes a second."""

    flops: float
    bytes: float


RATES: Mapping[Pace, Rate] = {
    Pace.CONVOLUTION: Rate(150e12, 0.9e12),
    Pace.MATRIX: Rate(50e12, 4.5e12),
    Pace.MATRIX_HALF: Rate(790e12, 4.5e12),
    Pace.ATTENTION: Rate(60e12, 4.5e12),
    Pace.ATTENTION_HALF: Rate(700e12, 4.5e12),
    Pace.ROUNDABOUT: Rate(math.inf, 1.2e12),
    Pace.STRAIGHT: Rate(math.inf, 4.5e12),
}
LAUNCH_SECONDS = 20e-6


@dataclass(frozen=True)
class Nominal:
    """What a vendor names: operations a second in 32 bits, in TF32 and in 16, and bytes a second."""

    full_flops: float
    tensor_flops: float
    half_flops: float
    bandwidth: float

    def flops(self, pace: Pace) -> float:
        """Those of the type that a kind of kernel computes in."""
        if pace is Pace.CONVOLUTION:
            return self.tensor_flops
        return self.half_flops if pace in (Pace.MATRIX_HALF, Pace.ATTENTION_HALF) else self.full_flops


_H200 = Nominal(67e12, 494e12, 989e12, 4800e9)


def rates_of(nominal: Nominal) -> Mapping[Pace, Rate]:
    """What kinds of kernels reach on a card, if they reach the same part of what is named as on an H200."""
    return {
        pace: Rate(
            rate.flops * nominal.flops(pace) / _H200.flops(pace),
            rate.bytes * nominal.bandwidth / _H200.bandwidth,
        )
        for pace, rate in RATES.items()
    }


def with_estimated_seconds(graph: Graph, rates: Mapping[Pace, Rate] = RATES) -> Graph:
    """`graph` with an estimate of how long each op takes. Ops that are alike are looked at once."""
    known: dict[object, float] = {}
    ops: list[Op] = []
    for op in graph.ops:
        kind = _kind(op, graph)
        if kind not in known:
            known[kind] = estimated_seconds(op, graph, rates)
        ops.append(replace(op, seconds=known[kind]))
    return replace(graph, ops=tuple(ops))


def _kind(op: Op, graph: Graph) -> object:
    """What ops have in common that take as long: kernel, what else they are told, and what they look at."""
    numbers = [*argument_tensors(op), *(output for output in op.outputs if output is not None)]
    first: dict[int, int] = {}
    looks: list[object] = []
    for number in numbers:
        tensor = graph.tensors[number]
        looks.append((first.setdefault(number, len(first)), tensor.shape, tensor.dtype))
    told = tuple(arg for arg in (*op.args, *op.kwargs) if not isinstance(arg, Ref))
    return op.target, told, tuple(looks)


def estimated_seconds(op: Op, graph: Graph, rates: Mapping[Pace, Rate] = RATES) -> float:
    """How long `op` takes, by the rates of its kind: an H200's, unless others are given."""
    flops = flops_of(graph, op)
    rate = rates[_pace(op, graph, flops)]
    return max(LAUNCH_SECONDS, flops / rate.flops, moved_bytes(op, graph) / rate.bytes)


def kind_of(op: Op, graph: Graph) -> Pace:
    """What sets the pace of `op`."""
    return _pace(op, graph, flops_of(graph, op))


def _pace(op: Op, graph: Graph, flops: int) -> Pace:
    is_half = any(graph.tensors[tensor].dtype in _HALF for tensor in argument_tensors(op))
    name = short_name(op.target)
    if "convolution" in name:
        return Pace.CONVOLUTION
    if "attention" in name:
        return Pace.ATTENTION_HALF if is_half else Pace.ATTENTION
    if flops:
        return Pace.MATRIX_HALF if is_half else Pace.MATRIX
    return Pace.ROUNDABOUT if any(part in name for part in _ROUNDABOUT) else Pace.STRAIGHT


def moved_bytes(op: Op, graph: Graph) -> int:
    """The bytes of everything that `op` looks at or makes, each once."""
    tensors = {*argument_tensors(op), *(output for output in op.outputs if output is not None)}
    return sum(
        math.prod(tensor.shape) * item_bytes(tensor.dtype)
        for tensor in map(graph.tensors.__getitem__, tensors)
    )
