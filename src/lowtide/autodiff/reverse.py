"""Reverse-mode differentiation that extends a graph: the backward is more ops, after those of the forward.

For every op between what is differentiated and what it is differentiated by, last op first, a rule from
`lowtide.autodiff.rules` appends what makes the adjoints of its arguments from those of its results. Where a
value has several readers, what arrives from them is summed (`lowtide.autodiff.adjoints`). The result is a
graph like any other, so it can be differentiated again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from lowtide.autodiff.adjoints import Adjoints
from lowtide.autodiff.rules import Site, is_constant, needs, rule_of, slots
from lowtide.errors import BadRequest, NotDifferentiable
from lowtide.ir.builder import Growing, Place
from lowtide.ir.calls import cast, full, is_float, unbroadcast
from lowtide.ir.graph import Arg, Graph, Op, Phase, Ref, Role, Tensor, argument_tensors, refs
from lowtide.ir.names import tensor_called
from lowtide.ir.validate import validate

_SUFFIX = ".grad"


@dataclass(frozen=True, slots=True)
class Extended:
    """A graph with the ops that make gradients, and these gradients as tensors, one for each asked for.

    None is the gradient by something that the output does not depend on, or depends on so that the derivative
    is zero everywhere.
    """

    graph: Graph
    gradients: tuple[int | None, ...]


def gradient(
    graph: Graph, output: int | str, wrt: Sequence[int | str], *, seed: int | str | None = None
) -> Extended:
    """Append to `graph` what computes the gradients of `output` by each of `wrt`.

    Tensors are given by id, or by the name of their value. `output` is one number unless `seed`, a tensor of
    its shape, says what its elements weigh (the gradient of something else by `output`).

    What was in the graph keeps its ids. New ops are of the backward, and belong to the module of the op that
    they differentiate; nothing is computed that the gradients do not need, and of the forward only what the
    rules declare is read. A gradient has the shape of what it is by, and a value of its own, which outlives
    the step, unless two gradients are equal in any case: then they share it. It is called 'NAME.grad', and
    is among the graph's results. Gradients by several looks at one value are by that value.

    Convolutions, normalisation (by batch, layer or group) and fused attention can be differentiated once.
    Everything else can be again: apply `gradient` to a gradient.

    Raises:
        NotDifferentiable: an op in between has no derivative, or a value it needs was overwritten since.
        BadRequest: the output is not a number and there is no seed, or something is asked for that is not
            there.
    """
    growing = Growing(graph)
    target, *sources = (growing.tensors[tensor_called(growing, each).tensor] for each in (output, *wrt))
    for tensor in (target, *sources):
        _check_float(graph, tensor)
    adjoints = Adjoints(growing)
    depending = _depending(graph, {tensor.value for tensor in sources})
    if target.value in depending:
        adjoints.add(Ref(target.id), _seed(growing, target, seed))
    for op in reversed(graph.ops):
        _check_new(graph, op, adjoints)
        if any(value in adjoints for value in op.creates):
            _differentiate(growing, op, adjoints, depending)
    found = [_finished(growing, tensor, target, adjoints) for tensor in sources]
    results: dict[str, int] = {}
    for tensor, adjoint in zip(sources, found, strict=True):
        if adjoint is not None:
            name = _unused(graph.values[tensor.value].name + _SUFFIX, {*dict(graph.results), *results})
            results[name] = adjoint.tensor
            _claim(growing, adjoint, name)
    grown = growing.finish([growing.tensors[tensor].value for tensor in results.values()], results)
    return Extended(grown, tuple(None if adjoint is None else adjoint.tensor for adjoint in found))


def _check_float(graph: Graph, tensor: Tensor) -> None:
    if is_float(tensor.dtype):
        return
    name = graph.values[tensor.value].name
    maker = graph.creator.get(tensor.value)
    if maker is None:
        raise BadRequest(f"'{name}' is of dtype {tensor.dtype}, so there are no gradients by it or of it")
    raise _whole_numbers(graph.ops[maker], tensor.dtype)


def _whole_numbers(op: Op, dtype: str) -> NotDifferentiable:
    reason = f"it makes numbers of dtype {dtype}, which change in jumps or not at all"
    return NotDifferentiable(op.id, op.label, reason, "Differentiate something that is made of real numbers.")


def _depending(graph: Graph, sources: AbstractSet[int], *, through_jumps: bool = False) -> set[int]:
    """The values that change when `sources` do, `sources` included.

    Dependence ends at whole numbers, unless it is also followed `through_jumps`.
    """
    depending = set(sources)
    for op in graph.ops:
        if depending.isdisjoint(op.reads):
            continue
        for position, tensor in enumerate(op.outputs):
            if tensor is None or is_constant(op, position):
                continue
            if through_jumps or is_float(graph.tensors[tensor].dtype):
                depending.add(graph.tensors[tensor].value)
    return depending


def _seed(growing: Growing, target: Tensor, seed: int | str | None) -> Ref:
    name = growing.values[target.value].name
    if seed is not None:
        found = growing.tensors[tensor_called(growing, seed).tensor]
        if (found.shape, found.dtype) != (target.shape, target.dtype):
            raise BadRequest(
                f"the seed is {found.dtype} of shape {found.shape}, but '{name}' is {target.dtype} of shape "
                f"{target.shape}. Give a seed like the output."
            )
        return Ref(found.id)
    if math.prod(target.shape) != 1:
        raise BadRequest(
            f"'{name}' has shape {target.shape}, and only a single number has a gradient by itself. "
            "Sum it up, or give a seed of that shape."
        )
    with growing.at(Place(Phase.BACKWARD)):
        return full(growing, target.shape, 1.0, target.dtype)


def _differentiate(growing: Growing, op: Op, adjoints: Adjoints, depending: AbstractSet[int]) -> None:
    """Append the backward of one op, and hand its gradients on to what it read."""
    tensors = growing.tensors
    wanted = {slot: ref for slot, ref in slots(op) if tensors[ref.tensor].value in depending}
    if not wanted:
        return
    rule = rule_of(op)
    for name, arg in op.kwargs:
        if any(tensors[tensor].value in depending for tensor in refs(arg)):
            reason = f"its derivative by argument '{name}' is not known"
            raise NotDifferentiable(op.id, op.label, reason, "Ask for gradients that do not pass it.")
    _check_untouched(growing.graph, op, needs(op, wanted))
    with growing.at(Place(Phase.BACKWARD, op.module, op.call, op.section)):
        arrived = {
            position: _named(growing, adjoints, Ref(tensor))
            for position, tensor in enumerate(op.outputs)
            if tensor is not None and tensors[tensor].value in adjoints
        }
        if strange := arrived.keys() - set(rule.results):
            reason = f"its derivative for result {min(strange)} is not known"
            raise NotDifferentiable(
                op.id, op.label, reason, "Differentiate something that does not use that."
            )
        for where, made in rule.derive(Site(growing, op, arrived, wanted.keys())):
            argument = wanted[where if isinstance(where, tuple) else (where, 0)]
            fitting = unbroadcast(growing, made, growing.shape(argument))
            adjoints.add(argument, cast(growing, fitting, growing.dtype(argument)))


def _check_new(graph: Graph, op: Op, adjoints: Adjoints) -> None:
    """What later ops read, and was handed a gradient for, must not be what `op` made of an older value."""
    for value in (*op.mutates, *op.updates):
        if value in adjoints:
            reason = f"it overwrites '{graph.values[value].name}'"
            advice = "Capture the step: that makes it free of such ops."
            raise NotDifferentiable(op.id, op.label, reason, advice)


def _check_untouched(graph: Graph, op: Op, needed: Iterable[int]) -> None:
    """The backward of `op` needs these tensors to be what `op` saw."""
    for tensor in needed:
        value = graph.tensors[tensor].value
        for reader in graph.readers.get(value, ()):
            later = graph.ops[reader]
            if reader > op.id and value in (*later.mutates, *later.updates):
                name, where = graph.values[value].name, f"op {reader} ({later.label})"
                reason = f"its backward needs '{name}', which {where} overwrites"
                raise NotDifferentiable(op.id, op.label, reason, "Write to another tensor there.")


def _named(growing: Growing, adjoints: Adjoints, tensor: Ref) -> Ref:
    """The adjoint of what `tensor` shows, called after it unless it is called after something else."""
    adjoint = adjoints.of(tensor)
    value = growing.tensors[adjoint.tensor].value
    if value >= len(growing.graph.values) and not growing.values[value].name.endswith(_SUFFIX):
        growing.rename(adjoint, growing.name(tensor) + _SUFFIX, Role.INTERMEDIATE)
    return adjoint


def _finished(growing: Growing, source: Tensor, target: Tensor, adjoints: Adjoints) -> Ref | None:
    """The gradient by `source`, with a value of its own; None if there is none."""
    if source.value not in adjoints:
        _check_no_jumps(growing.graph, source, target)
        return None
    with growing.at(Place(Phase.BACKWARD, growing.values[source.value].module)):
        adjoint = adjoints.of(Ref(source.id))
        return adjoint if growing.owns(adjoint) else growing.copied(adjoint)


def _claim(growing: Growing, adjoint: Ref, name: str) -> None:
    """Call the value of a gradient by its name, unless it is a seed or was claimed for another gradient."""
    value = growing.values[growing.tensors[adjoint.tensor].value]
    if value.id >= len(growing.graph.values) and value.role is not Role.GRADIENT:
        growing.rename(adjoint, name, Role.GRADIENT)


def _check_no_jumps(graph: Graph, source: Tensor, target: Tensor) -> None:
    """Where there is no gradient for whole numbers in between alone, it is better to say so.

    In a backward it is as it should be: the slope of a function with corners changes in jumps.
    """
    maker = graph.creator.get(target.value)
    smooth = _depending(graph, {source.value})
    if maker is None or graph.ops[maker].phase is Phase.BACKWARD or target.value in smooth:
        return
    for op in graph.ops:
        if smooth.isdisjoint(op.reads):
            continue
        for position, tensor in enumerate(op.outputs):
            jumps = tensor is not None and not is_float(graph.tensors[tensor].dtype)
            if tensor is not None and jumps and not is_constant(op, position):
                reached = _depending(graph, {graph.tensors[tensor].value}, through_jumps=True)
                if target.value in reached:
                    raise _whole_numbers(op, graph.tensors[tensor].dtype)


def _unused(name: str, taken: AbstractSet[str]) -> str:
    """`name`, or with a number behind it if a result is called that already."""
    numbered = (f"{name}.{number}" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)


def forward_part(graph: Graph) -> Graph:
    """The ops of the forward alone, with everything they touch and all parameters and buffers; ids are new.

    What only the rest of the step touches is gone, and so are results that it makes.
    """
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD]
    touched = {value for op in ops for value in (*op.reads, *op.creates, *op.mutates, *op.updates)}
    touched |= {graph.tensors[tensor].value for op in ops for tensor in _tensors(op)}
    kept = [
        value for value in graph.values if value.id in touched or value.role in (Role.PARAMETER, Role.BUFFER)
    ]
    values = {value.id: position for position, value in enumerate(kept)}
    looks = [tensor for tensor in graph.tensors if tensor.value in values]
    tensors = {tensor.id: position for position, tensor in enumerate(looks)}
    return validate(
        replace(
            graph,
            ops=tuple(_renumbered(op, position, values, tensors) for position, op in enumerate(ops)),
            values=tuple(replace(value, id=values[value.id]) for value in kept),
            tensors=tuple(replace(look, id=tensors[look.id], value=values[look.value]) for look in looks),
            outputs=frozenset(values[value] for value in graph.outputs if value in values),
            results=tuple((name, tensors[tensor]) for name, tensor in graph.results if tensor in tensors),
        )
    )


def _tensors(op: Op) -> Iterator[int]:
    yield from argument_tensors(op)
    yield from (tensor for tensor in op.outputs if tensor is not None)


def _renumbered(op: Op, position: int, values: Mapping[int, int], tensors: Mapping[int, int]) -> Op:
    def arg(old: Arg) -> Arg:
        if isinstance(old, Ref):
            return Ref(tensors[old.tensor])
        return tuple(map(arg, old)) if isinstance(old, tuple) else old

    return replace(
        op,
        id=position,
        args=tuple(map(arg, op.args)),
        kwargs=tuple((name, arg(old)) for name, old in op.kwargs),
        outputs=tuple(None if old is None else tensors[old] for old in op.outputs),
        reads=tuple(values[value] for value in op.reads),
        creates=tuple(values[value] for value in op.creates),
        mutates=tuple(values[value] for value in op.mutates),
        updates=tuple(values[value] for value in op.updates),
    )
