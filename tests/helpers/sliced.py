"""Single ops as graphs, and graphs with regions in slices, for tests of tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.tensors import tensors_in
from lowtide.execute.executor import Executor
from lowtide.execute.memory import Memory
from lowtide.ir.graph import Graph, Op, Origin, Phase, Role
from lowtide.ir.validate import validate
from lowtide.tiles.axis import axis_of, parts_of
from lowtide.tiles.region import Passage, Region, passage
from lowtide.tiles.rules import Slot, slots
from lowtide.trace.graph_builder import GraphBuilder


def one_op(func: Any, *args: Any, **options: Any) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of one call, and what it is given. Its results are y0, y1, …, and all of them are kept."""
    builder = GraphBuilder("one op", Origin.JOINT, "cpu", {})
    given: dict[str, Tensor] = {}
    for position, tensor in enumerate(tensors_in(args, options)):
        if builder.value_of(tensor) is None:
            builder.add_value(tensor, Role.BATCH, f"x{position}")
            given[f"x{position}"] = tensor
    result = func(*args, **options)
    builder.add_op(func, args, options, result, phase=Phase.FORWARD)
    made = list(tensors_in(result))
    for position, tensor in enumerate(made):
        builder.add_result(f"y{position}", tensor)
    values = [builder.value_of(tensor) for tensor in made]
    graph = validate(builder.finish([value for value in values if value is not None]))
    return graph, given


def region_of(graph: Graph, op: Op, where: Slot | int, dims: Sequence[int]) -> Region | str:
    """One op as a region, along dimensions of one of its tensors."""
    number = dict(slots(op))[where] if isinstance(where, tuple) else op.outputs[where]
    assert number is not None
    found = passage(graph, op, where, tuple((dim, graph.tensors[number].shape[dim]) for dim in dims))
    if isinstance(found, str):
        return found
    places = [place for place in (*found.takes.values(), *found.makes) if place is not None]
    parts = parts_of(places)
    assert parts is not None
    return Region({op.id: found}, dict(_axes(graph, op, found)), parts, ())


def _axes(graph: Graph, op: Op, found: Passage) -> list[tuple[int, Any]]:
    looks = [(tensor, found.takes.get(slot)) for slot, tensor in slots(op)]
    looks += [(made, at) for made, at in zip(op.outputs, found.makes, strict=True) if made is not None]
    return [
        (graph.tensors[tensor].value, axis_of(graph.tensors[tensor], at))
        for tensor, at in looks
        if at is not None
    ]


def results_of(
    graph: Graph, given: Mapping[str, Tensor], memory: Memory | str = Memory.DIRECT
) -> dict[str, Tensor]:
    """What a graph makes of what it is given, by name."""
    executor = Executor(graph, given, memory=memory)
    executor.run()
    return {name: tensor.clone() for name, tensor in executor.results.items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal names, types and shapes; whole numbers are equal, others within rounding."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], equal_nan=True, msg=partial("{}: {}".format, name))
