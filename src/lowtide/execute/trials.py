"""A graph that is run to see what comes out, and what its memory costs: numbers for `lowtide.lesson`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowtide.cost.measure import measure, present_device, seconds_of
from lowtide.errors import BadRequest
from lowtide.execute.executor import Executor, evaluate
from lowtide.execute.memory import Memory, Tally
from lowtide.ir.builder import Growing
from lowtide.ir.graph import Graph, Ref, Tensor

_SHOWN = 6  # elements of a value: a lesson is read by people
_RUNS = 7  # after the first, which allocates what the others use again


@dataclass(frozen=True, slots=True)
class Trial:
    """A step in one kind of memory, really run.

    `held_bytes` is the most that was held for values in the first step, the arena included. `first` is what
    handing out memory took in that step, `later` in the ones after it; `seconds` is the median of whole later
    steps, and `handing_seconds` that of handing out memory in them.
    """

    memory: Memory
    held_bytes: int
    first: Tally
    later: Tally
    seconds: float
    handing_seconds: float


def numbers_of(graph: Graph, given: Mapping[str, Sequence[float]]) -> dict[int, tuple[float, ...]]:
    """The first elements of every value, when what is resident has these elements; a single one is repeated.

    Raises:
        BadRequest: something that the graph reads is not given, or has another number of elements.
        CannotRun: an op of the graph cannot be called.
    """
    tensors = {name: _filled(graph, name, numbers) for name, numbers in given.items()}
    missing = [graph.values[v].name for v in graph.resident if v in graph.readers]
    missing = [name for name in missing if name not in tensors]
    if missing:
        raise BadRequest(f"there is no number for '{missing[0]}'. Give one for each of what the graph reads.")
    seen = replace(graph, outputs=graph.outputs | graph.creator.keys())
    wanted = [tensor for op in graph.ops for tensor in op.outputs if tensor is not None]
    made = zip(wanted, evaluate(seen, tensors, wanted), strict=True)
    found = {value: tensors[graph.values[value].name] for value in graph.resident if value in graph.readers}
    found |= {graph.tensors[tensor].value: result for tensor, result in made}
    return {value: tuple(map(float, tensor.flatten()[:_SHOWN])) for value, tensor in sorted(found.items())}


def trials(graph: Graph) -> tuple[Trial, ...]:
    """Run the graph on random numbers in memory that is naive, a pool, and static.

    Raises:
        DeviceMissing: the graph is of a device that is not on this machine.
        CannotRun: an op of the graph cannot be called.
    """
    present_device(graph.device, "measure")
    given = {graph.values[value].name: _random(graph, value) for value in graph.resident}
    return tuple(_tried(graph, given, memory) for memory in (Memory.NAIVE, Memory.POOL, Memory.STATIC))


def _tried(graph: Graph, given: Mapping[str, torch.Tensor], memory: Memory) -> Trial:
    executors: list[Executor] = []

    def first_step() -> None:
        executors.append(Executor(graph, given, memory=memory))
        executors[0].run()

    reading = measure(first_step, device=graph.device)
    executor = executors[0]
    arena = int(memory is Memory.STATIC)  # one allocation, before the step begins
    first = replace(executor.tally, allocations=executor.tally.allocations + arena)
    seconds, handing = [], []
    for _ in range(_RUNS):
        seconds.append(seconds_of(executor.run, executor.device))
        handing.append(executor.tally.seconds)
    return Trial(
        memory=memory,
        held_bytes=reading.growth_bytes,
        first=first,
        later=executor.tally,
        seconds=statistics.median(seconds),
        handing_seconds=statistics.median(handing),
    )


def _whole(graph: Graph, value: int) -> Tensor:
    """The look at all of a resident value."""
    growing = Growing(graph)
    looks = [tensor for tensor in graph.tensors if tensor.value == value]
    return next((tensor for tensor in looks if growing.owns(Ref(tensor.id))), looks[0])


def _filled(graph: Graph, name: str, numbers: Sequence[float]) -> torch.Tensor:
    named = [value for value in graph.resident if graph.values[value].name == name]
    if not named:
        known = ", ".join(f"'{graph.values[value].name}'" for value in graph.resident)
        raise BadRequest(f"there is no '{name}' to give a number for. There are: {known}.")
    look = _whole(graph, named[0])
    if len(numbers) not in (1, math.prod(look.shape)):
        raise BadRequest(
            f"'{name}' has {math.prod(look.shape)} elements, and {len(numbers)} numbers were given. "
            "Give one for each, or one for all."
        )
    repeated = list(numbers) * (math.prod(look.shape) // len(numbers))
    dtype: torch.dtype = getattr(torch, look.dtype)
    return torch.tensor(repeated, dtype=dtype, device=graph.device).reshape(look.shape)


def _random(graph: Graph, value: int) -> torch.Tensor:
    """Numbers around one, so that they have logarithms and roots; whole numbers, as of labels, are 0."""
    look = _whole(graph, value)
    dtype: torch.dtype = getattr(torch, look.dtype)
    tensor = torch.empty_strided(look.shape, look.stride, dtype=dtype, device=graph.device)
    return tensor.uniform_(0.5, 1.5) if dtype.is_floating_point else tensor.zero_()
