"""What no schedule of a graph can undercut."""

from __future__ import annotations

from itertools import accumulate

from lowtide.ir.graph import Graph, Op
from lowtide.ir.recomputable import repeatable
from lowtide.ir.simulate import allocator_of


def least_peak_bytes(graph: Graph) -> tuple[int, Op | None]:
    """What has to be held at once, whatever is recomputed; and the op that needs it, None if there is none.

    That is what is resident and, while an op runs for the first time, what it reads, makes and takes as
    workspace, the graph's outputs so far, and what cannot be made again and is still to be read. It binds
    every schedule in which ops run for the first time in graph order.
    """
    held = allocator_of(graph.device).held
    needed = needed_bytes(graph)
    resident_bytes = sum(held(graph.counted_bytes(value)) for value in graph.resident)
    largest = max(graph.ops, key=lambda op: needed[op.id], default=None)
    return resident_bytes + (0 if largest is None else needed[largest.id]), largest


def needed_bytes(graph: Graph) -> list[int]:
    """For each op what has to be there while it runs for the first time, beside what is resident."""
    held = allocator_of(graph.device).held
    lasting = _lasting(graph)
    changes = [0] * (len(graph.ops) + 1)
    for value, stop in lasting.items():
        size = held(graph.counted_bytes(value))
        changes[graph.creator[value]] += size
        changes[stop] -= size
    lasting_bytes = list(accumulate(changes))

    def needed(op: Op) -> int:
        passing = {
            value
            for value in (*op.reads, *op.mutates, *op.creates)
            if value in graph.creator and value not in lasting
        }
        touched_bytes = sum(held(graph.counted_bytes(value)) for value in passing)
        return op.workspace_bytes + lasting_bytes[op.id] + touched_bytes

    return [needed(op) for op in graph.ops]


def _lasting(graph: Graph) -> dict[int, int]:
    """What stays until the last op that touches it, and the first op that can do without it."""
    may_repeat = repeatable(graph)
    found: dict[int, int] = {}
    for value, maker in graph.creator.items():
        if value in graph.outputs:
            found[value] = len(graph.ops)
        elif maker not in may_repeat:
            found[value] = graph.readers.get(value, (maker,))[-1] + 1
    return found
