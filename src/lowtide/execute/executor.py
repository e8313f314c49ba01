"""The executor: walks a schedule of a graph and runs real kernels on real memory.

    graph      what to compute: captured from a model, or drawn up as expressions and extended by gradients
    schedule   in which order, what again, and what is dead when
    given      the resident values, by name
    memory     where results are put (see `memories`)

Whatever the memory, the same kernels see the same numbers, and leave the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lowtide.arena.buffers import Birth
from lowtide.arena.layout import Layout, lay_out
from lowtide.cost.op_bench import constant_of
from lowtide.errors import BadRequest, CannotRun
from lowtide.execute.memory import Address, AddressSource, Direct, Memory, Naive, Pool, Static, Tally
from lowtide.execute.out_variants import (
    OFFSETS,
    Move,
    Moves,
    Writer,
    extra_bytes,
    kernel,
    leaves_what_it_returns,
    mover,
    moves,
    tensor_leaves,
    writer,
)
from lowtide.execute.residents import Residents
from lowtide.ir.graph import OPTIMIZER_STEP, Arg, Graph, Op, Ref, Symbol, refs
from lowtide.ir.recomputable import does_nothing
from lowtide.ir.schedule import Compute, Free, Schedule, straight
from lowtide.ir.simulate import simulate
from lowtide.ir.strides import is_dense
from lowtide.ir.validate import item_bytes

Thunk = Callable[[], object]
_NOT_IN_THE_GRAPH = (OPTIMIZER_STEP, "aten.lift_fresh.default")


def evaluate(
    graph: Graph,
    given: Mapping[str, torch.Tensor],
    wanted: Sequence[int],
    memory: Memory | str = Memory.DIRECT,
) -> list[torch.Tensor]:
    """Run `graph` once and return the tensors with the ids `wanted`; they must belong to its outputs.

    Raises:
        BadRequest: something resident is missing or has another size; a tensor asked for is not kept.
        CannotRun: an op of the graph cannot be called.
    """
    executor = Executor(graph, given, memory=memory)
    executor.run()
    return [executor.tensor(number) for number in wanted]


class Executor:
    """A graph and a schedule, bound to memory, to be run as often as one likes.

    Every tensor in `given` must have the shape, strides and type that the graph knows it by; the graph reads
    it where it is, and changes it there if an op does. After a run, `tensor` and `results` look at what
    outlives the step, until the next run overwrites it. Static memory's `layout` is made if none is given.

    Raises:
        BadRequest: something resident is missing, is not in the graph, or looks different; a layout is given
            for memory that needs none.
        CannotRun: an op of the graph cannot be called, or the schedule has a kind of step that is not known.
        IllegalSchedule, IllegalLayout, ArenaTooSmall: see `simulate` and `lay_out`.
    """

    def __init__(
        self,
        graph: Graph,
        given: Mapping[str, torch.Tensor],
        *,
        schedule: Schedule | None = None,
        memory: Memory | str = Memory.STATIC,
        layout: Layout | None = None,
    ) -> None:
        self.graph = graph
        self.schedule = straight(graph) if schedule is None else schedule
        self.memory = _memory(memory)
        if layout is not None and self.memory is not Memory.STATIC:
            raise BadRequest(f"a layout is for static memory, and {self.memory} was asked for")
        self.timeline = simulate(graph, self.schedule)
        _check_ops(graph)
        _check_steps(self.schedule)
        self._residents = Residents(graph)
        self._places: dict[int, Address] = {}
        self._views: dict[int, torch.Tensor] = {}
        self._tensors_of: dict[int, list[int]] = {}
        for tensor in graph.tensors:
            self._tensors_of.setdefault(tensor.value, []).append(tensor.id)
        self._slots: dict[int, list[tuple[list[Any], int]]] = {}  # where tensors of residents are passed
        self._tape: list[Thunk] = []  # with static memory: what a step calls, ready to be called again
        self._is_taped = False  # a whole step, and not one that was interrupted
        self._recorded: torch.cuda.CUDAGraph | None = None
        self._writers: dict[int, Writer] = {}
        self.bind(given)
        self._places.update(self._residents.complete())
        self.device = self._residents.device()
        if self.memory is Memory.STATIC and layout is None:
            layout = lay_out(graph, self.schedule)
        self.layout = layout
        self._source = _source(self.memory, self.device, layout)

    def bind(self, given: Mapping[str, torch.Tensor]) -> None:
        """Use these tensors from now on, in place of those that went by the same names."""
        if self._recorded is not None:
            self._residents.copy(given)
            return
        for value, place in self._residents.take(given):
            self._places[value] = place
            for number in self._tensors_of.get(value, ()):
                self._views.pop(number, None)
                for container, index in self._slots.get(number, ()):
                    container[index] = self._get(number)

    # Running ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Do everything that the schedule says, once."""
        self._source.new_step()
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            if self._recorded is not None:
                self._recorded.replay()
            elif self._is_taped:
                for thunk in self._tape:
                    thunk()
            else:
                self._walk()

    def record(self) -> None:
        """From now on, replay the step as one CUDA graph: every address in it is fixed, thanks to the arena.

        A step must have run, so that libraries are set up. Recording itself computes nothing. A batch that is
        bound later is copied to where the recorded one is.

        Raises:
            BadRequest: memory is not static, the device is not CUDA, or nothing has run yet.
        """
        if self.memory is not Memory.STATIC or self.device.type != "cuda" or not self._is_taped:
            raise BadRequest("only a step that has run in static memory on CUDA can be recorded")
        recorded = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.cuda.graph(recorded):
            self._walk()  # once more: under recording, some kernels return their seeds elsewhere
        self._recorded = recorded

    def _walk(self) -> None:
        self._is_taped = False
        self._tape.clear()
        self._slots.clear()
        for value in self.graph.creator:  # what the last step left
            self._forget(value)
        times: dict[int, int] = {}
        for step in self.schedule:
            match step:
                case Compute(op) if not does_nothing(self.graph.ops[op]):
                    time = times[op] = times.get(op, -1) + 1
                    self._compute(self.graph.ops[op], time)
                case Free(value):
                    self._free(value)
        self._is_taped = self.memory is Memory.STATIC

    def _free(self, value: int) -> None:
        if value in self.graph.creator:
            place = self._places[value]
            self._forget(value)
            if self.graph.values[value].device == self.graph.device:
                self._source.give(place)

    def _compute(self, op: Op, time: int) -> None:
        skipped = frozenset(op.updates) if time else frozenset[int]()
        args, kwargs = self._arguments(op, skipped)
        if self.memory is Memory.DIRECT:
            self._adopt(op, tensor_leaves(kernel(op.target)(*args, **kwargs)))
            return
        outs = [self._out(op, number, time) for number in op.outputs]
        if not op.creates:
            thunk: Thunk = _BoundCall(kernel(op.target), args, kwargs)
        else:
            if op.id not in self._writers:
                self._writers[op.id] = self._writer(op, args, outs)
            thunk = self._writers[op.id].bind(args, kwargs, outs)
        thunk()
        if isinstance(thunk, Move):
            self._keep_as_returned(op, thunk)
        if self.memory is Memory.STATIC:
            self._tape.append(thunk)
            self._note_slots(op, args, kwargs)

    def _writer(self, op: Op, args: list[Any], outs: Sequence[torch.Tensor | None]) -> Writer:
        """How an op writes that runs for the first time. What draws or counts cannot be tried before."""
        found = writer(op.target, self.device.type, args)
        if not found.is_variant:
            return found
        if op.random or op.mutates:
            return mover(op.target)
        again = self._arguments(op, frozenset(op.updates))
        return found if leaves_what_it_returns(found, op.target, *again, outs) else mover(op.target)

    def _out(self, op: Op, number: int | None, time: int) -> torch.Tensor | None:
        """Where an output is to be written; None for one that is no value of its own."""
        value = None if number is None else self.graph.tensors[number].value
        if number is None or value not in op.creates:
            return None
        if value not in self._places:
            self._places[value] = self._place(value, time)
        return self._get(number)

    def _place(self, value: int, time: int) -> Address:
        found = self.graph.values[value]
        if found.device == self.graph.device:
            return self._source.take(Birth(value, time), found.bytes)
        return Address(torch.empty(found.bytes, dtype=torch.uint8, device=found.device).untyped_storage())

    def _keep_as_returned(self, op: Op, move: Move) -> None:
        """Results that could not be moved to their places are where they are."""
        for number, out in zip(op.outputs, move.outs, strict=True):
            if number is not None and out is not None and out is not self._views.get(number):
                self._places[self.graph.tensors[number].value] = Address(out.untyped_storage())
                self._views[number] = out

    def _adopt(self, op: Op, results: list[torch.Tensor | None]) -> None:
        """What a kernel returned becomes the value, if it lies in memory as the graph says."""
        for number, result in zip(op.outputs, results, strict=True):
            if number is None or result is None or self.graph.tensors[number].value not in op.creates:
                continue
            tensor = self.graph.tensors[number]
            if _strides(result.shape, result.stride()) != _strides(tensor.shape, tensor.stride):
                result = torch.empty_strided(
                    tensor.shape, tensor.stride, dtype=result.dtype, device=result.device
                ).copy_(result)
            start = int(result.storage_offset()) - tensor.offset
            self._places[tensor.value] = Address(result.untyped_storage(), start * result.element_size())
            self._views[number] = result

    # Tensors ------------------------------------------------------------------------------------------

    def tensor(self, number: int) -> torch.Tensor:
        """A tensor of the graph, as the last run left it."""
        value = self.graph.tensors[number].value
        if value not in self._places:
            raise BadRequest(
                f"'{self.graph.values[value].name}' is not there: it is dead at the end of the step, or "
                "nothing has run yet. Make it an output of the graph."
            )
        return self._get(number)

    @property
    def results(self) -> dict[str, torch.Tensor]:
        """What the step hands back, by name: the loss and the gradients."""
        return {name: self.tensor(number) for name, number in self.graph.results}

    def _get(self, number: int) -> torch.Tensor:
        found = self._views.get(number)
        if found is None:
            tensor = self.graph.tensors[number]
            found = self._views[number] = self._places[tensor.value].view(tensor)
        return found

    def _forget(self, value: int) -> None:
        self._places.pop(value, None)
        for number in self._tensors_of.get(value, ()):
            self._views.pop(number, None)

    # Arguments ----------------------------------------------------------------------------------------

    def _arguments(self, op: Op, skipped: frozenset[int]) -> tuple[list[Any], dict[str, Any]]:
        args = [self._real(arg, skipped) for arg in op.args]
        position = OFFSETS.get(op.target)
        if position is not None and len(args) > position and args[position] is not None:
            (looked_at,) = refs(op.args[0])  # the offset is one in a value, and the value may begin elsewhere
            args[position] += args[0].storage_offset() - self.graph.tensors[looked_at].offset
        return args, {name: self._real(arg, skipped) for name, arg in op.kwargs}

    def _real(self, arg: Arg, skipped: frozenset[int]) -> Any:
        if isinstance(arg, Ref):
            return None if self.graph.tensors[arg.tensor].value in skipped else self._get(arg.tensor)
        if isinstance(arg, Symbol):
            return self.device if arg.kind == "device" else constant_of(arg)
        return [self._real(item, skipped) for item in arg] if isinstance(arg, tuple) else arg

    def _note_slots(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Remember where tensors of the batch are passed, so that another batch can take their place."""

        def note(given: Sequence[Arg], real: list[Any]) -> None:
            for index, arg in enumerate(given):
                if isinstance(arg, Ref) and self.graph.tensors[arg.tensor].value not in self.graph.creator:
                    if real[index] is not None:
                        self._slots.setdefault(arg.tensor, []).append((real, index))
                elif isinstance(arg, tuple):
                    note(arg, real[index])

        note(op.args, args)
        for name, arg in op.kwargs:
            if isinstance(arg, tuple):
                note(arg, kwargs[name])

    # What it took -------------------------------------------------------------------------------------

    @property
    def tally(self) -> Tally:
        """What handing out memory took in the last run."""
        return self._source.tally

    @property
    def kept_bytes(self) -> int:
        """What is held between two steps for what the next one makes: the arena, or the pool's blocks."""
        return self._source.kept_bytes

    @property
    def arena_bytes(self) -> int:
        """The size of the arena; none but static memory has one."""
        return 0 if self.layout is None else self.layout.arena_bytes

    def extra_bytes(self) -> int:
        """The most that one op takes beside its place in the arena: workspace, and results to be moved.

        Known after the first run.
        """
        return extra_bytes(self.graph, self.schedule.computed, self._writers)

    def moves(self) -> tuple[Moves, ...]:
        """How the results get where they should be. Known after the first run."""
        return moves(self.graph, self.schedule.computed, self._writers)


class _BoundCall:
    """A call with arguments that may still be replaced."""

    def __init__(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def __call__(self) -> object:
        return self.func(*self.args, **self.kwargs)


def _memory(memory: Memory | str) -> Memory:
    try:
        return Memory(memory)
    except ValueError:
        raise BadRequest(f"there is no memory called '{memory}'. There are: {', '.join(Memory)}.") from None


def _source(memory: Memory, device: torch.device, layout: Layout | None) -> AddressSource:
    if memory is Memory.STATIC:
        assert layout is not None, "static memory has a layout"
        return Static(device, layout)
    kinds: dict[Memory, Callable[[torch.device], AddressSource]] = {
        Memory.NAIVE: Naive,
        Memory.POOL: Pool,
        Memory.DIRECT: Direct,
    }
    return kinds[memory](device)


def _check_steps(schedule: Schedule) -> None:
    for kind in {step.kind for step in schedule if not isinstance(step, Compute | Free)}:
        raise CannotRun(f"the schedule has a step of kind '{kind}', which no executor here can do")


def _check_ops(graph: Graph) -> None:
    for op in graph.ops:
        for symbol in _symbols((op.args, tuple(arg for _, arg in op.kwargs))):
            if symbol.kind == "object":
                raise CannotRun(
                    f"op {op.id} ({op.label}) takes an argument of type {symbol.text}, which is not known"
                )
        if op.target in _NOT_IN_THE_GRAPH:
            raise CannotRun(
                f"op {op.id} ({op.label}) stands for something that is not in the graph. Plan the step "
                "without an optimizer, and make constants buffers of the model."
            )
        if op.target in OFFSETS and not _shows_all(graph, op.args[0]):
            raise CannotRun(
                f"op {op.id} ({op.label}) may look at what lies beside the tensor that it is given. Hand it "
                "a tensor that is no part of a larger one: a clone."
            )


def _shows_all(graph: Graph, arg: Arg) -> bool:
    """Whether a tensor has all the bytes of its value."""
    (number,) = refs(arg)
    tensor = graph.tensors[number]
    whole = math.prod(tensor.shape) * item_bytes(tensor.dtype) == graph.values[tensor.value].bytes
    return whole and is_dense(tensor.shape, tensor.stride)


def _symbols(arg: Arg) -> Iterable[Symbol]:
    if isinstance(arg, Symbol):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _symbols(item)


def _strides(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides that matter: a single element or none has no next one."""
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]
