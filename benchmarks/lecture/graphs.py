"""The training steps of the lecture's networks as graphs: captured once, kept as files, priced.

captured       the step as CUDA would run it, without running it
by_roofline    seconds for each op where there is no GPU to profile on
features_only  the same step with parameters' gradients weighing nothing
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

import lowtide
from benchmarks.lecture.models import Network, lstm, resnet
from lowtide.cost.flops import flops_of
from lowtide.ir.graph import Graph, Op, Role, argument_tensors
from lowtide.ir.validate import item_bytes

NETWORKS: Final[Mapping[str, Callable[[int], Network]]] = {
    "resnet": resnet,
    "lstm": lstm,
    "small resnet": partial(resnet, batch=16, image=64, classes=10),
    "small lstm": partial(lstm, batch=16, layers=2, width=64, inputs=10, classes=50),
}
ELSEWHERE: Final = "the caller's memory"  # a device that no graph is on: what is there weighs nothing

# About what an H200 does in float32. Only ratios between ops matter here: they say what is cheap to repeat.
FLOPS_PER_SECOND: Final = 50e12
BYTES_PER_SECOND: Final = 4e12
LEAST_SECONDS: Final = 3e-6  # to launch a kernel
ROOFLINE: Final = (
    f"seconds of an op: the most of its FLOPs at {FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s, the bytes of its "
    f"arguments and results at {BYTES_PER_SECOND / 1e12:.0f} TB/s, and {1e6 * LEAST_SECONDS:.0f} µs"
)


def captured(network: str, size: int, cache: Path, device: str = "cuda") -> Graph:
    """The joint graph of a network of that depth or length; from the cache if it is there.

    Raises:
        BadFile: there is a file that cannot be read: it is damaged, or another version wrote it.
    """
    path = cache / f"{network.replace(' ', '-')}-{size}-{device}.json"
    if path.exists():
        return lowtide.load_graph(path)[0]
    started = time.perf_counter()
    with torch.device("meta"):
        made = NETWORKS[network](size)
    graph = lowtide.capture(made.model, made.example, device=device, name=made.name)
    print(f"{made.name}: {len(graph.ops)} ops captured in {time.perf_counter() - started:.0f} s", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    lowtide.save_graph(graph, path)
    return graph


def by_roofline(graph: Graph) -> Graph:
    """`graph` with seconds by `ROOFLINE`."""
    return replace(graph, ops=tuple(replace(op, seconds=_seconds(graph, op)) for op in graph.ops))


def _seconds(graph: Graph, op: Op) -> float:
    looked_at = [*argument_tensors(op), *(output for output in op.outputs if output is not None)]
    moved_bytes = sum(_tensor_bytes(graph, number) for number in looked_at)
    return max(flops_of(graph, op) / FLOPS_PER_SECOND, moved_bytes / BYTES_PER_SECOND, LEAST_SECONDS)


def _tensor_bytes(graph: Graph, number: int) -> int:
    tensor = graph.tensors[number]
    return int(torch.Size(tensor.shape).numel()) * item_bytes(tensor.dtype)


def features_only(graph: Graph) -> Graph:
    """`graph` with what becomes a parameter's gradient put elsewhere, sums on the way to it included.

    What is left are feature maps and their gradients: what the literature's estimates count.
    """
    outside = gradient_sums(graph)
    values = (replace(value, device=ELSEWHERE) if value.id in outside else value for value in graph.values)
    return replace(graph, values=tuple(values))


def gradient_sums(graph: Graph) -> frozenset[int]:
    """The gradients that outlive the step, and what is added up to them alone."""
    found = {value for value in graph.outputs if graph.values[value].role is Role.GRADIENT}
    for op in reversed(graph.ops):
        if op.target == "aten.add.Tensor" and found.issuperset(op.creates):
            (total,) = op.creates
            found |= {
                part
                for part in op.reads
                if graph.readers[part] == (op.id,) and graph.values[part].bytes == graph.values[total].bytes
            }
    return frozenset(found)
