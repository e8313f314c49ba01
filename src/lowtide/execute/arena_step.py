"""A real training step in memory that was planned ahead: forward and backward in one arena.

step = lowtide.in_arena(model, (images,), loss)
loss = step()                    # p.grad of every parameter is there, as after loss.backward()
loss = step(x=more_images)       # another batch, by the names that `step.inputs` lists
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lowtide.aot.capture import CONSTANT, DECIDED, Constants, capture_forward, capture_in_one
from lowtide.arena.layout import Layout
from lowtide.cost.price import with_costs
from lowtide.cost.profile import Progress
from lowtide.errors import BadRequest, CannotRun, LowtideError
from lowtide.execute.apply import set_aside
from lowtide.execute.executor import Executor
from lowtide.execute.identity import fingerprint
from lowtide.execute.memory import Memory
from lowtide.execute.out_of_memory import explained
from lowtide.execute.out_variants import Moves
from lowtide.execute.residents import residents_by_name
from lowtide.ir.assumptions import Guess
from lowtide.ir.graph import Graph, StepName, assigned_name, gradient_name
from lowtide.ir.schedule import Schedule, straight
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.units import format_bytes
from lowtide.trace.inputs import named_inputs
from lowtide.trace.step import Example, Loss, declared


def in_arena(
    model: nn.Module,
    example: Example,
    loss: Loss | None = None,
    *,
    solution: Solution | GraphSolution | None = None,
    memory: Memory | str = Memory.STATIC,
    profile: bool = False,
    progress: Progress | None = None,
) -> ArenaStep:
    """A step of `model` that runs forward and backward in one buffer, allocated here and now.

    With a `solution` (from `lowtide.plan`, without an optimizer) it recomputes as that says. Loss, gradients,
    buffers and random numbers are those of the plain step, bit for bit, where a captured graph's are. The
    model is left as it is: the step reads its parameters where they are and sets their `.grad`, to memory in
    the arena that the next step overwrites.

    Every step is the one that was captured: what Python decides (by attributes, by arguments that are no
    tensors) is decided now. Where that follows from a number that exists only when a step runs, and may be
    another in the next, there is no such step, and none is made.

    With `profile`, the kernels' workspaces are measured first, so that `step.report` counts them. In the
    first step ops are tried beside the arena, one by one, which takes up to twice what one of them makes.

    Raises:
        BadRequest: the model is not on one real device, or the solution is for layers or another model.
        CannotCapture: the model cannot be captured.
        CannotRun: the captured graph has an op that cannot be called on its own, or there is no one graph.
    """
    example, loss = declared(example, loss)
    with set_aside(model):
        graph, schedule, constants = _planned(model, example, loss, solution)
        if profile and graph.profiled_on is None:
            graph = with_costs(graph, progress)
        return ArenaStep(model, graph, schedule, named_inputs(model, example, loss), memory, None, constants)


def _planned(
    model: nn.Module, example: Example, loss: Loss | None, solution: Solution | GraphSolution | None
) -> tuple[Graph, Schedule, Mapping[str, torch.Tensor]]:
    """A graph, a schedule of it, and the tensors that the user's code writes out."""
    if solution is None:
        constants: Constants = {}
        graph = capture_in_one(model, example, loss, constants=constants)
        _refuse_guesses(graph)
        return graph, straight(graph), _named(constants, graph)
    if isinstance(solution, Solution):
        raise _for_layers(solution)
    if solution.fingerprint != fingerprint(model):
        raise BadRequest("the plan was made for another model. Plan it again, for this one.")
    _refuse_guesses(solution.graph)
    return solution.graph, solution.schedule, _written_out(model, example, loss, solution.graph)


def _for_layers(solution: Solution) -> LowtideError:
    if solution.remark:  # nobody asked for layers
        return CannotRun(
            f"an arena runs one graph, and {solution.remark.rstrip('.')}. Without an arena, lowtide.apply "
            "puts this plan to work."
        )
    return BadRequest(
        f"a plan of {solution.method} is for layers, and an arena holds ops. Plan with a budget, by the "
        "method auto."
    )


def _refuse_guesses(graph: Graph) -> None:
    """Raise CannotRun where another step might be another graph."""
    guess = next((found for found in graph.assumptions if isinstance(found, Guess)), None)
    if guess is not None:
        raise CannotRun(
            "an arena runs one graph, and what this step does follows from a number that exists only when it "
            f"runs ({guess}). Choose with torch.where, or decide outside of the model; lowtide.optimize "
            "follows every path."
        )


def _written_out(
    model: nn.Module, example: Example, loss: Loss | None, graph: Graph
) -> Mapping[str, torch.Tensor]:
    """The tensors that the user's code writes out. A plan does not hold them, a capture sees them."""
    names = (graph.values[value].name for value in graph.resident)
    if not any(name.startswith(CONSTANT) for name in names):
        return {}
    constants: Constants = {}
    again = capture_forward(model, example, loss, assumptions=graph.assumptions, constants=constants)
    return _named(constants, again)


def _named(constants: Constants, graph: Graph) -> Mapping[str, torch.Tensor]:
    return {name: constants[value] for name, value in residents_by_name(graph).items() if value in constants}


