"""A graph of ops as a graph of the kernels that a compiler makes of them.

A compiler of pointwise code keeps what it computes in registers: of a chain of pointwise ops nothing but the
last result is written, and whoever wants a result in between computes it again from what the chain began
with. So there are values of two kinds:

    written    by a kernel of its own: what products, convolutions and reductions make, what they take, what
               outlives the step, and sums of several tensors that are wanted more than once, or that wait
               while a library's kernels run
    unwritten  every other result of a pointwise op; each kernel that wants it computes it

A kernel is here a written value with all that is computed to write it. What kernels a compiler then runs as
one (two that read the same, say) saves time, and no memory; it is left to the compiler.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from lowtide.fusion.in_place import overwriting
from lowtide.ir.graph import Fused, Graph, Op, Phase, Ref, argument_tensors
from lowtide.ir.recomputable import BETWEEN_GRAPHS
from lowtide.ir.schedule import Compute, Free, Schedule, Step
from lowtide.tiles.blocks import contracted

TARGET = "lowtide.kernel.default"
_PRODUCTS = ("aten.mm.default", "aten.bmm.default")  # made late, with what they are added to, if not told
_MOST_READ = 4  # large tensors that one kernel reads to compute what is not written
_MOST_SHARED = 12  # ops, for about as many elements each, that several kernels compute, each for itself
_MOST_MEMBERS = 48  # ops in one kernel; generated code gets slow to compile beyond


class Treatment(Enum):
    """What a compiler does with an op."""

    POINTWISE = "computed element by element, wherever it is wanted"
    REDUCTION = "a kernel of its own, which computes what it reads on the way"
    WHOLE = "a library's kernel: reads from memory, writes to memory"


def fused(
    graph: Graph,
    kind_of: Callable[[Graph, Op], Treatment],
    apart: frozenset[int] = frozenset(),
    *,
    as_told: bool = True,
) -> Graph:
    """`graph` with one op for each kernel; `Graph.fused` tells what each stands for.

    Blocks of slices are single ops. Costs are parts of those of the ops: a kernel takes as long as its
    members, less what these no longer read and write. Kernels write over what they read last, but for those
    that are named to take new memory, `apart`. A compiler that does more than it is told, not just `as_told`,
    writes what is wanted more than once and takes many ops, or reads many tensors, however small.
    """
    blocks = contracted(graph)
    base = blocks.graph
    kinds = [kind_of(base, op) for op in base.ops]
    chains = _chains(base, kinds, as_told)
    values = list(base.values)
    ops: list[Op] = []
    members: list[tuple[int, ...]] = []
    for op in base.ops:
        if op.id in chains.unwritten:
            values[op.creates[0]] = replace(values[op.creates[0]], bytes=0)
            continue
        chain = chains.leading_to(op)
        ops.append(replace(_kernel(base, chain, chains), id=len(ops)))
        members.append(tuple(member.id for member in chain))
    written = frozenset(
        blocks.origin(op.id)
        for op in base.ops
        if op.creates
        and op.id not in chains.unwritten
        and (kinds[op.id] is Treatment.POINTWISE or op.target in _PRODUCTS)
    )
    before = Fused(graph, tuple(members), written)
    whole = replace(base, ops=tuple(ops), values=tuple(values), tiled=None, fused=before)
    return overwriting(whole, lambda op: kinds[members[op.id][-1]] is not Treatment.WHOLE, apart)


def steps_of_ops(graph: Graph, steps: Iterable[Step]) -> list[Step]:
    """What steps over kernels mean for the ops that these stand for."""
    if graph.fused is None:
        return list(steps)
    plain, members = graph.fused.plain, graph.fused.members
    blocks = contracted(plain)
    found: list[Step] = []
    for step in steps:
        if step.runs is None:
            found.append(step)
            continue
        *chain, last = members[step.runs]
        found += [Compute(number) for number in (*chain, last)]
        found += [Free(value) for number in chain for value in blocks.graph.ops[number].creates]
    return list(blocks.expanded(Schedule(tuple(found))))


def of_ops(graph: Graph) -> Graph:
    """The graph of ops that a graph of kernels was made of; any other graph itself."""
    return graph if graph.fused is None else graph.fused.plain


def last_op(graph: Graph, number: int) -> int:
    """The op of the graph of ops that a kernel ends with; in any other graph the op itself."""
    if graph.fused is None:
        return number
    return contracted(graph.fused.plain).origin(graph.fused.members[number][-1])


@dataclass(frozen=True)
class _Chains:
    """Which ops write nothing, and from which written values their results are computed."""

    graph: Graph
    unwritten: frozenset[int]  # ops
    sources: dict[int, tuple[int, ...]]  # unwritten value -> written values
    inside: dict[int, tuple[int, ...]]  # unwritten value -> the ops that compute it

    def leading_to(self, op: Op) -> list[Op]:
        """The ops of the kernel that ends with `op`."""
        within = {number for value in op.reads for number in self.inside.get(value, ())}
        return [self.graph.ops[number] for number in (*sorted(within), op.id)]

    def read_by(self, op: Op) -> tuple[int, ...]:
        """The written values that the kernel reads which ends with `op`."""
        return tuple(
            dict.fromkeys(source for value in op.reads for source in self.sources.get(value, (value,)))
        )


def _chains(graph: Graph, kinds: list[Treatment], as_told: bool) -> _Chains:
    unwritten: set[int] = set()
    sources: dict[int, tuple[int, ...]] = {}
    inside: dict[int, tuple[int, ...]] = {}
    found = _Chains(graph, frozenset(), sources, inside)
    changed: dict[int, int] = {}  # value -> the first op that changes it
    for op in graph.ops:
        for value in {*op.mutates, *op.updates}:
            changed.setdefault(value, op.id)
    libraries = [op.id for op in graph.ops if kinds[op.id] is Treatment.WHOLE]
    for op in graph.ops:
        if kinds[op.id] is not Treatment.POINTWISE or not _may_stay_unwritten(graph, op, kinds):
            continue
        read, chain = found.read_by(op), found.leading_to(op)
        (value,) = op.creates
        last_reader = graph.readers[value][-1]
        as_it_was = all(last_reader <= changed.get(source, last_reader) for source in read)
        waits = bisect_left(libraries, last_reader) > bisect_right(libraries, op.id)
        adds_up = waits and len(_ended_by(graph, op, read)) > 1
        computed = _at_length(graph, chain, value) if as_told else chain
        by_itself = not as_told and len(read) > _MOST_READ and len(graph.readers[value]) > 1
        kept = adds_up or by_itself or not as_it_was
        if not kept and _pays(graph, value, read, len(computed), len(chain)):
            unwritten.add(op.id)
            sources[value] = read
            inside[value] = tuple(member.id for member in chain)
    return replace(found, unwritten=frozenset(unwritten))


def _may_stay_unwritten(graph: Graph, op: Op, kinds: list[Treatment]) -> bool:
    """Whether nobody needs the op's result in memory."""
    if len(op.creates) != 1 or op.mutates or op.updates or op.random or op.section == BETWEEN_GRAPHS:
        return False
    (value,) = op.creates
    readers = [graph.ops[reader] for reader in graph.readers.get(value, ())]
    return (
        value not in graph.outputs
        and bool(readers)
        and all(
            kinds[reader.id] is not Treatment.WHOLE
            and reader.section == op.section
            and value not in (*reader.mutates, *reader.updates)
            for reader in readers
        )
    )


