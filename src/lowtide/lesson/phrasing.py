"""Ops and tensors as one writes them on a blackboard: 'v2 = add(v1, 3)', '32 × 256'."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from lowtide.ir.graph import Arg, Graph, Op, Phase, Ref, Tensor, argument_tensors

_SCALAR = "number"


def distinctly_named(graph: Graph) -> Graph:
    """The same graph, with no two values of one name: the second relu is called relu_1.

    What an op makes in a module and is only called by its kernel goes by the module instead: 'layer1.conv1',
    in the backward 'layer1.conv1.back'; its further results are numbered, 'bn1:1'. Resident values come
    first: they keep the names by which they are given, as far as those differ.
    """
    taken: set[str] = set()
    numbers: dict[str, Iterator[int]] = {}
    names: dict[int, str] = {}
    made = ((value, _made_name(graph, op, value)) for op in graph.ops for value in op.creates)
    for number, name in (*((value, graph.values[value].name) for value in graph.resident), *made):
        found = name
        while found in taken:
            found = f"{name}_{next(numbers.setdefault(name, itertools.count(1)))}"
        taken.add(found)
        names[number] = found
    return replace(graph, values=tuple(replace(value, name=names[value.id]) for value in graph.values))


def _made_name(graph: Graph, op: Op, value: int) -> str:
    name = graph.values[value].name.lstrip("_") or "value"
    if name != short(op):
        return name
    place = op.creates.index(value)
    base = op.module if op.phase is Phase.FORWARD else f"{op.module}.back"
    return f"{base if op.module else name}{f':{place}' if place else ''}"


def short(op: Op) -> str:
    """The kernel's own name: 'mul', 'softmax', 'convolution_backward'."""
    return op.target.removeprefix("aten.").removeprefix("lowtide.").partition(".")[0].lstrip("_")


def shape_text(shape: Iterable[int]) -> str:
    """'32 × 256', or 'number' where there are no dimensions."""
    return " × ".join(map(str, shape)) or _SCALAR


class ValueLook(NamedTuple):
    """How a value is looked at."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Phrasing:
    """What is written for the ops of one graph. Names alone say which value is meant: give distinct ones."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._looks: dict[int, ValueLook] = {}
        made = (graph.tensors[tensor] for op in graph.ops for tensor in op.outputs if tensor is not None)
        for tensor in made:
            self._looks.setdefault(tensor.value, ValueLook(tensor.shape, tensor.stride))
        for tensor in graph.tensors:
            self._looks.setdefault(tensor.value, _as_it_lies(tensor))

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value, as its op makes it or as it lies in memory."""
        return self._looks[value].shape if value in self._looks else ()

    def equation(self, op: Op) -> str:
        """The op as an equation: 'v2 = add(v1, 3)', or 'bn, … = batch_norm(x)' if it has further results."""
        return f"{self.result(op)} = {self.call(op)}"

    def result(self, op: Op) -> str:
        """The left side of it: what the op makes, or changes."""
        names = [self.graph.values[value].name for value in (*op.creates, *op.mutates)] or ["()"]
        return f"{names[0]}, …" if len(names) > 1 else names[0]

    def call(self, op: Op) -> str:
        """The right side of it: 'add(v1, 3)'. Numbers are left out among options that nobody writes down."""
        tensors = [self._look(self.graph.tensors[tensor]) for tensor in argument_tensors(op)]
        if not tensors:
            return f"{short(op)}({', '.join(f'{arg:g}' for arg in op.args if isinstance(arg, int | float))})"
        plain = all(isinstance(arg, Ref | int | float) and not isinstance(arg, bool) for arg in op.args)
        told = [self._written(arg) for arg in op.args] if plain else tensors
        return f"{short(op)}({', '.join(told)})"

    def _written(self, arg: Arg) -> str:
        return self._look(self.graph.tensors[arg.tensor]) if isinstance(arg, Ref) else f"{arg:g}"

    def _look(self, tensor: Tensor) -> str:
        """A tensor by the name of its value, and how it differs from that."""
        name, whole = self.graph.values[tensor.value].name, self._looks[tensor.value]
        if whole == ValueLook(tensor.shape[::-1], tensor.stride[::-1]) and len(tensor.shape) == 2:
            return name if whole == ValueLook(tensor.shape, tensor.stride) else f"{name}.T"
        return name if tensor.shape == whole.shape else f"{name} as {shape_text(tensor.shape)}"


def _as_it_lies(tensor: Tensor) -> ValueLook:
    """A look at what is given; a matrix that is looked at transposed, as weights often are, as it lies."""
    look = ValueLook(tensor.shape, tensor.stride)
    turned = len(tensor.shape) == 2 and tensor.stride == (1, tensor.shape[0]) and 1 not in tensor.shape
    return ValueLook(look.shape[::-1], look.stride[::-1]) if turned else look
