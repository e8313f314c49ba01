"""One op of a graph, run for real on scratch tensors: what memory and time does its kernel take?"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import record_function

from lowtide.compat.fake_kernels import as_kernels_do
from lowtide.compat.memory import ProfilerEvent, is_range
from lowtide.compat.tensors import leaves, storage_key, tensors_in, with_signs
from lowtide.cost.cache import Cost
from lowtide.cost.contents import fill_decisive
from lowtide.cost.measure import allocator_events, cpu_blocks, growth
from lowtide.ir.graph import Arg, Ref, Signs, Symbol, Tensor, short_name
from lowtide.ir.simulate import allocator_of
from lowtide.ir.validate import extent_bytes

_RUNS = 4
_OPAQUE = "uint8"
_ENOUGH_SECONDS = 0.1  # more than two runs are made only while they take less than this together


@dataclass(frozen=True)
class OpCall:
    """An op with the tensors it takes and makes, free of any graph; so it can be asked for at other sizes.

    What a kernel leaves for its own backward (opaque reserves, seeds, indices) cannot be made up: a wrong
    one crashes the process. `maker` is the forward call, and its outputs are used as they come.
    `weights` are the tensors among arguments and outputs that do not grow with the batch.
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    tensors: dict[int, Tensor]
    outputs: tuple[Tensor | None, ...]
    maker: OpCall | None = None
    weights: frozenset[int] = frozenset()

    @property
    def bytes(self) -> int:
        """Roughly what one run takes: arguments and outputs, without what lies before them."""
        return sum(extent_bytes(replace(tensor, offset=0)) for tensor in (*self.tensors.values(), *self.made))

    @property
    def made(self) -> tuple[Tensor, ...]:
        """The outputs that are tensors."""
        return tuple(tensor for tensor in self.outputs if tensor is not None)

    def cut(self, size: int, smaller: int, *, weights: bool, lists: bool) -> OpCall:
        """The same call with one extent of `size` in each tensor, the first that has it, made `smaller`.

        Only one: a batch of 64 must not take 64 channels along, or costs would not grow along a line.
        `weights` are cut too only if told so, as are sizes in lists among the arguments.
        """

        def tensor(given: Tensor) -> Tensor:
            return given if given.id in self.weights and not weights else _cut(given, size, smaller)

        def arg(given: Arg) -> Arg:
            if not isinstance(given, tuple) or not lists:
                return given
            if size in given and all(type(item) is int for item in given):
                first = given.index(size)
                return (*given[:first], smaller, *given[first + 1 :])
            return tuple(arg(item) for item in given)

        return replace(
            self,
            args=tuple(arg(given) for given in self.args),
            kwargs=tuple((name, arg(given)) for name, given in self.kwargs),
            tensors={key: tensor(given) for key, given in self.tensors.items()},
            outputs=tuple(given and tensor(given) for given in self.outputs),
            maker=self.maker and self.maker.cut(size, smaller, weights=weights, lists=lists),
        )

    def is_consistent(self) -> bool:
        """Whether the op accepts these arguments and makes outputs of these shapes."""
        try:
            with as_kernels_do():
                made = list(tensors_in(self._run(*self.prepare(torch.device("meta"), fill=False))))
        except _REFUSALS:
            return False  # the op itself refuses these sizes, which is what was asked
        return [tuple(tensor.shape) for tensor in made] == [tensor.shape for tensor in self.made]

    def prepare(self, device: torch.device, fill: bool = True) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for a run: fresh tensors of the right shapes and strides, with harmless contents."""
        made = self._left_by_maker(device, fill)
        for key, tensor in self.tensors.items():
            if key not in made:
                if tensor.dtype == _OPAQUE and short_name(self.target).endswith("_backward"):
                    raise TypeError("it needs opaque bytes that only its own forward can leave")
                made[key] = _scratch(tensor, device, fill)
        args = [_real(arg, made, device) for arg in self.args]
        if fill:
            fill_decisive(self.target, args, [tensor.shape for tensor in self.made])
        return args, {name: _real(arg, made, device) for name, arg in self.kwargs}

    def _left_by_maker(self, device: torch.device, fill: bool) -> dict[int, torch.Tensor]:
        if self.maker is None:
            return {}
        results = leaves(self.maker._run(*self.maker.prepare(device, fill)))
        # like a graph's op, without outputs that are plain numbers
        tensors = [real for real in results if real is None or isinstance(real, torch.Tensor)]
        pairs = zip(self.maker.outputs, tensors, strict=True)
        return {
            tensor.id: real
            for tensor, real in pairs
            if tensor is not None and real is not None and tensor.id in self.tensors
        }

    def _run(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return resolve(self.target)(*args, **kwargs)


def resolve(target: str) -> Any:
    """`torch.ops.aten.relu.default` for 'aten.relu.default'."""
    found: Any = torch.ops
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _cut(tensor: Tensor, size: int, smaller: int) -> Tensor:
    """`tensor` with its first extent of `size` made `smaller`, dense in the same order of strides."""
    if size not in tensor.shape:
        return tensor
    first = tensor.shape.index(size)
    shape = (*tensor.shape[:first], smaller, *tensor.shape[first + 1 :])
    stride = [0] * len(shape)
    step = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (tensor.stride[axis], -axis)):
        if tensor.stride[axis]:
            stride[axis] = step
            step *= shape[axis]
    return replace(tensor, shape=shape, stride=tuple(stride), offset=0)


def _real(arg: Arg, made: dict[int, torch.Tensor], device: torch.device) -> Any:
    """What to pass for an argument.

    Not a closure: one that calls itself is a reference cycle, and would keep the tensors in it alive until
    some later collection, in the middle of another measurement.
    """
    if isinstance(arg, Ref):
        return made[arg.tensor]
    if isinstance(arg, Symbol):
        return _symbol(arg, device)
    return [_real(item, made, device) for item in arg] if isinstance(arg, tuple) else arg


def _scratch(tensor: Tensor, device: torch.device, fill: bool) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    made = torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=device)
    if fill and made.numel():
        # through the storage: a tensor that overlaps itself (expanded) cannot be filled directly
        flat = torch.empty(0, dtype=dtype, device=device).set_(made.untyped_storage())
        # zero is a valid index, target, seed and boolean; floats must not be all equal or all zero
        flat.uniform_(0.1, 1.0) if dtype.is_floating_point else flat.zero_()
    conjugate = tensor.signs in (Signs.CONJUGATE, Signs.BOTH)
    return with_signs(made, conjugate, negative=tensor.signs in (Signs.NEGATIVE, Signs.BOTH))


def _symbol(symbol: Symbol, device: torch.device) -> Any:
    if symbol.kind == "device":
        return device
    if symbol.kind == "object":
        raise TypeError(f"an argument of type {symbol.text} cannot be made up")
    return constant_of(symbol)


def constant_of(symbol: Symbol) -> Any:
    """What a symbol stands for: a complex number, or what torch has by that name."""
    return complex(symbol.text) if symbol.kind == "complex" else getattr(torch, symbol.text)


# Running --------------------------------------------------------------------------------------------


_MARK = "lowtide call "
_REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError)


class Failure(Exception):
    """A kernel did not run on made-up arguments."""


def measure_calls(calls: Sequence[OpCall], device: torch.device) -> Iterator[Cost | Failure]:
    """Run each call on `device` and yield what it took, in order.

    Gradients are on, as in training: recurrent layers leave bytes for their backward only then. No
    argument requires them, so nothing is recorded.
    """
    if device.type == "cuda":
        return (_measure_on_cuda(call, device) for call in calls)
    return _measure_on_cpu(calls)


def _ready(call: OpCall, device: torch.device) -> tuple[Any, list[Any], dict[str, Any]] | Failure:
    try:
        return resolve(call.target), *call.prepare(device)
    except _REFUSALS as error:
        return _failure(call, error)


def _failure(call: OpCall, error: BaseException) -> Failure:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return Failure(f"{call.target}: {reason}")


def _output_bytes(args: list[Any], kwargs: dict[str, Any], result: Any) -> tuple[int, ...]:
    given = {storage_key(tensor) for tensor in tensors_in(args, kwargs)}
    made = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_in(result)}
    return tuple(size for key, size in made.items() if key not in given)


def _measure_on_cpu(calls: Sequence[OpCall]) -> Iterator[Cost | Failure]:
    """All calls under one recording, each marked, since starting a recording costs more than most ops."""
    results: list[tuple[float, tuple[int, ...]] | Failure] = []
    with torch.enable_grad(), allocator_events() as recording:
        for position, call in enumerate(calls):
            results.append(_run_marked(call, f"{_MARK}{position}"))
    workspaces = _workspaces(recording)
    for position, found in enumerate(results):
        if isinstance(found, Failure):
            yield found
        else:
            seconds, outputs = found
            yield Cost(max(0, workspaces[position] - sum(outputs)), seconds, outputs)


def _run_marked(call: OpCall, mark: str) -> tuple[float, tuple[int, ...]] | Failure:
    """Seconds of the quickest run, and the bytes it leaves. Each run is marked; the last one counts.

    There are two at least: oneDNN sets a primitive up in the first, and takes other memory for it.
    """
    ready = _ready(call, torch.device("cpu"))
    if isinstance(ready, Failure):
        return ready
    func, args, kwargs = ready
    quickest, spent = float("inf"), 0.0
    outputs: tuple[int, ...] = ()
    for run in range(_RUNS):
        if run > 1 and spent > _ENOUGH_SECONDS:
            break
        try:
            with record_function(mark):
                began = _clocks()
                result = func(*args, **kwargs)
                seconds = min(now - then for now, then in zip(_clocks(), began, strict=True))
        except _REFUSALS as error:
            return _failure(call, error)
        quickest, outputs = min(quickest, seconds), _output_bytes(args, kwargs, result)
        spent += seconds
        del result
    return quickest, outputs


def _clocks() -> tuple[float, float]:
    """Two clocks of which the one that goes slower tells what an op takes.

    The processor's goes faster where several threads run, that of the wall where other processes do.
    """
    return time.perf_counter(), time.process_time()


def _workspaces(recording: Any) -> dict[int, int]:
    """The most bytes held at once within each marked range."""
    tree: list[ProfilerEvent] = recording.profiler.kineto_results.experimental_event_tree()
    blocks = cpu_blocks(tree)
    times = [block.time_ns for block in blocks]
    found: dict[int, int] = {}
    for mark in sorted(_marks(tree), key=lambda event: event.start_time_ns):
        first = bisect.bisect_left(times, mark.start_time_ns)
        last = bisect.bisect_right(times, mark.end_time_ns)
        found[int(mark.name.removeprefix(_MARK))] = max(growth(blocks[first:last]))
    return found


def _marks(tree: Sequence[ProfilerEvent]) -> Iterator[ProfilerEvent]:
    pending = list(tree)
    while pending:
        event = pending.pop()
        if is_range(event) and event.name.startswith(_MARK):
            yield event
        else:
            pending.extend(event.children)


def _measure_on_cuda(call: OpCall, device: torch.device) -> Cost | Failure:
    with torch.enable_grad(), torch.cuda.device(device):
        ready = _ready(call, device)
        if isinstance(ready, Failure):
            return ready
        func, args, kwargs = ready
        try:
            func(*args, **kwargs)  # what libraries take on first use and keep is out of the way after this
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            result = func(*args, **kwargs)
            peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        except _REFUSALS as error:
            return _failure(call, error)
        outputs = _output_bytes(args, kwargs, result)
        del result
        # requested, not allocated: the latter depends on which cached block happened to be free
        workspace = allocator_of("cuda").held(max(0, peak - before - sum(outputs)))
        return Cost(workspace, _cuda_seconds(func, args, kwargs), outputs)


def _cuda_seconds(func: Any, args: list[Any], kwargs: dict[str, Any]) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_RUNS)]
    marks[0].record()
    for mark in marks[1:]:
        func(*args, **kwargs)
        mark.record()
    torch.cuda.synchronize()
    return float(min(start.elapsed_time(end) for start, end in pairwise(marks))) / 1e3
