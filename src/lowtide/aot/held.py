"""What captured graphs return, and what runs around them makes: until when it is really held.

A schedule drops a value after the last op that touches it. Around captured graphs, nothing follows a
schedule: what a graph returns must be there when its forward ends, also if nobody reads it then (a block that
returns `(x, attention)` to a caller that drops the attention); a variable that is overwritten later keeps
its tensor till then, also while another graph is given it and has done with it (a mask); and a formula of
autograd, of a loss say, keeps what it makes till it is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowtide.ir.graph import Graph, Op, Phase
from lowtide.ir.recomputable import BETWEEN_GRAPHS, HANDED_ON, between_graphs
from lowtide.trace.graph_builder import GraphBuilder


@dataclass
class _Return:
    """A value that a section returned when so many ops had run, and was let go of after so many."""

    section: int
    value: int
    ended: int
    let_go: int | None = None


class HeldAround:
    """Notes what sections return and when it is let go of, and when values are given back."""

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        self._returns: list[_Return] = []
        self._deaths: dict[int, int] = {}  # value -> how many ops had run

    def returned(self, section: int, results: Iterable[object]) -> None:
        """The forward of `section` ends with these results."""
        now = len(self._builder.ops)
        for result in results:
            value = self._builder.value_of(result) if isinstance(result, torch.Tensor) else None
            if value is not None:
                made = _Return(section, value, now)
                self._returns.append(made)
                weakref.finalize(result, self._let_go, made).atexit = False

    def _let_go(self, made: _Return) -> None:
        made.let_go = len(self._builder.ops)

    def died(self, value: int) -> None:
        """The storage of `value` has just been given back."""
        self._deaths[value] = len(self._builder.ops)

    def in_graph(self, graph: Graph) -> Graph:
        """`graph` with ops that hold what is held around its sections longer than anything touches it."""
        held: dict[tuple[int, int], set[int]] = {}  # (before which op, of which section) -> values
        last = {value: op.id for op in graph.ops for value in (*op.creates, *op.reads, *op.mutates)}
        for made in self._returns:
            if made.let_go is not None and _is_dropped(made, graph):
                section = made.section if made.let_go == made.ended else BETWEEN_GRAPHS
                held.setdefault((made.let_go, section), set()).add(made.value)
            elif made.let_go is not None and _is_kept_by_caller(made.value, made.let_go, last, graph):
                held.setdefault((made.let_go, BETWEEN_GRAPHS), set()).add(made.value)
        for value, died in self._deaths.items():
            if _is_of_another(value, last, graph) and _is_kept_by_caller(value, died, last, graph):
                held.setdefault((died, BETWEEN_GRAPHS), set()).add(value)
        for value, touched in _touched_last_outside(graph).items():
            place = _outside_of_sections(graph, self._deaths.get(value, 0))
            if place > touched + 1:
                held.setdefault((place, BETWEEN_GRAPHS), set()).add(value)
        return _with_holding(graph, held) if held else graph


def _is_kept_by_caller(value: int, let_go: int, last: Mapping[int, int], graph: Graph) -> bool:
    """Whether a section touches a value last that it is given, and is over when that is let go of."""
    touched = last.get(value)
    if touched is None or value not in graph.creator or value in graph.outputs:
        return False
    in_a_section = graph.ops[touched].section != BETWEEN_GRAPHS
    return in_a_section and touched + 1 < let_go == _outside_of_sections(graph, let_go)


def _is_of_another(value: int, last: Mapping[int, int], graph: Graph) -> bool:
    """Whether a gradient is touched last by another part of the step than the one that made it."""
    maker = graph.creator.get(value)
    if maker is None or value not in last:
        return False
    made, touched = graph.ops[maker], graph.ops[last[value]]
    return made.phase is Phase.BACKWARD and made.section != touched.section


def _is_dropped(made: _Return, graph: Graph) -> bool:
    maker = graph.creator.get(made.value)
    if maker is None or graph.ops[maker].section != made.section or made.value in graph.outputs:
        return False
    return all(graph.ops[reader].section == made.section for reader in graph.readers.get(made.value, ()))


def _touched_last_outside(graph: Graph) -> Mapping[int, int]:
    """The values that an op outside of all sections is the last to touch, each with that op."""
    last = {value: op.id for op in graph.ops for value in (*op.creates, *op.reads, *op.mutates)}
    outside = {value: op for value, op in last.items() if graph.ops[op].section == BETWEEN_GRAPHS}
    return {value: op for value, op in outside.items() if value in graph.creator}


def _outside_of_sections(graph: Graph, place: int) -> int:
    """`place`, or where the section that is there began to run: what runs in one is not to be parted."""
    while 0 < place < len(graph.ops):
        before, after = graph.ops[place - 1], graph.ops[place]
        if after.section == BETWEEN_GRAPHS or (before.section, before.phase) != (after.section, after.phase):
            break
        place -= 1
    return place


def _with_holding(graph: Graph, held: Mapping[tuple[int, int], set[int]]) -> Graph:
    looks = {tensor.value: tensor.id for tensor in graph.tensors}
    before: dict[int, list[Op]] = {}
    for (place, section), values in held.items():
        phase = graph.ops[place - 1].phase
        holding = between_graphs(HANDED_ON, phase, {value: looks[value] for value in sorted(values)})
        before.setdefault(place, []).append(replace(holding, section=section))
    ops: list[Op] = []
    for place, op in enumerate((*graph.ops, None)):
        ops += before.get(place, ())
        ops += [] if op is None else [op]
    return replace(graph, ops=_numbered(ops))


def _numbered(ops: Sequence[Op]) -> tuple[Op, ...]:
    return tuple(replace(op, id=number) for number, op in enumerate(ops))
