"""What captured graphs return to the code that calls them, and until when that code holds it.

A schedule drops a value after the last op that reads it. What a graph returns must be there when its forward
ends, also if nobody reads it then: a block that returns `(x, attention)` to a caller that drops the
attention. And whoever keeps it a while longer, in a variable that is overwritten later, keeps its memory.
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


class Returned:
    """Notes what sections return, and when it is let go of."""

    def __init__(self, builder: GraphBuilder) -> None:
        self._builder = builder
        self._returns: list[_Return] = []

    def note(self, section: int, results: Iterable[object]) -> None:
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

    def held_in(self, graph: Graph) -> Graph:
        """`graph` with ops that hold what was returned and that nothing outside of its section reads."""
        held: dict[tuple[int, int], set[int]] = {}  # (before which op, of which section) -> values
        for made in self._returns:
            if made.let_go is not None and _is_dropped(made, graph):
                section = made.section if made.let_go == made.ended else BETWEEN_GRAPHS
                held.setdefault((made.let_go, section), set()).add(made.value)
        return _with_holding(graph, held) if held else graph


def _is_dropped(made: _Return, graph: Graph) -> bool:
    maker = graph.creator.get(made.value)
    if maker is None or graph.ops[maker].section != made.section or made.value in graph.outputs:
        return False
    return all(graph.ops[reader].section == made.section for reader in graph.readers.get(made.value, ()))


def _with_holding(graph: Graph, held: Mapping[tuple[int, int], set[int]]) -> Graph:
    looks = {tensor.value: tensor.id for tensor in graph.tensors}
    before: dict[int, list[Op]] = {}
    for (place, section), values in held.items():
        holding = between_graphs(HANDED_ON, Phase.FORWARD, {value: looks[value] for value in sorted(values)})
        before.setdefault(place, []).append(replace(holding, section=section))
    ops: list[Op] = []
    for place, op in enumerate((*graph.ops, None)):
        ops += before.get(place, ())
        ops += [] if op is None else [op]
    return replace(graph, ops=_numbered(ops))


def _numbered(ops: Sequence[Op]) -> tuple[Op, ...]:
    return tuple(replace(op, id=number) for number, op in enumerate(ops))
