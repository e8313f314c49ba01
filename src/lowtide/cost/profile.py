"""Costs for a graph: every distinct op is run once on the real device, or looked up.

An op that is too large for the caps is run at two smaller sizes and extrapolated, and marked so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lowtide.compat.dispatch import without_modes
from lowtide.cost.cache import Cost, CostCache, signature
from lowtide.cost.cublas import library_bytes, with_library
from lowtide.cost.measure import present_device
from lowtide.cost.op_bench import Failure, OpCall, measure_calls
from lowtide.errors import BadFile
from lowtide.ir.graph import Graph, Op, Role, Tensor, argument_tensors, short_name
from lowtide.ir.validate import extent_bytes

Progress: TypeAlias = Callable[[int, int], None]  # ops done, ops in all

_CHUNK = 64  # calls measured under one recording on the CPU
_SMALL_BYTES = 32 << 20  # a call up to this is quick enough to be run on the CPU without trying it smaller
_FALLBACK_MEMORY_BYTES = 2 << 30
_OF_THE_MODEL = (Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER_STATE)
_FREE = "aten.lift_fresh.default"  # a constant in the user's code: its bytes are there, no kernel runs


@dataclass(frozen=True)
class Caps:
    """What a profile may take: bytes for one op's tensors, and seconds for one run of one op."""

    op_bytes: int
    op_seconds: float = 1.0  # a step takes as long, and workspaces of oneDNN do not grow along a line


def default_cache_path() -> Path:
    """Where costs are kept unless told otherwise.

    Raises:
        BadFile: the user has no home.
    """
    place = Path(".cache", "lowtide", "costs.sqlite")
    try:
        return Path.home() / place
    except RuntimeError as error:
        raise BadFile("~" / place, "there is no home directory", doing="keep costs in") from error


def profile(
    graph: Graph,
    device: str | torch.device | None = None,
    cache: Path | None = None,
    caps: Caps | None = None,
    progress: Progress | None = None,
) -> Graph:
    """`graph` with workspace bytes and seconds for every op: see `lowtide.profile`."""
    where = present_device(graph.device if device is None else device, "profile")
    notes: list[str] = []
    store: CostCache | None = None
    try:
        store = CostCache(cache or default_cache_path(), environment(where))
    except BadFile as error:
        if cache is not None:
            raise
        notes.append(_not_kept(error))  # a home that cannot be written to is no reason to refuse
    with without_modes(), torch.random.fork_rng():
        costs = _costs_of(graph, where, store, caps or _default_caps(where), progress, notes)
        library = library_bytes(graph, where)
    priced = with_costs(graph, costs, profiled_on=device_name(where), library=library)
    return replace(priced, notes=tuple(dict.fromkeys((*priced.notes, *notes))))


def with_costs(graph: Graph, costs: Mapping[str, Cost], *, profiled_on: str, library: int = 0) -> Graph:
    """`graph` with the costs that are known for its ops; the others keep theirs.

    No value becomes smaller than what a tensor reaches in it: in an arena it would lie on others.
    """
    values, reached = list(graph.values), _reached_bytes(graph)
    ops: list[Op] = []
    for op in graph.ops:
        cost = costs.get(signature(op, graph))
        if cost is None:
            ops.append(op)
            continue
        ops.append(
            replace(
                op,
                workspace_bytes=cost.workspace_bytes,
                seconds=cost.seconds,
                extrapolated=cost.extrapolated,
            )
        )
        if cost.output_bytes is not None and len(cost.output_bytes) == len(op.creates):
            for value, size in zip(op.creates, cost.output_bytes, strict=True):
                least = values[value].bytes if _looks_at_parts(op, graph) else reached.get(value, 0)
                values[value] = replace(values[value], bytes=max(size, least))
    priced = replace(graph, ops=tuple(ops), values=tuple(values), profiled_on=profiled_on)
    return with_library(priced, library)


def _reached_bytes(graph: Graph) -> dict[int, int]:
    """How far into each value its tensors reach."""
    found: dict[int, int] = {}
    for tensor in graph.tensors:
        found[tensor.value] = max(found.get(tensor.value, 0), extent_bytes(tensor))
    return found


def _looks_at_parts(op: Op, graph: Graph) -> bool:
    """Whether more lies around an argument than it looks at: a step may copy that too, a profile has none."""
    tensors = [graph.tensors[number] for number in argument_tensors(op)]
    reaches = ((extent_bytes(replace(each, offset=0)), graph.values[each.value].bytes) for each in tensors)
    return any(reach < whole for reach, whole in reaches)


