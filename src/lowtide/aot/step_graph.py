"""The graph of a declared training step: what a model captured op by op does, and what surrounds it.

captured    forward and backward, as they run when a plan is applied; the loss runs eagerly if it is given
tangents    gradients that autograd holds on to while a captured backward runs
accumulate  gradients of earlier micro-batches are there before the forward begins
optimizer   its states are there too, and its temporaries come after the backward
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lowtide.aot.capture import capture_forward
from lowtide.aot.graph_backend import Spares
from lowtide.aot.kernels import Kernels
from lowtide.aot.tangents import with_held_tangents
from lowtide.errors import BadRequest
from lowtide.ir.assumptions import Assumption
from lowtide.ir.graph import OPTIMIZER_STEP, Graph, Phase, Role, Value
from lowtide.ir.recomputable import between_graphs
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.trace.dry_run import Trace
from lowtide.trace.spec import StepSpec


def step_graph(
    spec: StepSpec, plain: Trace, spares: Spares | None = None, expected: Collection[Assumption] = ()
) -> Graph:
    """The graph of one step. `plain` is a dry run of it, from which the optimizer's part is taken.
    The graphs as they are taken apart are left in `spares`. What is `expected` is tried first.

    Raises:
        CannotCapture: the model cannot be captured.
        BadRequest: `accumulate` is not positive, or nothing can be trained.
    """
    check_accumulation(spec.accumulate)
    kernels = Kernels.named(spec.kernels)
    kernels = kernels.in_slices() if spec.tiles else kernels
    kernels.check(plain.graph.device)
    captured = capture_forward(
        spec.model,
        spec.example,
        spec.loss,
        device=spec.device,
        name=spec.name,
        assumptions=plain.graph.assumptions,
        spares=spares,
        expected=expected,
        kernels=kernels,
    )
    graph = with_held_tangents(kernels.with_costs(captured, spec.progress) if spec.profile else captured)
    if spec.accumulate > 1:
        graph = _with_gradients(graph)
    return _with_optimizer(graph, plain)


def check_accumulation(accumulate: int) -> None:
    """Raise BadRequest unless `accumulate` can count backward calls."""
    if accumulate < 1:
        raise BadRequest(f"accumulate is {accumulate}; it counts the backward calls between two updates.")


def _with_gradients(graph: Graph) -> Graph:
    """With gradients of an earlier backward, which the new ones are added to."""
    earlier = [
        replace(value, name=f"{value.name} so far")
        for value in graph.values
        if value.role is Role.GRADIENT and value.id in graph.creator
    ]
    return _with_residents(graph, earlier)


def _with_optimizer(graph: Graph, plain: Trace) -> Graph:
    """With the optimizer's states, and an op at the end that takes as much, and as long, as its step does."""
    states = [
        plain.graph.values[value]
        for value in plain.graph.resident
        if plain.graph.values[value].role is Role.OPTIMIZER_STATE
    ]
    graph = _with_residents(graph, states)
    timeline = plain.timeline
    updating = [
        int(live)
        for live, phase in zip(timeline.live_bytes, timeline.phases, strict=True)
        if phase is Phase.OPTIMIZER
    ]
    if not updating:
        return graph
    held = simulate(graph, straight(graph))
    at_the_end = int(held.live_bytes[-1]) if len(held.live_bytes) else held.resident_bytes
    update = between_graphs(
        OPTIMIZER_STEP,
        Phase.OPTIMIZER,
        module="optimizer",
        workspace_bytes=max(0, max(updating) - at_the_end),
        seconds=sum(op.seconds for op in plain.graph.ops if op.phase is Phase.OPTIMIZER),
    )
    return replace(graph, ops=(*graph.ops, replace(update, id=len(graph.ops))))


def _with_residents(graph: Graph, more: list[Value]) -> Graph:
    added = [replace(value, id=len(graph.values) + position) for position, value in enumerate(more)]
    return replace(graph, values=(*graph.values, *added))
