"""Graphs of parts of a step, joined into the graph of the whole.

Forwards come in the order of the parts, backwards in the opposite one. A value that one part makes and
another is given is one value, as far as `links` say so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from lowtide.ir.graph import Arg, Graph, Op, Phase, Ref, Tensor, Value
from lowtide.ir.recomputable import HANDED_ON, between_graphs
from lowtide.ir.validate import validate

Place = tuple[int, int]  # part, value in it


def joined(
    parts: Sequence[Graph], links: Mapping[Place, Place], passing: Collection[Place] = frozenset()
) -> Graph:
    """One graph of all `parts`, each of which becomes a section.

    `links` maps what a part is given, a resident value of its graph, to what it is elsewhere: a value of
    an earlier forward, of a later part's backward, or something resident that several parts are given.
    What any part leaves behind outlives the step, except what is `passing`: that goes after its last use, but
    not before the forwards are over, whose caller may hold it, or the backward that makes it.
    """
    values: list[Value] = []
    tensors: list[Tensor] = []
    number: dict[Place, int] = {}
    for part, graph in enumerate(parts):
        for value in graph.values:
            if (part, value.id) not in links:
                number[part, value.id] = len(values)
                values.append(replace(value, id=len(values)))
    for given in links:
        number[given] = number[_origin(given, links)]
    offsets: list[int] = []
    for part, graph in enumerate(parts):
        offsets.append(len(tensors))
        for tensor in graph.tensors:
            found = number[part, tensor.value]
            tensors.append(replace(tensor, id=len(tensors), value=found))
    in_forward = [(part, op) for part, graph in enumerate(parts) for op in graph.ops if _is_forward(op)]
    ops = [_renumbered(op, part, offsets[part], number) for part, op in in_forward]
    made = {number[part, value] for part, op in in_forward for value in op.creates}
    handed_on = {number[place] for place in passing}
    ops += _holding(handed_on & made, tensors, Phase.FORWARD)
    for part, graph in reversed(list(enumerate(parts))):
        in_backward = [op for op in graph.ops if not _is_forward(op)]
        ops += [_renumbered(op, part, offsets[part], number) for op in in_backward]
        made = {number[part, value] for op in in_backward for value in op.creates}
        ops += _holding(handed_on & made, tensors, Phase.BACKWARD)
    return validate(
        replace(
            parts[0],
            ops=tuple(replace(op, id=position) for position, op in enumerate(ops)),
            values=tuple(values),
            tensors=tuple(tensors),
            outputs=frozenset(
                number[part, value] for part, graph in enumerate(parts) for value in graph.outputs
            )
            - handed_on,
            results=tuple(
                (name, tensor + offsets[part])
                for part, graph in enumerate(parts)
                for name, tensor in graph.results
            ),
            notes=tuple(dict.fromkeys(note for graph in parts for note in graph.notes)),
        )
    )


def _origin(place: Place, links: Mapping[Place, Place]) -> Place:
    while place in links:
        place = links[place]
    return place


def _is_forward(op: Op) -> bool:
    return op.phase is Phase.FORWARD


def _holding(values: Collection[int], tensors: Iterable[Tensor], phase: Phase) -> list[Op]:
    """An op that needs `values` and does nothing; none if there are none."""
    looks = {tensor.value: tensor.id for tensor in tensors if tensor.value in values}
    return [between_graphs(HANDED_ON, phase, looks)] if looks else []


def _renumbered(op: Op, part: int, offset: int, number: Mapping[Place, int]) -> Op:
    def arg(given: Arg) -> Arg:
        if isinstance(given, Ref):
            return Ref(given.tensor + offset)
        return tuple(map(arg, given)) if isinstance(given, tuple) else given

    def these(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(number[part, value] for value in values))

    return replace(
        op,
        section=part,
        args=tuple(map(arg, op.args)),
        kwargs=tuple((name, arg(given)) for name, given in op.kwargs),
        outputs=tuple(None if output is None else output + offset for output in op.outputs),
        reads=these(op.reads),
        creates=these(op.creates),
        mutates=these(op.mutates),
        updates=these(op.updates),
    )
