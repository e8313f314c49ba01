"""A graph as numbers for `slots`, and slots as a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lowtide.ir.graph import Graph
from lowtide.ir.recomputable import repeatable, stretches
from lowtide.ir.schedule import Schedule, in_order
from lowtide.ir.simulate import allocator_of
from lowtide.solvers.jit import Numbers, is_compiling
from lowtide.solvers.ops.search.memory import count_everything, refresh
from lowtide.solvers.ops.search.state import (
    MOST_AGAIN,
    Journal,
    Pair,
    Scratch,
    Slots,
    Work,
    toggle_all,
    write_codes,
)

JOURNAL = 128  # numbers, for each op: room for some dozen moves that change everything


def work_of(graph: Graph) -> Work:
    """`graph` as numbers."""
    held = allocator_of(graph.device).held
    size = [held(graph.counted_bytes(value.id)) for value in graph.values]
    counted = {value for value in graph.creator if size[value]}
    again = repeatable(graph)
    known = costs(graph)
    least = 1e-6 * sum(known) / max(1, len(known)) or 1.0
    cost = [max(seconds, least) for seconds in known]
    reads = [
        [
            value
            for value in dict.fromkeys((*op.reads, *op.mutates))
            if value in counted and value not in op.creates
        ]
        for op in graph.ops
    ]
    makes = [[value for value in op.creates if value in counted] for op in graph.ops]
    uses: list[list[int]] = [[] for _ in graph.values]
    for op in graph.ops:
        for value in reads[op.id]:
            uses[value].append(op.id)
    evictable = [value for op in graph.ops if op.id in again for value in makes[op.id] if uses[value]]
    return Work(
        *_rows(reads),
        *_rows(makes),
        *_rows(uses),
        maker=column([graph.creator.get(value.id, -1) for value in graph.values]),
        size=column(size),
        lasting=column([value.id in graph.outputs for value in graph.values]),
        workspace=column([op.workspace_bytes for op in graph.ops]),
        cost=column(cost, np.float64),
        repeats=column([op.id in again for op in graph.ops]),
        section=column([op.section for op in graph.ops]),
        stretch=column(stretches(graph)),
        dearest=column(sorted(again, key=lambda op: (-cost[op], op))),
        evictable=column(evictable),
    )


def costs(graph: Graph) -> list[float]:
    """What running each op again costs: its seconds; bytes touched where the graph was not profiled."""
    if any(op.seconds for op in graph.ops):
        return [op.seconds for op in graph.ops]
    return [float(sum(graph.counted_bytes(value) for value in (*op.reads, *op.creates))) for op in graph.ops]


def slots_of(work: Work) -> Slots:
    """Every op once: nothing runs again, everything is held until its last use."""
    ops, values = len(work.cost), len(work.size)
    nodes = ops * MOST_AGAIN
    widest = max((work.reads_from[op + 1] - work.reads_from[op] for op in range(ops)), default=0)

    def zeros(count: int) -> Any:
        return np.zeros(count, np.int64) if is_compiling() else [0] * count

    scratch = Scratch(
        stamp=zeros(1),
        seen_value=zeros(values),
        seen_op=zeros(ops),
        last_op=zeros(values),
        dies=zeros(values),
        begins=zeros(int(widest)),
        ends=zeros(int(widest)),
        stack=zeros(nodes),
        closure=np.zeros(ops, np.int64),
        over=zeros(ops + 1),
        candidate=zeros(values),
        candidate_slot=zeros(values),
        score=column([0.0] * values, np.float64),
    )
    slots = Slots(
        again=zeros(nodes),
        times=zeros(ops),
        first=column([-1] * ops),
        node_op=zeros(nodes),
        node_next=zeros(nodes),
        spare=column(range(nodes)),
        spare_count=column([nodes]),
        extra=column([0.0], np.float64),
        through=np.zeros(ops, np.int64),
        within=zeros(ops),
        peak_op=zeros(ops),
        stale=zeros(ops),
        is_stale=zeros(ops),
        stale_count=zeros(1),
        estimate=column(work.cost, np.float64),
        dice=column([1]),
        spent=zeros(1),
        journal=Journal(entries=zeros(JOURNAL * ops), count=zeros(1)),
        scratch=scratch,
    )
    count_everything(work, slots)
    return slots


def codes_in(slots: Slots) -> Numbers:
    """What runs again, each pair (op, slot) as one number, op · slots + slot; ascending."""
    found = np.empty(int(sum(slots.times)), np.int64)
    write_codes(slots, found)
    return found


def pairs_of(codes: Numbers, ops: int) -> list[Pair]:
    """The pairs that these numbers stand for."""
    return [divmod(int(code), ops) for code in codes]


def change_to(work: Work, slots: Slots, codes: Numbers) -> None:
    """Make these pairs what runs again."""
    before = codes_in(slots)
    # What goes first makes room: there is a place for `MOST_AGAIN` runs of an op, and for no more.
    toggle_all(work, slots, np.setdiff1d(before, codes, assume_unique=True))
    toggle_all(work, slots, np.setdiff1d(codes, before, assume_unique=True))
    refresh(work, slots)


def schedule_of(graph: Graph, pairs: Iterable[Pair]) -> Schedule:
    """Every op once in graph order, and before it what runs again there; values die after their last use."""
    again: dict[int, list[int]] = {}
    for op, slot in sorted(pairs):
        again.setdefault(slot, []).append(op)
    order = [op for slot in range(len(graph.ops)) for op in (*again.get(slot, ()), slot)]
    return in_order(graph, order)


def _rows(rows: Sequence[Sequence[int]]) -> tuple[Numbers, Numbers]:
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]) if rows else [0]
    return column(starts), column([number for row in rows for number in row])


def column(numbers: Any, kind: type = np.int64) -> Any:
    """An array for compiled loops; a list for loops in Python, where lists are three times as fast."""
    return (
        np.asarray(numbers, dtype=kind).copy() if is_compiling() else np.asarray(numbers, dtype=kind).tolist()
    )
