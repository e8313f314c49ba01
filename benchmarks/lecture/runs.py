"""One scheme of the lecture, run for real: what a training step holds at its peak, and how long it takes.

`peak_bytes` is all that PyTorch's allocator held: parameters, their gradients and the batch as well.
What would not fit, by estimate, is not run, and its row says so.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from benchmarks.lecture.models import Network
from lowtide.arena.layout import lay_out
from lowtide.cost.measure import measure
from lowtide.execute.arena_step import ArenaStep
from lowtide.execute.memory import Memory
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule, straight
from lowtide.ir.simulate import simulate
from lowtide.text.units import format_bytes
from lowtide.trace.inputs import named_inputs
from lowtide.trace.step import training_step

WARM_UP: Final = 2
TIMED: Final = 3
Json = dict[str, Any]


def measured(network: Network, graph: Graph, schedule: Schedule, memory: Memory, packing: str) -> Json:
    """Steps of the captured graph, in the order of `schedule`; `packing` is how an arena is laid out."""
    model = network.model
    clean_up(model)
    started = time.perf_counter()
    layout = lay_out(graph, schedule, method=packing) if memory is Memory.STATIC else None
    needed_bytes = _needed_bytes(graph, schedule, memory)
    resident_bytes = simulate(graph, schedule).resident_bytes
    if layout is not None:
        needed_bytes = resident_bytes + layout.arena_bytes
    if needed_bytes > room_bytes(_where(model)):
        return _too_large(needed_bytes, model)
    inputs = named_inputs(model, network.example, None)
    try:
        step = ArenaStep(model, graph, schedule, inputs, memory, layout)
        prepared = time.perf_counter()
        found = _steps(step, model, resident_bytes + step.executor.kept_bytes)
    except torch.OutOfMemoryError:
        return {"predicted_bytes": needed_bytes, "skipped": "ran out of memory"}
    return {
        "memory": memory.value,
        "predicted_bytes": needed_bytes,
        "arena_bytes": step.executor.arena_bytes or None,
        "preparing_seconds": prepared - started,
        **found,
    }


def eager(network: Network, graph: Graph) -> Json:
    """The same steps as PyTorch runs them, without lowtide; `graph` says whether they fit."""
    model = network.model
    clean_up(model)
    needed_bytes = _needed_bytes(graph, straight(graph), Memory.DIRECT)
    if needed_bytes > room_bytes(_where(model)):
        return _too_large(needed_bytes, model)
    inputs = named_inputs(model, network.example, None).values()
    resident_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *inputs))
    found = _steps(training_step(model, network.example), model, resident_bytes)
    clean_up(model)
    return {"memory": "PyTorch's", "predicted_bytes": needed_bytes, **found}


def clean_up(model: nn.Module) -> None:
    """Let go of what the last scheme left."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def room_bytes(device: torch.device) -> int:
    """What a step may take there: nearly all of a GPU, half of a machine's memory."""
    if device.type == "cuda":
        return int(0.95 * torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _steps(step: Callable[[], object], model: nn.Module, held_bytes: int) -> Json:
    """What steps take. `held_bytes` are held between them: a CPU's allocator cannot tell whose they are."""

    def fresh_step() -> None:
        model.zero_grad(set_to_none=True)
        step()

    for _ in range(WARM_UP):
        fresh_step()
    reading = measure(fresh_step, device=_where(model), timed=TIMED)
    on_cpu = reading.reserved_bytes is None
    return {
        "peak_bytes": held_bytes + reading.growth_bytes if on_cpu else reading.peak_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "seconds": reading.seconds,
    }


def _needed_bytes(graph: Graph, schedule: Schedule, memory: Memory) -> int:
    """What the step will hold: with naive memory whatever is made, else what is live at once."""
    timeline = simulate(graph, schedule)
    if memory is not Memory.NAIVE:
        return timeline.peak_bytes
    return timeline.resident_bytes + sum(graph.counted_bytes(value) for value in graph.creator)


def _too_large(needed_bytes: int, model: nn.Module) -> Json:
    room = format_bytes(room_bytes(_where(model)))
    return {
        "predicted_bytes": needed_bytes,
        "skipped": f"needs {format_bytes(needed_bytes)}, there is room for {room}",
    }


def _where(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
