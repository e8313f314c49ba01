"""What a slot holds: its own ops replayed, as the referee replays a schedule."""

from __future__ import annotations

from lowtide.solvers.ops.search.state import Slots, Work, count_life, end_of, search, serving, spoil


@search.linked
def look_at(work: Work, slots: Slots, op: int, slot: int, stamp: int) -> int:
    """Note that `op` uses what it reads in `slot`; the bytes of what ends there and was made before."""
    held = 0
    for index in range(work.reads_from[op], work.reads_from[op + 1]):
        value = work.reads[index]
        slots.scratch.last_op[value] = op
        if slots.scratch.seen_value[value] != stamp:
            slots.scratch.seen_value[value] = stamp
            made = serving(slots, work.maker[value], slot)
            ends_here = end_of(work, slots, value, made) == slot
            slots.scratch.dies[value] = ends_here
            if ends_here and made < slot:
                held += work.size[value]
    return held


@search.linked
def run_in(work: Work, slots: Slots, op: int, slot: int, stamp: int, held: int) -> int:
    """The bytes held after `op` has run in `slot`, where `held` are the slot's own before."""
    for index in range(work.makes_from[op], work.makes_from[op + 1]):
        value = work.makes[index]
        unused = slots.scratch.seen_value[value] != stamp
        if not (unused and end_of(work, slots, value, slot) == slot):
            held += work.size[value]
    for index in range(work.reads_from[op], work.reads_from[op + 1]):
        value = work.reads[index]
        if slots.scratch.dies[value] and slots.scratch.last_op[value] == op:
            held -= work.size[value]
    return held


@search.linked
def needs(work: Work, op: int) -> int:
    """The bytes that `op` takes when it runs: its results and its workspace."""
    taken = work.workspace[op]
    for index in range(work.makes_from[op], work.makes_from[op + 1]):
        taken += work.size[work.makes[index]]
    return int(taken)


@search.linked
def count_within(work: Work, slots: Slots, slot: int) -> None:
    slots.scratch.stamp[0] += 1
    stamp = slots.scratch.stamp[0]
    held = 0
    node = slots.first[slot]
    while node >= 0:
        held += look_at(work, slots, slots.node_op[node], slot, stamp)
        node = slots.node_next[node]
    held += look_at(work, slots, slot, slot, stamp)
    most = -1
    node = slots.first[slot]
    while True:
        op = slot if node < 0 else slots.node_op[node]
        if held + needs(work, op) > most:
            most = held + needs(work, op)
            slots.peak_op[slot] = op
        slots.spent[0] += 1
        if node < 0:
            break
        held = run_in(work, slots, op, slot, stamp, held)
        node = slots.node_next[node]
    slots.within[slot] = most


@search.compiled
def refresh(work: Work, slots: Slots) -> None:
    """Count again what was spoilt."""
    for index in range(slots.stale_count[0]):
        slot = slots.stale[index]
        slots.is_stale[slot] = 0
        count_within(work, slots, slot)
    slots.stale_count[0] = 0


@search.compiled
def highest(work: Work, slots: Slots) -> int:
    """The most that any slot holds."""
    refresh(work, slots)
    most = 0
    for slot in range(len(slots.first)):
        most = max(most, slots.through[slot] + slots.within[slot])
    return most


@search.compiled
def count_everything(work: Work, slots: Slots) -> None:
    """Count all lives and all slots, of a schedule in which nothing runs again yet."""
    for value in range(len(work.size)):
        if work.size[value] and work.maker[value] >= 0:
            count_life(work, slots, value, work.maker[value], 1)
    for slot in range(len(slots.first)):
        spoil(slots, slot)
    refresh(work, slots)
