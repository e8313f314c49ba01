"""Small steps for tests whose forward has a shape: a diamond, a row, what hypothesis thinks of."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from hypothesis import strategies as st

from lowtide.ir.graph import Graph, Phase, Role
from tests.helpers.handmade import Drawing, graphs

BATCH = 0


def there_and_back(
    reads: Sequence[Sequence[int]],
    sizes: Sequence[int],
    *,
    random: AbstractSet[int] = frozenset(),
    seconds: Sequence[float] | None = None,
) -> Graph:
    """A forward and its backward. Value 0 is the batch, value k is made by op k − 1 from `reads[k - 1]`.

    With n values in the forward, the backward of value k is op 2n − k; it reads what the forward of k
    read and the gradients of all that read k, and creates a gradient as large as k, value 2n + 1 − k.
    The gradients of what reads the batch outlive the step. The batch has 1 byte.
    """
    n = len(reads)
    drawing = Drawing()
    drawing.value("batch", 1, Role.BATCH)
    for k in range(1, n + 1):
        drawing.value(f"x{k}", sizes[k - 1])
    for k in range(n, 0, -1):
        drawing.value(f"g{k}", sizes[k - 1])
    for k in range(1, n + 1):
        cost = seconds[k - 1] if seconds else 1.0
        drawing.op("aten.mm.default", reads[k - 1], [k], random=k in random, seconds=cost)
    for k in range(n, 0, -1):
        arriving = [2 * n + 1 - later for later in range(1, n + 1) if k in reads[later - 1]]
        drawing.op("aten.mm.default", [*arriving, *reads[k - 1]], [2 * n + 1 - k], phase=Phase.BACKWARD)
    return drawing.graph(outputs=[2 * n + 1 - k for k in range(1, n + 1) if BATCH in reads[k - 1]])


def row(sizes: Sequence[int]) -> Graph:
    """Each value is made from the one before."""
    return there_and_back([(k,) for k in range(len(sizes))], sizes)


@st.composite
def shaped(draw: st.DrawFn, max_values: int = 8) -> Graph:
    """A forward of any shape, some of it random, and its backward."""
    n = draw(st.integers(1, max_values))
    reads = [
        sorted(draw(st.sets(st.integers(max(0, k - 4), k - 1), min_size=1, max_size=3)))
        for k in range(1, n + 1)
    ]
    sizes = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    random = draw(st.sets(st.integers(1, n), max_size=1))
    seconds = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=n, max_size=n))
    return there_and_back(reads, sizes, random=random, seconds=seconds)


@st.composite
def strange(draw: st.DrawFn, max_ops: int = 8) -> Graph:
    """Any well-formed graph, mutations and all, cut somewhere into a forward and a backward."""
    graph = draw(graphs(max_ops=max_ops))
    turn = draw(st.integers(0, len(graph.ops)))
    sections = draw(st.lists(st.sampled_from([0, 0, 0, 0, 1, -1]), min_size=turn, max_size=turn))
    ops = (
        replace(op, phase=Phase.FORWARD, section=sections[op.id])
        if op.id < turn
        else replace(op, phase=Phase.BACKWARD)
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))
