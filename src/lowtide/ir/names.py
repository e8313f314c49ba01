"""Tensors of a graph by the names that users know them by."""

from __future__ import annotations

from lowtide.errors import BadRequest
from lowtide.ir.builder import Growing
from lowtide.ir.graph import Ref
from lowtide.ir.strides import contiguous, same


def tensor_called(growing: Growing, wanted: int | str) -> Ref:
    """A tensor by its id, by the name of a result, or as the way to look at all of the value of a name.

    If ops look at the value in several ways, it is the row-major one. A matrix that they only look at
    transposed, as a weight often is, is looked at as it lies in memory, and what they only look at repeated,
    without repetition.

    Raises:
        BadRequest: there is no such tensor, or there are several values of that name.
    """
    graph = growing.graph
    if isinstance(wanted, int):
        if not 0 <= wanted < len(graph.tensors):
            raise BadRequest(f"there is no tensor {wanted}: '{graph.name}' has {len(graph.tensors)} tensors")
        return Ref(wanted)
    if wanted in dict(graph.results):
        return Ref(dict(graph.results)[wanted])
    value = _value_called(growing, wanted)
    looks = [_once(growing, Ref(tensor.id)) for tensor in graph.tensors if tensor.value == value]
    whole = [look for look in looks if growing.owns(look)]
    if not whole:
        raise BadRequest(f"no tensor shows all of '{wanted}'. Give the id of a tensor instead.")
    row_major = [look for look in whole if _is_row_major(growing, look)]
    if not row_major and len(growing.shape(whole[0])) == 2:
        return growing.transposed(whole[0])
    return (row_major or whole)[0]


def _once(growing: Growing, look: Ref) -> Ref:
    """A look in which nothing is repeated."""
    repeated = [dim for dim, step in enumerate(growing.tensors[look.tensor].stride) if step == 0]
    for dim in repeated:
        look = growing.sliced(look, dim, 0, 1)
    return look


def _is_row_major(growing: Growing, look: Ref) -> bool:
    tensor = growing.tensors[look.tensor]
    return same(tensor.shape, tensor.stride, contiguous(tensor.shape))


def _value_called(growing: Growing, name: str) -> int:
    """The value of a name; one that is given goes before those that are computed."""
    graph = growing.graph
    named = [value.id for value in graph.values if value.name == name]
    named = [value for value in named if value not in graph.creator] or named
    if len(named) != 1:
        trouble = f"{len(named)} values are" if named else "no value is"
        raise BadRequest(f"{trouble} called '{name}' in '{graph.name}'. Give the id of a tensor instead.")
    return named[0]
