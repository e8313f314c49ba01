"""Kernels that write over what they read for the last time.

Generated code has no need of new memory for a result that is as large as something which is never read again.
So while such a kernel runs, one of the two does not count. An op says so by a workspace below zero: it takes
less than it reads and makes.

Which values a kernel reads last depends on the schedule. For what the backward reads it hardly does, and only
that is counted on, be it made there or saved by the forward for nobody else; `kept_too_long` tells whether a
schedule holds one of them all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.ir.graph import Graph, Op, Phase, Role, argument_tensors
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import allocator_of
from lowtide.ir.walk import walk


def overwriting(graph: Graph, is_generated: Callable[[Op], bool], but: frozenset[int] = frozenset()) -> Graph:
    """`graph` with ops that write over what they read last, but for these."""
    return replace(graph, ops=tuple(_overwriting(graph, op, is_generated, but) for op in graph.ops))


def kept_too_long(graph: Graph, schedule: Schedule) -> frozenset[int]:
    """The ops that were to write over something that the schedule holds on to."""
    found: set[int] = set()
    gone: set[int] = set()  # what is freed before the next op runs
    for event in reversed(list(walk(graph, schedule))):
        gone.update(event.died)
        op = event.op
        if op is None:
            continue
        large = (value for value in op.reads if _is_as_large(graph, op, value))
        if op.workspace_bytes < 0 and gone.isdisjoint(large):
            found.add(op.id)
        gone = set()
    return frozenset(found)


def _overwriting(graph: Graph, op: Op, is_generated: Callable[[Op], bool], but: frozenset[int]) -> Op:
    if op.id in but or not op.creates or not is_generated(op):
        return op
    if not any(_is_as_large(graph, op, value) and _read_last(graph, value, op) for value in op.reads):
        return op
    held = allocator_of(graph.device).held
    spared = held(max(graph.counted_bytes(value) for value in op.creates))
    return replace(op, workspace_bytes=op.workspace_bytes - spared)


def _is_as_large(graph: Graph, op: Op, value: int) -> bool:
    """Whether a value that an op reads can take the largest of what it makes."""
    largest = max(op.creates, key=graph.counted_bytes)
    made = next(
        graph.tensors[out] for out in op.outputs if out is not None and graph.tensors[out].value == largest
    )
    taken = [graph.tensors[number] for number in argument_tensors(op)]
    return (
        graph.values[value].role is Role.INTERMEDIATE
        and value in graph.creator
        and value not in graph.outputs
        and _is_its_own(graph, op, value)
        and graph.counted_bytes(value) == graph.counted_bytes(largest) > 0
        and any(each.value == value and each.dtype == made.dtype for each in taken)
    )


def _is_its_own(graph: Graph, op: Op, value: int) -> bool:
    """Whether nobody but the captured graph of a backward has what it made, or what its forward has saved."""
    others = (graph.ops[graph.creator[value]], *(graph.ops[reader] for reader in graph.readers[value]))
    return all(other.section == op.section for other in others)


def _read_last(graph: Graph, value: int, op: Op) -> bool:
    """Whether nothing reads `value` after `op`, in the order of the graph."""
    return op.phase is Phase.BACKWARD and graph.readers[value][-1] == op.id
