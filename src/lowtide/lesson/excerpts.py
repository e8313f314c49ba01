"""Graphs to look at: a number put on top of what has many, and the first layers of a captured model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

from lowtide.autodiff.reverse import forward_part, gradient
from lowtide.errors import BadRequest
from lowtide.ir.builder import Growing
from lowtide.ir.calls import add, is_float, total
from lowtide.ir.graph import Graph, Op, Phase, Ref, Role

_TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of a forward: its `layers`, calls of leaf modules, out of `of`. `ends` are tensors."""

    graph: Graph
    layers: tuple[str, ...]
    of: int
    ends: tuple[int, ...]


def extended(graph: Graph, outputs: Sequence[int], wrt: Sequence[int | str]) -> Graph:
    """The graph with its gradients by each of `wrt`.

    What is differentiated is the one number in `outputs`, which are tensors, or else the sum of all numbers
    in them, which is appended to the forward and called 'total'.

    Raises:
        NotDifferentiable, BadRequest: see `gradient`.
    """
    grown, number = _summed(graph, outputs)
    return gradient(grown, number, wrt).graph


def differentiable(graph: Graph) -> tuple[str, ...]:
    """The names of what to differentiate by: the parameters in use, or all real numbers that are given."""
    real = {tensor.value for tensor in graph.tensors if is_float(tensor.dtype)}
    given = [graph.values[value] for value in graph.resident if value in graph.readers and value in real]
    trained = [value.name for value in given if value.role is Role.PARAMETER]
    return tuple(trained or [value.name for value in given])


def first_layers(graph: Graph, count: int) -> Excerpt:
    """The forward of a captured step up to where its layer number `count` + 1 begins.

    A layer is a call of a module that has no modules in it. The ends are what the rest of the forward would
    go on with; with all layers it is the loss.

    Raises:
        BadRequest: no op of the forward is in a module, or what there is of it has no real numbers in it.
    """
    begun = _layers(graph)
    if not begun:
        raise BadRequest(f"'{graph.name}' has no layers: none of its ops is in a module. Explain all of it.")
    layers = tuple(f"{module} (call {call + 1})" if call else module for module, call in begun)
    if count >= len(begun):
        whole = forward_part(graph)
        return Excerpt(whole, layers, len(begun), tuple(tensor for _, tensor in whole.results))
    stop = list(begun.values())[count]
    ends = _ends(graph, stop)
    cut = replace(
        graph,
        ops=tuple(op if op.id < stop else replace(op, phase=Phase.BACKWARD) for op in graph.ops),
        outputs=frozenset(),
        results=tuple(ends.items()),  # by which they are found again
    )
    first = forward_part(cut)
    found = tuple(tensor for _, tensor in first.results)
    return Excerpt(replace(first, results=()), layers[:count], len(begun), found)


def _summed(graph: Graph, outputs: Sequence[int]) -> tuple[Graph, int]:
    """The graph with the sum of all numbers in `outputs`, which it has already if that is one number."""
    growing = Growing(graph)
    if len(outputs) == 1 and all(size == 1 for size in graph.tensors[outputs[0]].shape):
        return graph, outputs[0]
    sums = [total(growing, Ref(tensor)) for tensor in outputs]
    found = reduce(lambda a, b: add(growing, a, b), sums)
    growing.rename(found, _TOTAL, Role.INTERMEDIATE)
    value = growing.tensors[found.tensor].value
    return growing.finish([value], {_TOTAL: found.tensor}), found.tensor


def _layers(graph: Graph) -> dict[tuple[str, int], int]:
    """The calls of modules without modules in them, in order, and the op that each begins with."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    modules = {op.module for op in forward}
    above = {name[:place] for name in modules for place, letter in enumerate(name) if letter == "."}
    begun: dict[tuple[str, int], int] = {}
    for op in forward:
        if op.module and op.module not in above and op.creates:
            begun.setdefault((op.module, op.call), op.id)
    return begun


def _ends(graph: Graph, stop: int) -> dict[str, int]:
    """The tensors, by the names of their ops, that the ops of the forward from `stop` on would go on with.

    Those that ops before it have used as well are left out, if there are others.
    """
    before = [op for op in graph.ops[:stop] if op.phase is Phase.FORWARD]
    used = {value for op in before for value in op.reads}
    after = {value for op in graph.ops[stop:] if op.phase is Phase.FORWARD for value in op.reads}
    found = {f"op {op.id}": tensor for op in before for tensor in _going_on(graph, op, after)}
    if not found:
        raise BadRequest(f"'{graph.name}' has no numbers to sum up there. Take more layers.")
    unused = {name: tensor for name, tensor in found.items() if graph.tensors[tensor].value not in used}
    return unused or found


def _going_on(graph: Graph, op: Op, after: set[int]) -> list[int]:
    outputs = [graph.tensors[tensor] for tensor in op.outputs if tensor is not None]
    return [made.id for made in outputs if made.value in after and is_float(made.dtype)][:1]
