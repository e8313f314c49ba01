"""One captured graph as a `Graph` of its own, read off its nodes before it ever runs.

A capture of a whole step does not come this way. There the graphs run on fake tensors, and a recorder writes
down what it sees: only running shows which tensor of one graph is which of another, what runs between graphs,
how often each runs, and when each storage dies. Here there is one graph, it has not run yet, and its tensors
are the fakes that AOTAutograd traced it with, in `meta["val"]` of each node. Both tell `GraphBuilder`, which
decides what is an op, a view or a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.aot.halves import Halves, module_stack
from lowtide.compat.tensors import tensors_in
from lowtide.ir.graph import Graph, Origin, Phase, Role
from lowtide.trace.graph_builder import GraphBuilder


@dataclass(frozen=True)
class Drawn:
    """The graph of one captured graph; and for all that comes and goes its value, None for what has none."""

    graph: Graph
    given: tuple[int | None, ...]
    made: tuple[int | None, ...]
    tangents: tuple[int | None, ...]
    gradients: tuple[int | None, ...]


def drawn(halves: Halves, static: frozenset[int]) -> Drawn:
    """What a captured graph does, read off its nodes."""
    assert halves.backward is not None, "only graphs with a backward are cut"
    device = next(
        (str(tensor.device) for node in halves.given for tensor in tensors_in(node.meta.get("val"))), "cpu"
    )
    builder = GraphBuilder("step", Origin.JOINT, device, {})

    def residents(nodes: Sequence[fx.Node], role: Callable[[int], Role]) -> tuple[int | None, ...]:
        found: list[int | None] = []
        for position, node in enumerate(nodes):
            tensor = next(tensors_in(node.meta.get("val")), None)
            if tensor is not None and builder.value_of(tensor) is None:
                builder.add_value(tensor, role(position), node.name)
            found.append(None if tensor is None else builder.value_of(tensor))
        return tuple(found)

    came = residents(halves.given, lambda position: Role.PARAMETER if position in static else Role.BATCH)
    tangents = residents(halves.tangents, lambda _: Role.BATCH)
    residents(halves.constants, lambda _: Role.BATCH)
    in_forward, in_backward = halves.ops
    for phase, nodes in ((Phase.FORWARD, in_forward), (Phase.BACKWARD, in_backward)):
        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
            builder.add_op(node.target, args, kwargs, node.meta.get("val"), phase=phase, module=_module(node))
    made = _values(builder, halves.made)
    gradients = _values(builder, halves.gradients)
    graph = builder.finish(value for value in (*made, *gradients) if value is not None)
    return Drawn(graph, came, made, tangents, gradients)


def _values(builder: GraphBuilder, nodes: Sequence[Any]) -> tuple[int | None, ...]:
    fakes = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]
    return tuple(builder.value_of(fake) if isinstance(fake, torch.Tensor) else None for fake in fakes)


def _module(node: fx.Node) -> str:
    """The path of the innermost module that `node` belongs to, as Dynamo knows it."""
    for path, _ in reversed(list(module_stack(node).values())):
        return str(path).replace("L['self']", "").strip(".")
    return ""
