"""The capture: forward and backward of a model as graphs that may be rearranged.

Dynamo and AOTAutograd turn the step into graphs. These are not compiled but run, on fake tensors and op by
op, by the real autograd engine; a dispatch mode writes down what runs. So what flows from one graph into
the next, in either direction, is known by its storage, and what runs between graphs is seen as well.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.aot.between import nodes_between
from lowtide.aot.casts import CAST_PER_GRAPH
from lowtide.aot.graph_backend import Spares
from lowtide.aot.held import HeldAround
from lowtide.aot.kernels import Kernels
from lowtide.aot.sections import OUTSIDE, Eagerly, Modules, Sections
from lowtide.compat.cudnn_rnn import recurrent_layers_by_cudnn
from lowtide.compat.dispatch import without_modes
from lowtide.compat.dynamo import frames_compiled, uncompiled
from lowtide.compat.garbage import collecting_seldom
from lowtide.compat.patches import patched
from lowtide.compat.tensors import tensors_in
from lowtide.cost.cuda_rules import cuda_rules
from lowtide.errors import BadRequest, CannotApply, CannotCapture, LowtideError
from lowtide.ir.assumptions import Assumption, GradientLayouts, Guess, NodesBetween, OfOneGraph
from lowtide.ir.graph import Graph, Op, Origin, Phase, Role, StepName, assigned_name, gradient_name
from lowtide.trace.fakes import Resident, Twins, faked, stage
from lowtide.trace.graph_builder import GraphBuilder
from lowtide.trace.guesses import Guesses
from lowtide.trace.inputs import criteria, over, replaced
from lowtide.trace.losses import tensors_of
from lowtide.trace.outside_numbers import outside_draws
from lowtide.trace.recorder import Recorder, Spot
from lowtide.trace.step import NOTHING_TO_TRAIN, Example, Loss, carried_loss, declared
from lowtide.trace.user_lines import current_line, line_read

aten = torch.ops.aten
_WRITES = (aten.copy_.default, aten.add_.Tensor)  # how captured graphs update buffers
_MOST_FINDINGS = 3  # captures after the first: how one graph's gradients lie depends on the graphs after it
DECIDED = "decided by the numbers in the example"  # a note on a graph of which that is true
CONSTANT = "constant"  # how a tensor is called that is neither the model's nor given to the step
Constants = dict[int, torch.Tensor]  # tensors that the user's code writes out, by their values in a graph
_Run = Callable[[Any, nn.Module, Loss | None, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]


def capture(
    model: nn.Module,
    example: Example,
    loss: Loss | None = None,
    *,
    target: Any = None,
    device: str | torch.device | None = None,
    name: str | None = None,
) -> Graph:
    """Capture the forward and backward of `model` as one graph, without computing anything.

    `example` is a tuple of arguments, a dict of keyword arguments or a single tensor. `loss` makes one
    number of the model's output, and of the `target` (see `lowtide.fit`). Without it the output must be that
    number, or carry it as `.loss`, as `["loss"]` or as its first element; failing that, the gradients of the
    outputs are taken to be given, and are resident. Neither `.grad` nor the optimizer plays a part: the graph
    is of a first step.

    The straight schedule of the graph holds what running the captured graphs holds that keep everything,
    except for workspaces, which a profile adds. (Before torch 2.13 the engine also holds what enters the
    backward of a section until that is over.)

    Where Dynamo breaks the step into several graphs, ops say in `section` which one is theirs. What runs
    between them is written down too, with section -1: it is part of the step but cannot be rearranged.
    `graph.notes` name the user's lines where that happens.

    Where the path taken depends on whole numbers of a real example (lengths, masks, labels), it is the path
    for this example, and the notes say so. Where it depends on a condition that is met or not when the step
    runs, it is that of an undisturbed step (see `lowtide.dry_run`), and `graph.assumptions` say so. On other
    numbers it cannot depend.

    Model and example may be real, or on the meta device; they are left as they were, also after an error.
    What others have compiled with torch.compile stays compiled.

    Raises:
        CannotCapture: the path taken depends on numbers that are not known, or the model, Dynamo or
            AOTAutograd fails; the message names the user's line.
        BadRequest: nothing in the output depends on a parameter that requires gradients.
    """
    example, loss = declared(example, loss, target)
    return capture_in_one(model, example, loss, device, name)


def capture_in_one(
    model: nn.Module,
    example: Example,
    loss: Loss | None,
    device: str | torch.device | None = None,
    name: str | None = None,
    constants: Constants | None = None,
) -> Graph:
    """`capture` of a step that is declared. What the user's code writes out, `torch.tensor([1.5])`, is
    resident in the graph, and left in `constants`."""
    graph = _capture(model, example, loss, device, name, _step_in_one, constants=constants)
    return replace(
        graph, assumptions=tuple(each for each in graph.assumptions if isinstance(each, Guess))
    )  # other findings are for another capture to assume


def capture_forward(
    model: nn.Module,
    example: Example,
    loss: Loss | None = None,
    *,
    device: str | torch.device | None = None,
    name: str | None = None,
    assumptions: Collection[Assumption] = (),
    spares: Spares | None = None,
    expected: Collection[Assumption] = (),
    constants: Constants | None = None,
    kernels: Kernels = Kernels.EAGER,
) -> Graph:
    """Like `capture`, with nothing but the model's forward handed to Dynamo, as when a plan is applied.

    What the model's own hooks do, and the loss, runs eagerly, and is written down as such. `assumptions`
    are those of a dry run of the same step. The graphs as they are taken apart are left in `spares`,
    and what is written out in `constants`.

    Which outputs get no gradient, how the gradients of the others lie in memory, and which inputs several
    graphs use, is found out by capturing the step, which is then captured anew. What was found for other
    inputs is `expected`: that saves the first time, where it is so.
    """
    taken = tuple(dict.fromkeys((*assumptions, *(each for each in expected if isinstance(each, OfOneGraph)))))
    captured = partial(
        _capture,
        model,
        example,
        loss,
        device,
        name,
        _step_around_forward,
        constants=constants,
        kernels=kernels,
    )
    try:
        graph = captured(taken, spares)
    except CannotApply:  # a gradient reached such an output
        if not expected:
            raise
        taken = tuple(assumptions)
        graph = captured(taken, spares)
    for _ in range(_MOST_FINDINGS):
        found = [each for each in graph.assumptions if isinstance(each, OfOneGraph) and each not in taken]
        if not found:
            break
        beside = (each for each in graph.assumptions if not isinstance(each, NodesBetween))
        taken = tuple(dict.fromkeys((*_without_other_layouts(taken, found), *beside)))
        graph = captured(taken, spares)
    others = (found for found in graph.assumptions if not isinstance(found, OfOneGraph))
    return replace(graph, assumptions=tuple(dict.fromkeys((*taken, *others))))


def _without_other_layouts(taken: Sequence[Assumption], found: Sequence[Assumption]) -> Iterator[Assumption]:
    """What was taken to be so, but for layouts of gradients that were found to be others."""
    graphs = {each.graph for each in found if isinstance(each, GradientLayouts)}
    return (each for each in taken if not (isinstance(each, GradientLayouts) and each.graph in graphs))


def _capture(
    model: nn.Module,
    example: Example,
    loss: Loss | None,
    device: str | torch.device | None,
    name: str | None,
    run: _Run,
    assumptions: Collection[Assumption] = (),
    spares: Spares | None = None,
    constants: Constants | None = None,
    kernels: Kernels = Kernels.EAGER,
) -> Graph:
    model = uncompiled(model)
    with without_modes(), torch.inference_mode(False), torch.enable_grad(), collecting_seldom():
        builder, twins = stage([model], device, name or type(model).__name__, Origin.JOINT)
        recorder = _GraphRecorder(builder, twins, model, assumptions, kernels)
        with (
            recorder.sections.captured() as backend,
            faked(twins, [model, *criteria(loss, model)], None),
            over(recorder.batch, loss) as loss_of_fakes,
            recurrent_layers_by_cudnn() if builder.device.startswith("cuda") else nullcontext(),
            cuda_rules() if builder.relabel else nullcontext(),
            outside_draws(recorder.guesses),
        ):
            args, kwargs = replaced(recorder.batch, model, example)
            with twins.mode, recorder:
                graph = _recorded(recorder, partial(run, backend), model, loss_of_fakes, args, kwargs)
            if constants is not None:
                constants.clear()
                constants.update(recorder.constants())
        if spares is not None:
            spares.hold(recorder.sections.taken_apart())
    return graph


def _recorded(
    recorder: _GraphRecorder,
    run: Callable[[nn.Module, Loss | None, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]],
    model: nn.Module,
    loss: Loss | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Graph:
    """Run the step and return its graph. The output is referenced to the end, as in a training loop."""
    with _explained():
        output, kept = run(model, loss, args, kwargs)
    recorder.sections.entries.used_outside(tensors_of(kept))
    between = nodes_between(output if kept is None else kept)
    roots = _roots(output, loss)
    tangents = recorder.tangents(roots)
    with _explained():
        torch.autograd.backward(roots, tangents)
    graph = recorder.finish(roots)
    del kept
    if not recorder.guesses.made:
        return graph
    return replace(graph, assumptions=(*graph.assumptions, between))


def _step_in_one(
    backend: Any, model: nn.Module, loss: Loss | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Forward and loss, compiled together: what they return, and what a training loop would hold on to."""
    output = torch.compile(_captured_step, backend=backend, dynamic=False)(model, loss, args, kwargs)
    return output, None