def environment(device: torch.device) -> str:
    """Everything besides an op's signature that decides which kernel runs and what it takes."""
    backends: Any = torch.backends  # torch adds parts of it at run time
    facts: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    # Asked backend by backend: torch.get_float32_matmul_precision and allow_tf32 raise an error where
    # someone has set precisions the new way.
    if device.type == "cuda":
        facts |= {
            "cuda": torch.version.cuda,
            "cudnn": backends.cudnn.version(),
            "cudnn flags": [backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic],
            "precision": [
                backend.fp32_precision
                for backend in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
            ],
        }
    else:
        facts |= {
            "threads": torch.get_num_threads(),
            "capability": backends.cpu.get_cpu_capability(),
            "mkldnn": [backends.mkldnn.enabled, backends.mkldnn.deterministic],
            "precision": [
                backend.fp32_precision
                for backend in (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
            ],
        }
    return json.dumps(facts, sort_keys=True)


def device_name(device: torch.device) -> str:
    """'NVIDIA H200' or 'cpu'."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _default_caps(device: torch.device) -> Caps:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Caps(op_bytes=int(free * 0.45), op_seconds=10.0)  # workspaces may need as much again
    return Caps(op_bytes=_FALLBACK_MEMORY_BYTES)


def _costs_of(
    graph: Graph,
    device: torch.device,
    store: CostCache | None,
    caps: Caps,
    progress: Progress | None,
    notes: list[str],
) -> dict[str, Cost]:
    """The costs of all ops that have any, looked up or measured; `notes` get what could not be done."""
    wanted: dict[str, Op] = {}
    for op in graph.ops:
        if (op.mutates or any(graph.values[value].bytes for value in op.creates)) and op.target != _FREE:
            wanted.setdefault(signature(op, graph), op)
    calls = {key: call_of(op, graph) for key, op in wanted.items()}
    costs = {} if store is None else store.get(calls)
    costs = {key: cost for key, cost in costs.items() if _still_holds(cost, calls[key], caps)}
    done = len(costs)
    for keys in _chunks([key for key in calls if key not in costs], _CHUNK):
        fresh: dict[str, Cost] = {}
        for key, cost in zip(keys, _measure_within([calls[key] for key in keys], device, caps), strict=True):
            if isinstance(cost, Failure):
                notes.append(f"could not be profiled, counted without workspace: {cost}")
            else:
                fresh[key] = cost
            done += 1
            if progress is not None:
                progress(done, len(wanted))
        costs.update(fresh)
        try:
            if store is not None:
                store.put(fresh)
        except BadFile as error:
            notes.append(_not_kept(error))  # the measurements themselves are good
    return costs


def _not_kept(error: BadFile) -> str:
    return f"costs are not kept for the next time: {error}"


def call_of(op: Op, graph: Graph) -> OpCall:
    """The op as a call that can be made without its graph."""
    arguments = _arguments(op, graph)
    made = [graph.tensors[output] for output in op.outputs if output is not None]
    forward = _forward_of(op, graph)
    return OpCall(
        op.target,
        op.args,
        op.kwargs,
        {tensor.id: tensor for tensor in arguments},
        tuple(None if output is None else graph.tensors[output] for output in op.outputs),
        None if forward is None else call_of(forward, graph),
        frozenset(
            tensor.id for tensor in (*arguments, *made) if graph.values[tensor.value].role in _OF_THE_MODEL
        ),
    )


def _arguments(op: Op, graph: Graph) -> list[Tensor]:
    """The tensors an op is called with."""
    return [graph.tensors[tensor] for tensor in argument_tensors(op)]


def _forward_of(op: Op, graph: Graph) -> Op | None:
    """The op that left its results for this one: `aten.native_dropout` for `aten.native_dropout_backward`.

    The input may come from a call of the same kind (the layer before); the forward left the most.
    """
    name = short_name(op.target)
    if not name.endswith("_backward"):
        return None
    creators = (graph.creator.get(tensor.value) for tensor in _arguments(op, graph))
    found = Counter(creator for creator in creators if creator is not None)
    likely = (graph.ops[creator] for creator, _ in found.most_common())
    return next((made for made in likely if short_name(made.target) == name.removesuffix("_backward")), None)


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


# Caps -----------------------------------------------------------------------------------------------


def _still_holds(cost: Cost, call: OpCall, caps: Caps) -> bool:
    """Whether a remembered cost is as good as these caps allow: not if the op may now be run in full."""
    return not cost.extrapolated or call.bytes > caps.op_bytes or cost.seconds > caps.op_seconds


def _measure_within(calls: Sequence[OpCall], device: torch.device, caps: Caps) -> Iterator[Cost | Failure]:
    """Measure calls in order; the small ones together, each large one by itself."""
    small_bytes = min(_SMALL_BYTES, caps.op_bytes) if device.type == "cpu" else caps.op_bytes
    small = [call for call in calls if call.bytes <= small_bytes]
    measured = iter(list(measure_calls(small, device)))
    for call in calls:
        yield next(measured) if call.bytes <= small_bytes else _measure_large(call, device, caps, small_bytes)


def _measure_large(call: OpCall, device: torch.device, caps: Caps, small_bytes: int) -> Cost | Failure:
    """A call that may exceed the caps: tried small first, in full if that promises to be quick enough."""
    estimate = _estimated(call, device, caps, small_bytes)
    # Where smaller sizes do not run, nothing is known, and the op itself is the only thing to try.
    quick = not isinstance(estimate, Cost) or estimate.seconds <= caps.op_seconds
    if call.bytes <= caps.op_bytes and quick:
        return next(iter(measure_calls([call], device)))
    return estimate or Failure(f"{call.target}: too large for this machine, and it cannot be made smaller")


def _estimated(call: OpCall, device: torch.device, caps: Caps, small_bytes: int) -> Cost | Failure | None:
    """The cost from two smaller runs; why these failed, or None if there is no way to make it smaller."""
    found: Cost | Failure | None = None
    for cut in _cuts(call, small_bytes, caps):
        larger, smaller = measure_calls([cut.larger, cut.smaller], device)
        if isinstance(larger, Cost) and isinstance(smaller, Cost):
            return _extrapolated(larger, smaller, cut.size, cut.half, cut.quarter)
        found = larger if isinstance(larger, Failure) else smaller
    return found


@dataclass(frozen=True)
class _Shrunk:
    """A call made smaller twice, along the extent `size`: to `half` and to `quarter`."""

    size: int
    half: int
    quarter: int
    larger: OpCall
    smaller: OpCall


def _cuts(call: OpCall, most_bytes: int, caps: Caps) -> Iterator[_Shrunk]:
    """Ways to make a call smaller, at which the op still works, the larger within the cap.

    The batch is tried first: the leading extent of the largest tensor. No extent is cut to one if
    another can be cut instead: for a single sample, kernels of their own are chosen.
    """
    largest = max((*call.tensors.values(), *call.made), key=_elements)
    sizes = {size: int(size * most_bytes / call.bytes) for size in largest.shape}
    halves = [
        (size, max(4, half))
        for size, along in sizes.items()
        for half in (min(along, size // 4), max(along, size // 4), along // 2)
    ]
    halves += [(size, 2) for size in sizes]
    most = min(4 * most_bytes, caps.op_bytes, call.bytes - 1)
    for size, half in dict.fromkeys(halves):
        tried: list[OpCall] = []
        for weights, lists in ((False, False), (False, True), (True, False), (True, True)):
            larger = call.cut(size, half, weights=weights, lists=lists)
            smaller = call.cut(size, half // 2, weights=weights, lists=lists)
            fits = half < size and larger.bytes <= most and larger not in tried
            if fits and larger.is_consistent() and smaller.is_consistent():
                yield _Shrunk(size, half, half // 2, larger, smaller)
            tried.append(larger)


def _elements(tensor: Any) -> int:
    count = 1
    for extent in tensor.shape:
        count *= extent
    return count


def _extrapolated(larger: Cost, smaller: Cost, size: int, half: int, quarter: int) -> Cost:
    def line(at_half: float, at_quarter: float) -> float:
        slope = max(0.0, (at_half - at_quarter) / (half - quarter))  # more never takes less
        return at_half + slope * (size - half)

    return Cost(
        workspace_bytes=round(line(larger.workspace_bytes, smaller.workspace_bytes)),
        seconds=line(larger.seconds, smaller.seconds),
        output_bytes=None,
        extrapolated=True,
    )
