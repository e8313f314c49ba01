"""What DistributedDataParallel holds beside the step of the model that it wraps.

A bucket is a flat buffer for the gradients of some parameters; together they are as large as all
gradients, and they are there all the time. Gradients are copied into them to be reduced, and back. With
`gradient_as_bucket_view` there is no way back: a gradient is a view of its place in a bucket.

With `find_unused_parameters` the user gets copies of the model's outputs, made when its forward is over.

When the second step begins, DDP makes its buckets anew, and the old ones have to go: see
`lowtide.compat.ddp`.

Not counted: buffers that a forward broadcasts, which are flat copies for a moment before anything else is
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide.compat.trees import tree_flatten, tree_unflatten
from lowtide.ir.graph import Graph, Phase, Role, Value
from lowtide.ir.schedule import Free, Schedule, Step
from lowtide.ir.walk import walk
from lowtide.trace.dry_run import Trace

_BUCKETS = "DDP's buckets"


def with_buckets(graph: Graph, model: nn.Module) -> Graph:
    """`graph` with the buckets for the gradients of `model`."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    held = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return _with_values(graph, [Value(0, held, Role.GRADIENT, _BUCKETS, device=graph.device)])


def replicated(trace: Trace, model: nn.Module, *, as_views: bool) -> Trace:
    """`trace` with the buckets; `as_views` if gradients become views of them."""
    if not as_views:
        return replace(trace, graph=with_buckets(trace.graph, model))
    gradients = [
        value
        for value in trace.graph.values
        if value.role is Role.GRADIENT and value.id in trace.graph.creator
    ]
    # A gradient's place in its bucket is there until the gradient is: from then on it is that place. Both
    # at once would be one gradient, for the time of a copy.
    places = [replace(value, name=f"{_BUCKETS}: {value.name}") for value in gradients]
    graph = _with_values(trace.graph, places)
    first = len(trace.graph.values)
    place_of = {gradient.id: first + position for position, gradient in enumerate(gradients)}
    return replace(trace, graph=graph, schedule=_taking_places(trace.graph, trace.schedule, place_of))


@contextmanager
def copying_outputs(model: nn.Module) -> Iterator[None]:
    """While the block runs, `model` gives out copies, as DDP does that finds unused parameters."""
    handle = model.register_forward_hook(lambda _, __, output: _copied(output))
    try:
        yield
    finally:
        handle.remove()


def _copied(output: Any) -> Any:
    given, structure = tree_flatten(output)
    copies = _Copies.apply(*given)  # type: ignore[no-untyped-call]
    returned = [
        copy if isinstance(each, torch.Tensor) and each.grad_fn is not None else each
        for each, copy in zip(given, copies, strict=True)
    ]
    return tree_unflatten(returned, structure)


class _Copies(torch.autograd.Function):
    """Everything copied; where no gradient comes, none goes on."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        return tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return gradients


def _taking_places(graph: Graph, schedule: Schedule, place_of: dict[int, int]) -> Schedule:
    """`schedule` in which a place is given up for the gradient once the backward is done with that."""
    done: dict[int, list[int]] = {}
    for position, _, op, born, _ in walk(graph, schedule):
        if op is not None and op.phase is not Phase.OPTIMIZER:
            for value in {*born, *op.mutates} & place_of.keys():
                done.setdefault(position, []).append(value)
    last = {value: position for position, values in done.items() for value in values}
    steps: list[Step] = []
    for position, step in enumerate(schedule.steps):
        steps.append(step)
        steps += [Free(place_of[value]) for value in done.get(position, ()) if last[value] == position]
    return Schedule(tuple(steps))


def _with_values(graph: Graph, values: Iterable[Value]) -> Graph:
    """`graph` with further values that are there all the time."""
    first = len(graph.values)
    added = [replace(value, id=first + position) for position, value in enumerate(values)]
    return replace(graph, values=(*graph.values, *added))
