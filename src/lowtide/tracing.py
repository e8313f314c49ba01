"""The dry run: a training step on fake tensors, under the real autograd engine.

Nothing is computed and nothing is allocated, but every op is dispatched and every storage is born and
dies exactly as in plain PyTorch, because it is plain PyTorch that runs: forward, loss, backward,
checkpointing, autocast, optimizer. A dispatch mode writes down the ops; weak references tell the deaths.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.accumulation import Accumulation
from lowtide.attribution import Attribution
from lowtide.building import GraphBuilder, map_tensors, storage_key, tensors_in
from lowtide.errors import BadRequest, CannotTrace
from lowtide.faking import Resident, Twins, faked, is_real, stage, unnoticed_by_transformers
from lowtide.graph import Graph, Origin, Phase, Role
from lowtide.rules import cuda_rules
from lowtide.schedule import Compute, Free, Schedule, Step
from lowtide.shadows import Shadows
from lowtide.simulation import Timeline, simulate
from lowtide.userlines import current_line

aten = torch.ops.aten


@dataclass(frozen=True)
class Trace:
    """What a training step does, op by op, and when each of its storages is given back."""

    graph: Graph
    schedule: Schedule

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes at every step, as the referee counts them."""
        return simulate(self.graph, self.schedule)

    @property
    def peak_bytes(self) -> int:
        """The most bytes the step holds at once."""
        return self.timeline.peak_bytes


