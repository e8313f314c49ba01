"""What a real step really takes, from the allocator's own events.

On the CPU every allocation and free that PyTorch's allocator makes is recorded by torch.profiler. On
CUDA the caching allocator keeps exact statistics, and its trace gives the timeline.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lowtide.compat.memory import ProfilerEvent, history, is_allocation
from lowtide.compat.tensors import storage_key, unwrapped
from lowtide.errors import BadRequest, DeviceMissing


@dataclass(frozen=True)
class Reading:
    """One step, measured.

    `resident_bytes` were held when it began, `growth_bytes` is the most it held beyond that, and
    `peak_bytes` is their sum. `timeline` has the bytes held after each allocation and free, beginning
    with what was resident. `reserved_bytes` is the most the caching allocator took from the device
    (None on the CPU, which has no cache). `seconds` is the wall time of the step.
    """

    device: str
    peak_bytes: int
    resident_bytes: int
    seconds: float
    timeline: tuple[int, ...]
    reserved_bytes: int | None = None

    @property
    def growth_bytes(self) -> int:
        """The peak less what was there before the step began."""
        return self.peak_bytes - self.resident_bytes


def measure(
    step: Callable[[], object], *, device: str | torch.device | None = None, timed: int = 0
) -> Reading:
    """Run `step` once and read its memory from the allocator.

    What was allocated before counts as resident and its release during the step counts as a release
    (CUDA) or is not seen (CPU: the allocator does not know blocks from before the recording); either way
    it never lowers what the step itself is found to hold. On the CPU `resident_bytes` is the sum over all
    tensors alive in this process, since the allocator keeps no count.

    Recording slows a step of many small ops down. With `timed=n`, `seconds` is the median of n further
    runs without it; the step then runs n+1 times.

    Does not count: memory that libraries take from the system behind PyTorch's back (oneDNN's and MKL's
    scratch buffers, the CUDA context).

    Raises:
        BadRequest: the device is none that lowtide measures on, or `timed` is negative.
        DeviceMissing: the device is not on this machine.
    """
    if timed < 0:
        raise BadRequest(f"the step cannot be timed {timed} times; give 0 or more")
    where = present_device(default_device() if device is None else device, "measure")
    reading = _measure_cpu(step) if where.type == "cpu" else _measure_cuda(step, where)
    if not timed:
        return reading
    seconds = statistics.median(seconds_of(step, where) for _ in range(timed))
    return Reading(**{**reading.__dict__, "seconds": seconds})


def present_device(device: str | torch.device, doing: str) -> torch.device:
    """`device`, if this machine has it and lowtide can do there what it is about to ("measure")."""
    try:
        where = torch.device(device)
    except RuntimeError:
        raise BadRequest(f"'{device}' is not a device. Try cpu, cuda or cuda:0.") from None
    if where.type not in ("cpu", "cuda"):
        raise BadRequest(f"cannot {doing} on '{where}'; lowtide {doing}s on cpu and cuda")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise DeviceMissing(str(where), doing)
    return where


def default_device() -> torch.device:
    """Where a step is measured unless told: on CUDA, if this process uses it."""
    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")


def seconds_of(step: Callable[[], object], where: torch.device) -> float:
    """The wall time of `step` on `where`, all of its kernels included."""
    _synchronize(where)
    start = time.perf_counter()
    step()
    _synchronize(where)
    return time.perf_counter() - start


def _synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


# CPU ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation (positive bytes) or free (negative)."""

    time_ns: int
    address: int
    bytes: int


def _measure_cpu(step: Callable[[], object]) -> Reading:
    gc.collect()
    resident = _bytes_of_live_tensors()
    blocks, seconds = record_cpu(step)
    timeline = tuple(resident + held for held in growth(blocks))
    return Reading("cpu", max(timeline), resident, seconds, timeline)


@contextmanager
def allocator_events() -> Iterator[profile]:
    """A recording of everything the CPU allocator does while the block runs."""
    with warnings.catch_warnings():
        # said by some releases of every recording that is not the first of a process
        warnings.filterwarnings("ignore", ".*Profiler clears events at the end of each cycle")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            yield recording


def record_cpu(step: Callable[[], object]) -> tuple[list[Allocation], float]:
    """Every allocation and free of the CPU allocator while `step` runs, in order, and its wall time."""
    with allocator_events() as recording:
        start = time.perf_counter()
        result = step()
        seconds = time.perf_counter() - start
    del result
    results = recording.profiler.kineto_results if recording.profiler is not None else None
    if results is None:
        raise BadRequest("torch.profiler recorded nothing: is another profiler running?")
    return cpu_blocks(results.experimental_event_tree()), seconds


def growth(blocks: Iterable[Allocation]) -> Iterator[int]:
    """Bytes held after each event, from zero. Frees of blocks from before the recording do not count."""
    ours: set[int] = set()
    changes = [0]
    for block in blocks:
        if block.bytes > 0:
            ours.add(block.address)
            changes.append(block.bytes)
        elif block.address in ours:
            ours.remove(block.address)
            changes.append(block.bytes)
    return accumulate(changes)


def cpu_blocks(tree: Iterable[ProfilerEvent]) -> list[Allocation]:
    """The CPU allocator's events in what the profiler recorded, in the order in which they happened."""
    blocks: list[Allocation] = []
    pending = list(tree)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if is_allocation(event):
            fields: Any = event.extra_fields
            if fields.device.type == "cpu":
                blocks.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(blocks, key=lambda block: block.time_ns)


def _bytes_of_live_tensors() -> int:
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # exact types only: a subclass (a fake, a quantised tensor) may have no storage to ask
        plain = type(thing) in (torch.Tensor, torch.nn.Parameter)
        if plain and thing.device.type == "cpu" and thing.layout is torch.strided:
            tensor = unwrapped(thing)
            storages[storage_key(tensor)] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


# CUDA -----------------------------------------------------------------------------------------------


def _measure_cuda(step: Callable[[], object], where: torch.device) -> Reading:
    gc.collect()
    torch.cuda.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    resident = torch.cuda.memory_allocated(where)
    with history(where) as snapshot_of_now:
        seconds = seconds_of(step, where)
        snapshot = snapshot_of_now()
    index = where.index if where.index is not None else torch.cuda.current_device()
    changes = [resident]
    for entry in snapshot["device_traces"][index]:
        if entry["action"] == "alloc":
            changes.append(entry["size"])
        elif entry["action"] == "free_requested":
            changes.append(-entry["size"])
    return Reading(
        device=str(where),
        peak_bytes=torch.cuda.max_memory_allocated(where),
        resident_bytes=resident,
        seconds=seconds,
        timeline=tuple(accumulate(changes)),
        reserved_bytes=torch.cuda.max_memory_reserved(where),
    )