@dataclass(frozen=True)
class ArenaReport:
    """What the step holds, in bytes, and how results get to their places.

    `resident_bytes` are parameters, buffers and the batch, `arena_bytes` everything that the step makes,
    gradients included, and `extra_bytes` the most that one op takes beside that while it runs: the workspace
    of its kernel, if that was measured, and results that have to be moved. Together they are what is held.
    """

    memory: Memory
    resident_bytes: int
    arena_bytes: int
    lower_bound_bytes: int
    extra_bytes: int
    moves: tuple[Moves, ...]
    profiled: bool

    @property
    def held_bytes(self) -> int:
        """The most that is held at once."""
        return self.resident_bytes + self.arena_bytes + self.extra_bytes

    def __str__(self) -> str:
        extra = "workspace and results to be moved" if self.profiled else "results to be moved; no workspaces"
        ratio = self.arena_bytes / max(1, self.lower_bound_bytes)
        lines = [
            f"{format_bytes(self.held_bytes):>12}  held",
            f"{format_bytes(self.resident_bytes):>12}  resident: parameters, buffers, batch",
            f"{format_bytes(self.arena_bytes):>12}  arena, {ratio:.3f} of the largest live set",
            f"{format_bytes(self.extra_bytes):>12}  beside it: {extra}",
        ]
        for moves in self.moves:
            names = ", ".join(name.removeprefix("aten.").removesuffix(".default") for name in moves.targets)
            how = f"{moves.way} by {moves.computes} ops: {names or '-'}"
            lines.append(f"{format_bytes(moves.bytes):>12}  {how}")
        return "\n".join(lines)


def _dtype_of_loss(graph: Graph) -> torch.dtype:
    name = graph.tensors[dict(graph.results)[StepName.LOSS]].dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _assigned(graph: Graph, model: nn.Module) -> list[str]:
    """The buffers that the step assigns another tensor to: it is copied to where they are."""
    found = []
    results = dict(graph.results)
    for name, buffer in model.named_buffers():
        number = results.get(assigned_name(name))
        if number is None:
            continue
        tensor = graph.tensors[number]
        if (tensor.shape, f"torch.{tensor.dtype}") != (tuple(buffer.shape), str(buffer.dtype)):
            raise BadRequest(
                f"the step makes another tensor of the buffer '{name}': {tensor.dtype} of shape "
                f"{tensor.shape} in place of {buffer.dtype} of shape {tuple(buffer.shape)}. In an arena "
                "every step is the same: give the buffer its final shape and type first."
            )
        found.append(name)
    return found


class ArenaStep:
    """A training step bound to a model and to memory. Calling it runs forward and backward."""

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        schedule: Schedule,
        inputs: Mapping[str, torch.Tensor],
        memory: Memory | str = Memory.STATIC,
        layout: Layout | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.model = model
        known = {graph.values[value].name for value in graph.resident}
        self.inputs = tuple(name for name in inputs if name in known)
        given = {name: inputs[name] for name in self.inputs}
        device = next(iter((*model.parameters(), *inputs.values()))).device
        if device.type == "meta":
            raise BadRequest("the model has no memory: it is on the meta device. Build it on cpu or cuda.")
        if StepName.LOSS not in dict(graph.results):
            raise BadRequest("the model's output is not one number. Give a loss that makes one of it.")
        if StepName.LOSS_GRADIENT in known:
            given[StepName.LOSS_GRADIENT] = torch.ones((), dtype=_dtype_of_loss(graph), device=device)
        self._assigned = _assigned(graph, model)
        self._known = known
        given |= {**self._owned(), **(constants or {})}
        self.executor = Executor(graph, given, schedule=schedule, memory=memory, layout=layout)

    def __call__(self, **batch: torch.Tensor) -> torch.Tensor:
        """Run forward and backward on `batch` (what is not named stays as it was), and return the loss.

        Raises:
            BadRequest: gradients of an earlier step are still there, an input has another shape than it had,
                or has a name that the step does not know, or the path was decided by another batch.
        """
        if batch:
            self._refuse_decided()
        for name in batch:
            if name not in self.inputs:
                raise BadRequest(f"the step is given {', '.join(self.inputs)}; there is no '{name}'")
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise BadRequest(
                "there are gradients already, in memory that this step is about to use. Call "
                "optimizer.zero_grad() first; gradients of several batches cannot be added up in an arena."
            )
        with explained(self.model, None, "a run"):
            self.executor.bind({**self._owned(), **batch})
            self.executor.run()
        results = self.executor.results
        for name, parameter in self.model.named_parameters():
            parameter.grad = results.get(gradient_name(name))
        buffers = dict(self.model.named_buffers())
        assigned = {name: results[assigned_name(name)].clone() for name in self._assigned}
        for name, tensor in assigned.items():
            buffers[name].copy_(tensor)
        return results[StepName.LOSS].clone()

    def _refuse_decided(self) -> None:
        """Raise BadRequest where another batch might be another graph."""
        decided = next((note for note in self.executor.graph.notes if note.startswith(DECIDED)), None)
        if decided is not None:
            raise BadRequest(
                f"an arena runs one graph, and this one was {decided}. Another batch may need another: make "
                "a step for each, or train by lowtide.optimize."
            )

    def record(self) -> None:
        """From now on, replay the step as one CUDA graph. It must have run once; see `Executor.record`."""
        self.executor.record()

    def _owned(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers, where they are now."""
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor for name, tensor in named if name in self._known}

    @property
    def report(self) -> ArenaReport:
        """What is held, and how results are written. Complete once the step has run."""
        executor = self.executor
        layout: Layout | None = executor.layout
        graph = executor.graph
        return ArenaReport(
            memory=executor.memory,
            resident_bytes=executor.timeline.resident_bytes,
            arena_bytes=executor.arena_bytes,
            lower_bound_bytes=0 if layout is None else layout.lower_bound_bytes,
            extra_bytes=executor.extra_bytes(),
            moves=executor.moves(),
            profiled=graph.profiled_on is not None,
        )
