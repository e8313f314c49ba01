"""Blocks as single ops, for whoever decides what runs when: a block runs as a whole, or not at all.

contracted   the graph with one op in place of each block; its workspace is what the block holds inside
expanded     a schedule of that graph, as one of the graph with blocks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from lowtide.ir.graph import Graph, Op, Ref, Tile, Tiled, argument_tensors
from lowtide.ir.schedule import Compute, Free, Schedule, Step
from lowtide.ir.simulate import allocator_of
from lowtide.ir.walk import walk

TARGET = "lowtide.block.default"
_KNOWN: WeakKeyDictionary[Graph, Contracted] = WeakKeyDictionary()


@dataclass(frozen=True)
class Contracted:
    """A graph in which blocks are ops, and what these stand for."""

    graph: Graph
    insides: tuple[tuple[Step, ...], ...]  # for each op the steps that it stands for

    def origin(self, number: int) -> int:
        """The first op that one of the contracted graph stands for."""
        return next(step.runs for step in self.insides[number] if step.runs is not None)

    def expanded(self, schedule: Schedule) -> Schedule:
        """What a schedule of the contracted graph means for the graph itself."""
        steps: list[Step] = []
        for step in schedule:
            steps.extend([step] if step.runs is None else self.insides[step.runs])
        return Schedule(tuple(steps))


def contracted(graph: Graph) -> Contracted:
    """`graph` with each of its blocks as one op.

    Ops and values that are in no block stay as they are; what is made and used inside of a block alone has
    no bytes any more, and is counted as the block's workspace. It is the same object as long as `graph` is
    there: methods remember what they have found for it.
    """
    if graph.tiled is None:
        return Contracted(graph, tuple((Compute(op.id),) for op in graph.ops))
    found = _KNOWN.get(graph)  # once: a graph is long to hash
    if found is None:
        found = _KNOWN[graph] = _contracted(graph, graph.tiled)
    return found


def _contracted(graph: Graph, tiled: Tiled) -> Contracted:
    starts = {block.first: block for block in tiled.blocks}
    values = list(graph.values)
    ops: list[Op] = []
    insides: list[tuple[Step, ...]] = []
    number = 0
    while number < len(graph.ops):
        block = starts.get(number)
        if block is None:
            op = graph.ops[number]
            ops.append(op if op.id == len(ops) else replace(op, id=len(ops)))
            insides.append((Compute(number),))
            number += 1
            continue
        op, inner = _as_one(graph, block)
        for value in inner:
            values[value] = replace(values[value], bytes=0)
        ops.append(replace(op, id=len(ops)))
        insides.append(tuple(_inside(graph, block, inner)))
        number = block.stop
    return Contracted(replace(graph, ops=tuple(ops), values=tuple(values), tiled=None), tuple(insides))


def _as_one(graph: Graph, block: Tile) -> tuple[Op, frozenset[int]]:
    """A block as one op, and the values that nobody else sees."""
    ops = graph.ops[block.first : block.stop]
    made = [value for op in ops for value in op.creates]
    within = range(block.first, block.stop)
    inner = frozenset(
        value
        for value in made
        if value not in graph.outputs and all(reader in within for reader in graph.readers.get(value, ()))
    )
    looks = {graph.tensors[number].value: number for op in ops for number in op.outputs if number is not None}
    given: dict[int, int] = {}  # value -> a tensor that looks at it
    for op in ops:
        for number in argument_tensors(op):
            given.setdefault(graph.tensors[number].value, number)
    inside = frozenset(made)
    reads = tuple(dict.fromkeys(value for op in ops for value in op.reads if value not in inside))
    left = tuple(value for value in made if value not in inner)
    return (
        Op(
            id=0,
            target=TARGET,
            args=tuple(Ref(given[value]) for value in reads),
            kwargs=(),
            outputs=tuple(looks[value] for value in left),
            reads=reads,
            creates=left,
            phase=ops[0].phase,
            module=ops[0].module,
            call=ops[0].call,
            section=ops[0].section,
            workspace_bytes=_held_inside(graph, block, inner),
            seconds=sum(op.seconds for op in ops),
        ),
        inner,
    )


def _inside(graph: Graph, block: Tile, inner: frozenset[int]) -> Iterator[Step]:
    """The ops of a block in turn; what nobody else sees is freed after its last use."""
    last: dict[int, int] = {}
    for op in graph.ops[block.first : block.stop]:
        last |= {value: op.id for value in (*op.creates, *op.reads, *op.mutates) if value in inner}
    dying: dict[int, list[int]] = {}
    for value, number in last.items():
        dying.setdefault(number, []).append(value)
    for number in range(block.first, block.stop):
        yield Compute(number)
        yield from (Free(value) for value in sorted(dying.get(number, ())))


def _held_inside(graph: Graph, block: Tile, inner: frozenset[int]) -> int:
    """The most that a block holds beside what it is given and what it leaves behind."""
    held = allocator_of(graph.device).held
    live = most = 0
    for event in walk(graph, Schedule(tuple(_inside(graph, block, inner)))):
        live += sum(held(graph.counted_bytes(value)) for value in event.born if value in inner)
        live -= sum(held(graph.counted_bytes(value)) for value in event.died)
        most = max(most, live + (0 if event.op is None else event.op.workspace_bytes))
    return most
