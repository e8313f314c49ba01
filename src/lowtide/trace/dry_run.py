"""The dry run: a training step on fake tensors, under the real autograd engine.

Nothing is computed and nothing is allocated, but every op is dispatched and every storage is born and
dies exactly as in plain PyTorch, because it is plain PyTorch that runs: forward, loss, backward,
checkpointing, autocast, optimizer. A dispatch mode writes down the ops; weak references tell the deaths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowtide.compat.autograd import told_of_functions
from lowtide.compat.cudnn_rnn import recurrent_layers_by_cudnn
from lowtide.compat.fake_kernels import as_kernels_do
from lowtide.compat.garbage import collecting_seldom
from lowtide.compat.patches import patched
from lowtide.compat.tensors import has_hooks
from lowtide.compat.views import views_as_they_run
from lowtide.cost.cuda_rules import cuda_rules
from lowtide.errors import BadRequest, CannotTrace
from lowtide.ir.graph import Call, Graph, Op, Origin, Phase, Role
from lowtide.ir.schedule import Compute, Free, Schedule, Step
from lowtide.ir.simulate import Timeline, simulate
from lowtide.ir.strides import viewed
from lowtide.trace.attribution import Attribution, Place
from lowtide.trace.fakes import Resident, faked, stage
from lowtide.trace.graph_builder import GraphBuilder
from lowtide.trace.guesses import Guesses
from lowtide.trace.hf_masks import Positions, unnoticed_by_transformers
from lowtide.trace.outside_numbers import outside_numbers
from lowtide.trace.recorder import Recorder, Spot
from lowtide.trace.replayed_views import ReplayedViews
from lowtide.trace.user_lines import current_line

aten = torch.ops.aten


@dataclass(frozen=True)
class Trace:
    """What a training step does, op by op, and when each of its storages is given back.

    `calls` are the calls of modules in the forward, in the order in which they ended; `closed` those among
    them at which a stretch of the forward cannot begin or end (see `Attribution`); `forward_ops` tells for an
    op of the backward which op of the forward it belongs to, where that is known.
    """

    graph: Graph
    schedule: Schedule
    calls: tuple[Call, ...] = ()
    forward_ops: Mapping[int, int] = field(default_factory=dict)
    closed: frozenset[Place] = frozenset()

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
    machine has none, PyTorch's choices of CUDA kernels are imitated (see `lowtide.cost.cuda_rules`).
    `warmup` steps run first and are not recorded: with `warmup=1` gradients and optimizer state that the
    first step creates are there when the recorded step begins.

    The graph has no workspaces and no seconds until it is profiled. Not counted: Python scalars (8 bytes
    each).

    Where the step looks at numbers that do not follow from the batch's own integers (`loss.item()`), the
    dry run has none: it assumes what an undisturbed step would see (losses finite, nothing to skip, no layer
    dropped), and where the size of a result depends on such numbers that it is as large as it can be (a mask
    chooses everything). It says so in `graph.notes` and, with the number, in `graph.assumptions`.

    Raises:
        CannotTrace: nothing bounds the size of a result, or a tensor that requires gradients takes part and
            belongs to no module in `model`.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise BadRequest("dry_run needs at least one model")
    return StepRecorder(models, device, name).run(step, optimizer, warmup)


class StepRecorder(Recorder):
    """Writes down one step among several, with the order of computes and frees."""

    def __init__(
        self, models: Sequence[nn.Module], device: str | torch.device | None = None, name: str | None = None
    ) -> None:
        super().__init__(*stage(models, device, name or type(models[0]).__name__, Origin.EAGER))
        self.builder.notes.update(dict.fromkeys(_unfollowed(models)))
        self._models = models
        self.follow = Attribution(models, lambda: len(self.builder.ops))
        self.steps: list[Step] = []
        self.forward_ops: dict[int, int] = {}
        self.positions = Positions(lambda: self.builder)
        self._views = ReplayedViews()
        self.guesses = Guesses(lambda: self.builder, self.shadows, self.sizes)
        self._recording = False
        self._parameters: list[Resident] = []
        self._hooks: list[RemovableHandle] = []

    def run(
        self,
        step: Callable[[], object],
        optimizer: torch.optim.Optimizer | None = None,
        warmup: int = 0,
    ) -> Trace:
        """What `step` does, once it has run `warmup` times; see `dry_run`. A recorder runs once."""
        models, self._models = self._models, ()  # a recorder refers to itself: it must not hold the model
        with ExitStack() as stack:
            stack.callback(self._unhook)
            stack.enter_context(collecting_seldom())
            stack.enter_context(faked(self.twins, models, optimizer, _stateful_things_used_by(step)))
            stack.enter_context(self.twins.mode)
            stack.enter_context(unnoticed_by_transformers())
            stack.enter_context(as_kernels_do())
            stack.enter_context(self.guesses.told_of())
            stack.enter_context(outside_numbers(self.guesses))
            stack.enter_context(views_as_they_run(viewed))
            stack.enter_context(self.positions.watched())
            if self.builder.device.startswith("cuda"):
                stack.enter_context(recurrent_layers_by_cudnn())
            if self.builder.relabel:
                stack.enter_context(cuda_rules())
            elif self.builder.device == "cpu":
                stack.enter_context(_random_states_counted())
            stack.enter_context(self.follow.following(models))
            stack.enter_context(told_of_functions(self.follow.function_runs))
            stack.enter_context(self)
            for _ in range(warmup):
                step()
            self._begin(optimizer)
            result = step()
            trace = self._end(optimizer)
            del result
        return trace

    # The window ---------------------------------------------------------------------------------------

    def _begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        """What is alive now is resident; what happens from now on is the step."""
        self.register_residents()
        fresh = GraphBuilder(
            self.builder.name, self.builder.origin, self.builder.device, self.builder.relabel
        )
        fresh.notes = self.builder.notes
        for storage, value in self.alive():
            fresh.adopt(storage, self.builder.values[value])
        self.builder = fresh
        self._mark_gradients()
        self._mark_optimizer_state(optimizer)
        self.steps.clear()
        self.forward_ops.clear()
        self.follow.begin()
        self._recording = True

    def _end(self, optimizer: torch.optim.Optimizer | None) -> Trace:
        """The step is over: whatever is alive outlives it."""
        self._recording = False
        self._mark_optimizer_state(optimizer)
        outputs = [value for _, value in self.alive()]
        graph, schedule = self.builder.finish(outputs), Schedule(tuple(self.steps))
        graph = replace(graph, assumptions=(*self.positions.assumptions, *self.guesses.made))
        calls, closed = tuple(self.follow.calls), frozenset(self.follow.closed)
        return Trace(graph, schedule, calls, dict(self.forward_ops), closed)

    # Ops ----------------------------------------------------------------------------------------------

    def spot(self, func: Any, args: tuple[Any, ...]) -> Spot:
        phase = self.follow.phase()
        return Spot(phase, *self.follow.place(phase), section=0, engine=phase is Phase.BACKWARD)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, spot: Spot
    ) -> Any:
        result = super()._record(func, args, kwargs, result, spot)
        if spot.phase is Phase.BACKWARD:
            return self._views.backward(func, args, result, partial(self._run_besides, spot))
        self._views.forward(func, args, result)
        return result

    def _run_besides(self, spot: Spot, func: Any, *args: Any) -> Any:
        """An op that the step does, and its dry run does not."""
        return super()._record(func, args, {}, self._run(func, args, {}), spot)

    def recorded(self, op: Op, spot: Spot) -> None:
        self.steps.append(Compute(op.id))
        if spot.phase is Phase.FORWARD:
            self.follow.op_runs()
        if spot.phase is Phase.BACKWARD and (source := self.follow.forward_op()) is not None:
            self.forward_ops[op.id] = source

    def died(self, value: int) -> None:
        if self._recording:
            self.steps.append(Free(value))

    def unknown_number(self, func: Any, args: tuple[Any, ...]) -> Any:
        return self.guesses.number(func, args)

    def unknown_size(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.guesses.size(func, args, kwargs)

    def parts(self, whole: torch.Tensor, sizes: list[int], dim: int = 0) -> list[int]:
        return self.guesses.parts(whole.shape[dim], sizes)

    # Tensors that were there before -------------------------------------------------------------------

    def twin(self, tensor: torch.Tensor, detached: bool) -> torch.Tensor:
        if tensor.requires_grad and not detached and self.twins.known(tensor) is None:
            raise CannotTrace(
                f"a tensor of shape {tuple(tensor.shape)} that requires gradients takes part in the step "
                f"but belongs to no module that dry_run was given: {current_line()}. "
                "Pass every module that is used: model=[model, other]"
            )
        twin = self.twins.of(tensor, Role.BATCH, f"batch {tuple(tensor.shape)}")
        self.shadows.remember_given(twin, tensor)
        return twin

    def resident(self, found: Resident) -> None:
        self.add_resident(found)
        if found.role is Role.PARAMETER:
            self._parameters.append(found)
            self.follow.own({id(found.fake): found.module})
            if found.fake.requires_grad:
                mark = partial(self._mark_gradient, name=found.name, module=found.module)
                self._hooks.append(found.fake.register_post_accumulate_grad_hook(mark))

    def _unhook(self) -> None:
        """Autograd holds hooks where no collection looks: the circle of hooks and recorder is cut by hand."""
        for hook in self._hooks:
            hook.remove()

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


@contextmanager
def _random_states_counted() -> Iterator[None]:
    """Random states that are kept, as checkpointing keeps one a segment, as values of the graph.

    A generator makes its state where no dispatch mode can see it, so a fake of the same size is made, to
    live as long as the state does.
    """
    real = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = real()
        state.counted = torch.empty(state.shape, dtype=torch.uint8)  # type: ignore[attr-defined]
        return state

    with patched(torch, "get_rng_state", get_rng_state, why="states are counted", since="torch 2.11"):
        yield


def _unfollowed(models: Sequence[nn.Module]) -> Iterator[str]:
    """What the step may do that a dry run does not see, in words."""
    hooked = sum(has_hooks(parameter) for model in models for parameter in model.parameters())
    if hooked:
        yield f"the hooks on {hooked} parameters are not followed: they belong to the real ones"


def _stateful_things_used_by(step: Callable[[], object]) -> list[object]:
    """Gradient scalers and schedulers that the step closes over: they keep tensors and counters."""
    kinds = (torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)
    function = inspect.unwrap(step.func if isinstance(step, partial) else step)
    if inspect.ismethod(function):
        return [thing for thing in vars(function.__self__).values() if isinstance(thing, kinds)]
    if not inspect.isfunction(function):
        return []
    used = inspect.getclosurevars(function)
    return [
        thing
        for scope in (used.nonlocals, used.globals)
        for thing in scope.values()
        if isinstance(thing, kinds)
    ]