def _ended_by(graph: Graph, op: Op, read: tuple[int, ...]) -> list[int]:
    """What need not be there any longer, of values as large as the op's result, once that is written."""
    (value,) = op.creates
    return [
        source
        for source in read
        if source in graph.creator
        and graph.readers[source][-1] <= op.id
        and graph.counted_bytes(source) >= graph.counted_bytes(value)
    ]


def _at_length(graph: Graph, chain: list[Op], value: int) -> list[Op]:
    """The ops of a chain that run for about every element of what it makes; others run once for many."""
    least = graph.counted_bytes(value) // 4
    return [op for op in chain if any(graph.counted_bytes(made) > least for made in op.creates)]


def _pays(graph: Graph, value: int, read: tuple[int, ...], computed: int, members: int) -> bool:
    """Whether computing the value wherever it is wanted, in so many ops, is better than writing it once."""
    bytes_ = graph.counted_bytes(value)
    large = [source for source in read if 4 * graph.counted_bytes(source) > bytes_]
    large = [source for source in large if source in graph.creator]
    readers = [graph.ops[reader] for reader in graph.readers.get(value, ())]
    if len(large) > _MOST_READ or len(read) > 3 * _MOST_READ or members > _MOST_MEMBERS:
        return False
    if len(readers) > 1 and (len(large) > 1 or computed > _MOST_SHARED):
        return False
    # A small summary of something large, a mask say, that waits for the backward.
    waits = graph.ops[graph.creator[value]].phase is Phase.FORWARD and any(
        reader.phase is Phase.BACKWARD for reader in readers
    )
    return not waits or not large or 2 * bytes_ > max(graph.counted_bytes(source) for source in large)


def _kernel(graph: Graph, chain: list[Op], chains: _Chains) -> Op:
    """One op for a chain that ends with one that writes."""
    last = chain[-1]
    if len(chain) == 1:
        return last
    read = chains.read_by(last)
    looks = {graph.tensors[number].value: number for op in chain for number in argument_tensors(op)}
    changed = tuple(value for value in (*last.mutates, *last.updates) if value not in last.creates)
    moved = sum(map(graph.counted_bytes, (*read, *last.creates)))
    apart = sum(graph.counted_bytes(value) for op in chain for value in (*op.reads, *op.creates))
    share = max(moved / apart if apart else 0.0, 1 / len(chain))
    return replace(
        last,
        target=TARGET,
        args=tuple(Ref(looks[value]) for value in dict.fromkeys((*read, *changed))),
        kwargs=(),
        reads=read,
        seconds=share * sum(op.seconds for op in chain),
    )
