"""What allocators tell of themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch._C._profiler import _EventType, _ProfilerEvent

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._C._profiler._EventType.Allocation", "tells the CPU allocator's events from others"),
    Private("torch._C._profiler._EventType.TorchOp", "tells the ranges that lowtide has marked from others"),
    Private("torch._C._profiler._ProfilerEvent", "what the profiler has recorded: allocations, and ranges"),
    Private(
        "torch.cuda.memory._record_memory_history",
        "has the caching allocator write down what it does",
        parameters=("enabled", "context", "stacks", "max_entries", "device"),
    ),
    Private("torch.cuda.memory._snapshot", "what the caching allocator has written down"),
    Private(
        "torch._C._accelerator_setAllocatorSettings",
        "switches expandable segments on where a budget is a card",
    ),
    Private(
        "torch._C._cuda_clearCublasWorkspaces",
        "has cuBLAS take its memory again, to be counted",
        needs_cuda=True,
    ),
)

ProfilerEvent: TypeAlias = _ProfilerEvent
_TRACE_ENTRIES = 10_000_000  # far above any step: a trace that wraps around would lose its beginning


def is_allocation(event: ProfilerEvent) -> bool:
    """Whether an event of the profiler is an allocation or a free."""
    return event.tag == _EventType.Allocation


def is_range(event: ProfilerEvent) -> bool:
    """Whether an event of the profiler is an op, or a range that was marked like one."""
    return event.tag == _EventType.TorchOp


@contextmanager
def history(where: torch.device) -> Iterator[Callable[[], Any]]:
    """While the block runs, CUDA's allocator writes down what it does; the function returns what it has."""
    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=_TRACE_ENTRIES, device=where
    )
    try:
        yield lambda: torch.cuda.memory._snapshot(where)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=where)


def clear_cublas_workspaces() -> None:
    """cuBLAS gives back the memory that it keeps, and takes it again when it is next used."""
    torch._C._cuda_clearCublasWorkspaces()


def segments_expand() -> bool:
    """Whether PyTorch's allocator can have expandable segments on this platform: not on Windows or ROCm."""
    return sys.platform != "win32" and torch.version.hip is None


def switch_expandable_segments_on() -> None:
    """Let CUDA's allocator have expandable segments from now on; segments that it has stay as they are."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