def dry_run(
    step: Callable[[], object],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device | None = None,
    warmup: int = 0,
    name: str | None = None,
) -> Trace:
    """Trace `step` as plain PyTorch would execute it, without executing it.

    `step` is any callable that trains: it may run several micro-batches, checkpoint, clip, call the
    optimizer. It closes over the real model, batch and optimizer; while it runs they are fakes, and
    afterwards everything is as it was: parameters, `.grad`, buffers, modes, hooks, random streams, also
    if the step raises. Pass every module whose parameters it uses (`model=[student, teacher]`).

    `device` is where the step will run; by default where the model is. Where that is CUDA and this
    machine has none, PyTorch's choices of CUDA kernels are imitated (see `lowtide.rules`).
    `warmup` steps run first and are not recorded: with `warmup=1` gradients and optimizer state that the
    first step creates are there when the recorded step begins.

    The graph has no workspaces and no seconds until it is profiled. Not counted: the random state that
    checkpointing keeps on the CPU (5 kB a segment) and Python scalars (8 bytes each).

    Where the step looks at numbers that do not follow from the batch's own integers (`loss.item()`), the
    dry run has none: it assumes what an undisturbed step would see (losses finite, nothing to skip) and
    says so in `graph.notes`.

    Raises:
        CannotTrace: the shape of a result depends on numbers, or a tensor that requires gradients takes
            part and belongs to no module in `model`.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise BadRequest("dry_run needs at least one model")
    builder, twins = stage(models, device, name or type(models[0]).__name__, Origin.EAGER)
    builder.notes.update(dict.fromkeys(_unfollowed(models)))
    follow = Attribution(models)
    recorder = _Recorder(builder, twins, follow)
    with ExitStack() as stack:
        stack.enter_context(faked(twins, models, optimizer, _stateful_things_used_by(step)))
        stack.enter_context(twins.mode)
        stack.enter_context(unnoticed_by_transformers())
        if builder.relabel:
            stack.enter_context(cuda_rules())
        stack.enter_context(follow.following())
        stack.enter_context(recorder)
        for _ in range(warmup):
            step()
        recorder.begin(optimizer)
        result = step()
        trace = recorder.end(optimizer)
        del result
    return trace


class _Recorder(TorchDispatchMode):
    """Sees every op on its way to the fake kernels, and every storage when it dies."""

    def __init__(self, builder: GraphBuilder, twins: Twins, follow: Attribution) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.builder = builder
        self.twins = twins
        self.follow = follow
        self.accumulation = Accumulation(twins.mode)
        self.shadows = Shadows()
        self.steps: list[Step] = []
        self._recording = False
        self._parameters: list[Resident] = []
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # The window ---------------------------------------------------------------------------------------

    def begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        """What is alive now is resident; what happens from now on is the step."""
        self._register_residents()
        fresh = GraphBuilder(
            self.builder.name, self.builder.origin, self.builder.device, self.builder.relabel
        )
        fresh.notes = self.builder.notes
        for key, reference in list(self._deaths.items()):
            storage = reference()
            value = self.builder.forget(key)
            if storage is not None and value is not None:
                fresh.adopt(storage, self.builder.values[value])
        self.builder = fresh
        self._mark_gradients()
        self._mark_optimizer_state(optimizer)
        self.steps.clear()
        self._recording = True

    def end(self, optimizer: torch.optim.Optimizer | None) -> Trace:
        """The step is over: whatever is alive outlives it."""
        self._recording = False
        self._mark_optimizer_state(optimizer)
        freed = {step.value for step in self.steps if isinstance(step, Free)}
        outputs = {value.id for value in self.builder.values if value.id not in freed}
        return Trace(self.builder.finish(outputs), Schedule(tuple(self.steps)))

    # Ops ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), torch.device):  # may name the home of a tensor that has a twin
            kwargs["device"] = self.twins.device(kwargs["device"])
        if func.namespace in (
            "prim",
            "profiler",
        ):  # questions about a tensor, marks for a profiler: no memory
            return func(*args, **kwargs)
        if func is aten.lift_fresh.default:  # a constant written in the user's code, made on the spot
            return self._record(func, (), {}, func(*args, **kwargs))
        if self.follow.phase() is Phase.BACKWARD and self.accumulation.in_place(func, args, kwargs):
            func = aten.add_.Tensor
        if any(is_real(tensor) for tensor in tensors_in(args, kwargs)):
            args, kwargs = map_tensors(self._twin, (args, kwargs))
        if self.twins.pending:
            self._register_residents()
        return self._record(func, args, kwargs, self._run(func, args, kwargs))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The fake result of an op; where its shape or the answer itself is a matter of numbers, those."""
        numbers = self.shadows.compute(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            return self._guess(func, args) if numbers is None else numbers
        except DynamicOutputShapeException:
            result = self._run_by_numbers(func, args, numbers)
        if numbers is not None:
            self.shadows.pair(result, numbers)
        return result

    def _run_by_numbers(self, func: Any, args: tuple[Any, ...], numbers: Any) -> Any:
        """The fake result of an op whose shape depends on numbers, if those are known."""
        device = next(tensors_in(args)).device

        def empty(real: torch.Tensor) -> torch.Tensor:
            return torch.empty(real.shape, dtype=real.dtype, device=device)

        if numbers is not None:
            return map_tensors(empty, numbers)
        indexing = func is aten.index.Tensor
        positions: list[torch.Tensor | None] = []
        for index in args[1] if indexing else ():
            count = self.shadows.chosen(index) if index is not None else None
            if count is not None:
                positions += [torch.empty(count, dtype=torch.int64, device=device)] * index.dim()
            else:
                positions.append(index)
        if not indexing or any(index is not None and index.dtype is torch.bool for index in positions):
            raise CannotTrace(
                f"the shape of what {func} returns depends on numbers, which a dry run does not have: "
                f"{current_line()}"
            )
        return func(args[0], positions)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
        phase = self.follow.phase()
        module, call = self.follow.place(phase)
        op = self.builder.add_op(func, args, kwargs, result, phase=phase, module=module, call=call)
        if op is not None:
            self.steps.append(Compute(op.id))
            for tensor in tensors_in(result):
                self._watch(tensor)
                self.accumulation.made(storage_key(tensor))
        return result

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake in place of a real tensor that the step closes over: a batch, a constant."""
        if not is_real(tensor):
            return tensor
        if tensor.requires_grad and self.twins.known(tensor) is None:
            raise CannotTrace(
                f"a tensor of shape {tuple(tensor.shape)} that requires gradients takes part in the step "
                f"but belongs to no module that dry_run was given: {current_line()}. "
                "Pass every module that is used: model=[model, other]"
            )
        twin = self.twins.of(tensor, Role.BATCH, f"batch {tuple(tensor.shape)}")
        self.shadows.remember(twin, tensor)
        return twin

    def _guess(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What an undisturbed step would read: losses finite, no overflow, nothing to skip."""
        self.builder.notes[f"a number was read and had to be assumed: {current_line()}"] = None
        if func is aten.equal.default:
            return True
        value = self.builder.value_of(args[0])
        writers = (op for op in reversed(self.builder.ops) if value in (*op.creates, *op.mutates))
        writer = next((op.target.split(".")[1] for op in writers), "")
        if args[0].dtype is torch.bool:
            return writer in ("all", "isfinite", "logical_not")
        finite = 0 if writer.startswith("_amp_") else 1  # a gradient scaler asks whether anything overflowed
        return float(finite) if args[0].dtype.is_floating_point else finite

    # Storages -----------------------------------------------------------------------------------------

    def _register_residents(self) -> None:
        """Values for the twins made since the last look. They were there all along."""
        while self.twins.pending:
            found = self.twins.pending.pop()
            if self.builder.value_of(found.fake) is None:
                self.builder.add_value(found.fake, found.role, found.name, found.module)
                self._watch(found.fake)
            if found.role is Role.PARAMETER:
                self._own(found)

    def _own(self, parameter: Resident) -> None:
        self._parameters.append(parameter)
        self.follow.own({id(parameter.fake): parameter.module})
        if parameter.fake.requires_grad:
            mark = partial(self._mark_gradient, name=parameter.name, module=parameter.module)
            parameter.fake.register_post_accumulate_grad_hook(mark)

    def _watch(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._deaths:
            self._deaths[key] = weakref.ref(tensor.untyped_storage(), partial(self._died, key))

    def _died(self, key: int, _: object) -> None:
        del self._deaths[key]
        value = self.builder.forget(key)
        if value is not None and self._recording:
            self.steps.append(Free(value))

    # Roles --------------------------------------------------------------------------------------------

    def _mark_gradient(self, parameter: torch.Tensor, *, name: str, module: str) -> None:
        self._mark(parameter.grad, Role.GRADIENT, f"{name}.grad", module)

    def _mark_gradients(self) -> None:
        for found in self._parameters:
            self._mark_gradient(found.fake, name=found.name, module=found.module)

    def _mark_optimizer_state(self, optimizer: torch.optim.Optimizer | None) -> None:
        names = {id(found.fake): found for found in self._parameters}
        for parameter, state in optimizer.state.items() if optimizer is not None else ():
            owner = names.get(id(parameter))
            for key, thing in state.items():
                label = f"{owner.name}.{key}" if owner else key
                self._mark(thing, Role.OPTIMIZER_STATE, label, owner.module if owner else "")

    def _mark(self, thing: object, role: Role, name: str, module: str) -> None:
        value = self.builder.value_of(thing) if isinstance(thing, torch.Tensor) else None
        if value is not None and self.builder.values[value].role in (Role.INTERMEDIATE, role):
            self.builder.set_role(value, role, name, module)


def _unfollowed(models: Sequence[nn.Module]) -> Iterator[str]:
    """What the step may do that a dry run does not see, in words."""
    hooked = sum(
        bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)
        for model in models
        for parameter in model.parameters()
    )
    if hooked:
        yield f"the hooks on {hooked} parameters are not followed: they belong to the real ones"


def _stateful_things_used_by(step: Callable[[], object]) -> list[object]:
    """Gradient scalers and schedulers that the step closes over: they keep tensors and counters."""
    kinds = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
    function = inspect.unwrap(step.func if isinstance(step, partial) else step)
    if not inspect.isfunction(function):
        return []
    used = inspect.getclosurevars(function)
    return [
        thing
        for scope in (used.nonlocals, used.globals)
        for thing in scope.values()
        if isinstance(thing, kinds)
    ]