def _step_around_forward(
    backend: Any, model: nn.Module, loss: Loss | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """The forward compiled, the loss not; the model's output is held on to beside the loss."""
    forward = torch.compile(type(model).forward, backend=backend, dynamic=False)
    own = model.__dict__.get("forward")
    if own is not None:
        forward = torch.compile(own, backend=backend, dynamic=False)
    compiled = forward if own is not None else partial(forward, model)
    before = frames_compiled()
    with patched(model, "forward", compiled, why="it is captured, and its hooks are not", since="torch 2.11"):
        output = model(*args, **kwargs)
    if frames_compiled() - before > 1:
        gc.collect()  # where a graph ends, Dynamo leaves frames in circles, which hold what is dead otherwise
    return (output, None) if loss is None else (loss(output), output)


def _captured_step(model: nn.Module, loss: Loss | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    output = model(*args, **kwargs)
    return output if loss is None else loss(output)


class _GraphRecorder(Recorder):
    """Writes down what the captured graphs do, and what runs between them."""

    supports_higher_order_operators = True

    def __init__(
        self,
        builder: GraphBuilder,
        twins: Twins,
        model: nn.Module,
        assumptions: Collection[Assumption],
        kernels: Kernels = Kernels.EAGER,
    ) -> None:
        super().__init__(builder, twins)
        modules = Modules(model)
        self._held = HeldAround(builder)
        self.sections = Sections(modules, assumptions, self._is_zero, self._held.returned, kernels)
        self._eagerly = Eagerly(model, modules)
        self.guesses = Guesses(lambda: self.builder, self.shadows, self.sizes)
        self._leaves: list[Resident] = []  # what may get a gradient
        # A recorder is in a circle with itself, and would keep the model until garbage is collected.
        self._model = weakref.ref(model)
        self._buffers = {name: weakref.ref(buffer) for name, buffer in model.named_buffers()}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo steps aside for other modes than those of PyTorch's own machinery."""
        return True

    # Ops ----------------------------------------------------------------------------------------------

    def spot(self, func: Any, args: tuple[Any, ...]) -> Spot:
        spot = self.sections.here or self._outside(func, args)
        owner = self._owner_of_buffer(func, args)
        return replace(spot, module=owner) if owner else spot

    def _outside(self, func: Any, args: tuple[Any, ...]) -> Spot:
        phase = self._eagerly.phase()
        if phase is Phase.FORWARD and not func.is_view:
            self.sections.entries.used_outside(tensors_in(args))
        return Spot(phase, *self._eagerly.place(phase), OUTSIDE, engine=phase is Phase.BACKWARD)

    def _owner_of_buffer(self, func: Any, args: tuple[Any, ...]) -> str:
        """The module whose buffer an op overwrites: AOTAutograd moves such updates to the end."""
        value = self.builder.value_of(args[0]) if func in _WRITES else None
        found = None if value is None else self.builder.values[value]
        return found.module if found is not None and found.role is Role.BUFFER else ""

    def died(self, value: int) -> None:
        self._held.died(value)

    def recorded(self, op: Op, spot: Spot) -> None:
        if spot.section == OUTSIDE and spot.phase is Phase.FORWARD:
            self.sections.notes[f"not captured, runs eagerly: {current_line()}"] = None

    def unknown_size(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        raise CannotCapture(
            f"the step depends on a number that only exists when it runs: {current_line()}. "
            "Choose with torch.where, or decide outside of the model. "
            "lowtide.dry_run can follow steps that cannot be captured."
        )

    def unknown_number(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Which of two ways a step goes is guessed. Of any other number there would be a graph for each."""
        if func is aten.equal.default or args[0].dtype is torch.bool:
            return self.guesses.number(func, args)
        return self.unknown_size(func, args, {})

    def decided(self, numbers: Any) -> Any:
        self.sections.notes[f"{DECIDED}: {current_line()}"] = None
        return numbers

    def _is_zero(self, tensor: torch.Tensor) -> bool:
        """Whether autograd made a tensor in place of a gradient that there is none of."""
        value = self.builder.value_of(tensor)
        maker = next((op for op in reversed(self.builder.ops) if value in op.creates), None)
        return maker is not None and maker.section == OUTSIDE and maker.target.startswith("aten.zeros")

    # Tensors that were there before -------------------------------------------------------------------

    def twin(self, tensor: torch.Tensor, detached: bool) -> torch.Tensor:
        if tensor.requires_grad and not detached and self.twins.known(tensor) is None:
            raise CannotCapture(
                f"a tensor of shape {tuple(tensor.shape)} that requires gradients takes part in the step but "
                "belongs neither to the model nor to the loss. Make it a parameter of the model."
            )
        twin = self.twins.of(tensor, Role.BATCH, f"{CONSTANT} {tuple(tensor.shape)}")
        self.shadows.remember_given(twin, tensor)
        return twin

    def batch(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A fake in place of a tensor that the step is given."""
        twin = self.twins.of(tensor, Role.BATCH, name)
        self.shadows.remember_given(twin, tensor)
        return twin.requires_grad_(tensor.requires_grad)

    def tangents(self, roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of `roots`, which are there before the step begins."""
        found = []
        for position, root in enumerate(roots):
            with without_modes(), self.twins.mode:
                found.append(torch.empty_like(root, requires_grad=False))
            name = StepName.LOSS_GRADIENT.value if root.numel() == 1 else f"gradient of output {position}"
            self.add_resident(Resident(found[-1], Role.BATCH, name, ""))
        return found

    def resident(self, found: Resident) -> None:
        if found.role is Role.GRADIENT:  # of an earlier step
            return
        found.fake.grad = None
        self.add_resident(found)
        if found.fake.requires_grad:
            self._leaves.append(found)
            self._eagerly.own({id(found.fake): found.module})

    def constants(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What the user's code writes out, by its values."""
        for real in self.sections.constants:
            twin = self.twins.known(real)
            value = None if twin is None else self.builder.value_of(twin)
            if value is not None:
                yield value, real

    # The graph ----------------------------------------------------------------------------------------

    def finish(self, roots: Sequence[torch.Tensor]) -> Graph:
        """The graph of the step, which has just ended: whatever is alive now outlives it."""
        self.sections.note_breaks()
        if not self.sections.count:
            why = "; ".join(self.sections.notes) or "is it disabled (TORCH_COMPILE_DISABLE)?"
            raise CannotCapture(f"Dynamo captured nothing: {why}")
        for position, root in enumerate(roots):
            name = StepName.LOSS.value if root.numel() == 1 else f"output {position}"
            self.builder.add_result(name, root)
        for leaf in self._leaves:
            if leaf.fake.grad is not None:
                self.builder.add_result(gradient_name(leaf.name), leaf.fake.grad)
            gradient = None if leaf.fake.grad is None else self.builder.value_of(leaf.fake.grad)
            if gradient is not None and self.builder.values[gradient].role is Role.INTERMEDIATE:
                self.builder.set_role(gradient, Role.GRADIENT, gradient_name(leaf.name), leaf.module)
        self._add_assigned_buffers()
        self._note_casts()
        self.builder.notes.update(self.sections.notes)
        graph = self._held.in_graph(self.builder.finish(value for _, value in self.alive()))
        # On another path an output that got no gradient on this one may get one.
        gradientless: tuple[Assumption, ...] = self.guesses.made or tuple(self.sections.found_gradientless())
        found = (*gradientless, *self.sections.found_layouts(), *self.sections.entries.found())
        _refuse_recurrent_layers_of_cudnn(graph)
        return replace(graph, assumptions=found)

    def _note_casts(self) -> None:
        """Say which weights several graphs cast."""
        values = (self.builder.value_of(weight) for weight in self.sections.casts.found())
        names = dict.fromkeys(self.builder.values[value].name for value in values if value is not None)
        if names:
            self.sections.notes[
                f"{CAST_PER_GRAPH}: the gradient of {', '.join(names)} is rounded otherwise"
            ] = None

    def _add_assigned_buffers(self) -> None:
        """What the step leaves in place of a buffer, where that is another tensor, is a result of it."""
        model = self._model()
        assert model is not None, "it is captured"
        for name, now in model.named_buffers():
            before = self._buffers[name]() if name in self._buffers else None
            assigned = before is not None and now is not self.twins.known(before)
            if assigned and self.builder.value_of(now) is not None:
                self.builder.add_result(assigned_name(name), now)


# Outputs ----------------------------------------------------------------------------------------------


def _roots(output: Any, loss: Loss | None) -> list[torch.Tensor]:
    """Where the backward begins: at the loss if there is one, else at everything differentiable."""
    if loss is not None and not (isinstance(output, torch.Tensor) and output.numel() == 1):
        raise BadRequest(f"the loss must return a tensor of one number, not {_brief(output)}")
    number = carried_loss(output)
    roots = tensors_of(output) if number is None else [number]
    roots = [tensor for tensor in roots if tensor.requires_grad]
    if not roots:
        raise BadRequest(f"the {'output' if loss is None else 'loss'} {NOTHING_TO_TRAIN}")
    return roots


def _brief(thing: Any) -> str:
    return f"one of shape {tuple(thing.shape)}" if isinstance(thing, torch.Tensor) else type(thing).__name__


def _refuse_recurrent_layers_of_cudnn(graph: Graph) -> None:
    """They are looked for in one storage with all their weights, which AOTAutograd's fakes do not have."""
    for op in graph.ops:
        if op.target.startswith("aten._cudnn_rnn"):
            raise CannotCapture(
                f"{op.module or 'the model'} is a recurrent layer of cuDNN, which cannot be captured. "
                "Plan by layers (method='rotor'), or switch cuDNN off around it "
                "(torch.backends.cudnn.flags(enabled=False))."
            )


# Errors -----------------------------------------------------------------------------------------------


@contextmanager
def _explained() -> Iterator[None]:
    """Whatever goes wrong while the model runs becomes an error that names the user's line."""
    try:
        yield
    except LowtideError:
        raise
    except Exception as error:  # the model and the loss are the user's code and may raise anything
        raise CannotCapture(f"the step fails at {line_read(error)}: {_message(error)}") from error


def _message(error: BaseException) -> str:
    """What went wrong, without Dynamo's advice around it."""
    text = str(error)
    original = re.search(r"""got (\w+)\((['"])(.+?)\2\)""", text)
    if original is not None:
        return f"{original[1]}: {original[3]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    explanation = [line for line in lines if line.startswith("Explanation: ")]
    return " ".join([f"{type(error).__name__}:", *lines[:1], *explanation[:1]])
