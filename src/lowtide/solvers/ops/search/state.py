"""A schedule as slots: what is computed again before which op, and what every slot holds.

    slot        the place of one op of the graph; what runs again there runs before it, in graph order
    again       the slots in which an op runs again
    life        from the slot that makes a value to the last one that uses it before it is made again
    through     the bytes of the lives that pass a slot by, neither beginning nor ending in it
    within      the most that a slot's own ops hold at once beside those

Any set of (op, slot) with the slot after the op is a schedule that can be executed: what does not run again
is held for longer. So an edit is one pair put in or taken out (`toggle`), it is its own inverse, and it
changes nothing but the lives of what that op reads and makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lowtide.solvers.jit import Numbers, Reals, Record, Unit

Pair: TypeAlias = tuple[int, int]  # an op, and a slot that it runs again in

MOST_AGAIN = 24  # runs of one op; nesting recomputation needs the logarithm of the graph's length

search = Unit()


@dataclass(frozen=True, eq=False)
class Work(Record):
    """What is to be scheduled, as numbers. Values that weigh nothing are left out: they are always held.

    The values that op r reads are reads[reads_from[r]] up to, not including, reads[reads_from[r + 1]]; in the
    same way what it makes, and the ops that use a value.
    """

    reads_from: Numbers
    reads: Numbers
    makes_from: Numbers
    makes: Numbers
    uses_from: Numbers
    uses: Numbers
    maker: Numbers
    size: Numbers
    lasting: Numbers  # 1: outlives the step
    workspace: Numbers
    cost: Reals  # of running an op again; never quite nothing, so that less is run for the same time
    repeats: Numbers  # 1: may run again
    section: Numbers
    stretch: Numbers
    dearest: Numbers  # the ops that may run again, the dearest first
    evictable: Numbers  # the values that can be made again, in the order in which they are made


@dataclass(frozen=True, eq=False)
class Journal(Record):
    """What was toggled, so that it can be undone."""

    entries: Numbers  # op, slot, op, slot, …
    count: Numbers  # how many of these numbers are in use


@dataclass(frozen=True, eq=False)
class Scratch(Record):
    """Room to work in. Between two edits nothing here means anything, but for the stamp, which only rises."""

    stamp: Numbers
    seen_value: Numbers  # the stamp of whoever saw it last
    seen_op: Numbers
    last_op: Numbers  # of a slot that uses a value
    dies: Numbers
    begins: Numbers
    ends: Numbers
    stack: Numbers
    closure: Numbers
    over: Numbers
    candidate: Numbers
    candidate_slot: Numbers
    score: Reals


@dataclass(frozen=True, eq=False)
class Slots(Record):
    """What runs again, and what follows from it. Columns of one number are counters."""

    again: Numbers  # a row of MOST_AGAIN for each op, ascending
    times: Numbers
    first: Numbers  # of a slot's linked list of ops, ascending; -1 ends it
    node_op: Numbers
    node_next: Numbers
    spare: Numbers  # nodes that are not in use
    spare_count: Numbers
    extra: Reals  # what running again costs
    through: Numbers
    within: Numbers
    peak_op: Numbers  # the op of the slot at which it holds most
    stale: Numbers  # slots whose `within` is to be counted again
    is_stale: Numbers
    stale_count: Numbers
    estimate: Reals  # what running an op again cost with all that it needed, when that was last tried
    dice: Numbers
    spent: Numbers  # work done so far: ops counted, lives changed, slots passed
    journal: Journal
    scratch: Scratch


# Lives -----------------------------------------------------------------------------------------------


@search.linked
def runs_again(slots: Slots, op: int, slot: int) -> bool:
    row = op * MOST_AGAIN
    for place in range(row, row + slots.times[op]):  # noqa: SIM110 (generators are not compiled)
        if slots.again[place] == slot:
            return True
    return False


@search.linked
def last_made(slots: Slots, op: int, slot: int) -> int:
    """The last slot before `slot` that runs `op`."""
    found = op
    row = op * MOST_AGAIN
    for place in range(row, row + slots.times[op]):
        if slots.again[place] >= slot:
            break
        found = slots.again[place]
    return found


@search.linked
def next_made(slots: Slots, op: int, slot: int) -> int:
    """The first slot after `slot` that runs `op` again; if there is none, the number of slots."""
    row = op * MOST_AGAIN
    for place in range(row, row + slots.times[op]):
        if slots.again[place] > slot:
            return int(slots.again[place])
    return len(slots.first)


@search.linked
def serving(slots: Slots, op: int, slot: int) -> int:
    """The slot that makes what `slot` uses of what `op` makes."""
    return slot if runs_again(slots, op, slot) else last_made(slots, op, slot)


@search.linked
def last_use(work: Work, slots: Slots, value: int, made: int, stop: int) -> int:
    """The last slot before `stop` that uses `value`; `made` if none does after it."""
    found = made
    for index in range(work.uses_from[value], work.uses_from[value + 1]):
        op = work.uses[index]
        if op >= stop:
            break
        found = max(found, op)
        row = op * MOST_AGAIN
        for place in range(row + slots.times[op] - 1, row - 1, -1):
            if slots.again[place] < stop:
                found = max(found, slots.again[place])
                break
    return found


@search.linked
def next_use(work: Work, slots: Slots, value: int, slot: int) -> int:
    """The first slot after `slot` that uses `value`; if there is none, the number of slots."""
    found = len(slots.first)
    for index in range(work.uses_from[value], work.uses_from[value + 1]):
        op = work.uses[index]
        if op >= found:
            break
        if op > slot:
            found = op
            break
        found = min(found, next_made(slots, op, slot))
    return found


@search.linked
def is_used(work: Work, slots: Slots, value: int, made: int, stop: int) -> bool:
    """Whether a slot from `made` up to, not including, `stop` uses `value`."""
    return next_use(work, slots, value, made - 1) < stop


@search.linked
def end_of(work: Work, slots: Slots, value: int, made: int) -> int:
    """The last slot of the life that begins in `made`; the number of slots if it outlives the step."""
    if work.lasting[value]:
        return len(slots.first)
    return last_use(work, slots, value, made, next_made(slots, work.maker[value], made))


# Edits -----------------------------------------------------------------------------------------------


@search.linked
def spoil(slots: Slots, slot: int) -> None:
    """`within` of this slot is to be counted again."""
    if slot < len(slots.first) and not slots.is_stale[slot]:
        slots.is_stale[slot] = 1
        slots.stale[slots.stale_count[0]] = slot
        slots.stale_count[0] += 1


@search.linked
def hold(slots: Slots, begin: int, stop: int, size: int) -> None:
    """`size` more bytes pass by the slots from `begin` up to, not including, `stop`."""
    for slot in range(begin, stop):
        slots.through[slot] += size
    slots.spent[0] += 2
    if stop > begin:
        slots.spent[0] += (stop - begin) // 64


@search.linked
def count_life(work: Work, slots: Slots, value: int, made: int, sign: int) -> None:
    end = end_of(work, slots, value, made)
    hold(slots, made + 1, end, sign * work.size[value])
    spoil(slots, made)
    spoil(slots, end)


@search.linked
def flip(work: Work, slots: Slots, op: int, slot: int) -> None:
    """Put the pair in, or take it out; the lives are not told."""
    row = op * MOST_AGAIN
    stop = row + slots.times[op]
    place = row
    while place < stop and slots.again[place] < slot:
        place += 1
    before = -1
    node = slots.first[slot]
    while node >= 0 and slots.node_op[node] < op:
        before = node
        node = slots.node_next[node]
    if place < stop and slots.again[place] == slot:
        for index in range(place, stop - 1):
            slots.again[index] = slots.again[index + 1]
        slots.times[op] -= 1
        after = slots.node_next[node]
        slots.spare[slots.spare_count[0]] = node
        slots.spare_count[0] += 1
        slots.extra[0] -= work.cost[op]
    else:
        for index in range(stop, place, -1):
            slots.again[index] = slots.again[index - 1]
        slots.again[place] = slot
        slots.times[op] += 1
        slots.spare_count[0] -= 1
        after = slots.spare[slots.spare_count[0]]
        slots.node_op[after] = op
        slots.node_next[after] = node
        slots.extra[0] += work.cost[op]
    if before < 0:
        slots.first[slot] = after
    else:
        slots.node_next[before] = after


@search.linked
def count_lives(work: Work, slots: Slots, op: int, before: int, slot: int, sign: int) -> None:
    """Count the lives of what `op` makes in `before`, and in `slot` if it runs again there."""
    for index in range(work.makes_from[op], work.makes_from[op + 1]):
        count_life(work, slots, work.makes[index], before, sign)
        if runs_again(slots, op, slot):
            count_life(work, slots, work.makes[index], slot, sign)


@search.linked
def toggle(work: Work, slots: Slots, op: int, slot: int) -> None:
    """Run `op` again in `slot`, or no longer if it does; lives and `through` follow, `within` is spoilt."""
    before = last_made(slots, op, slot)
    start = work.reads_from[op]
    for index in range(start, work.reads_from[op + 1]):
        value = work.reads[index]
        slots.scratch.begins[index - start] = serving(slots, work.maker[value], slot)
        slots.scratch.ends[index - start] = end_of(work, slots, value, slots.scratch.begins[index - start])
    count_lives(work, slots, op, before, slot, -1)
    flip(work, slots, op, slot)
    count_lives(work, slots, op, before, slot, 1)
    for index in range(start, work.reads_from[op + 1]):
        value = work.reads[index]
        made = slots.scratch.begins[index - start]
        old = slots.scratch.ends[index - start]
        new = end_of(work, slots, value, made)
        if new != old:
            hold(slots, max(old, made + 1), new, work.size[value])
            hold(slots, max(new, made + 1), old, -work.size[value])
            spoil(slots, made)
            spoil(slots, old)
            spoil(slots, new)
    spoil(slots, slot)
    slots.journal.entries[slots.journal.count[0]] = op
    slots.journal.entries[slots.journal.count[0] + 1] = slot
    slots.journal.count[0] += 2


@search.linked
def undo(work: Work, slots: Slots, mark: int) -> None:
    """Take back what was toggled since the journal had `mark` entries."""
    while slots.journal.count[0] > mark:
        count = slots.journal.count[0] - 2
        toggle(work, slots, slots.journal.entries[count], slots.journal.entries[count + 1])
        slots.journal.count[0] = count


@search.compiled
def toggle_all(work: Work, slots: Slots, codes: Numbers) -> None:
    """Toggle pairs, each given as op · slots + slot, for good."""
    ops = len(slots.first)
    for index in range(len(codes)):
        toggle(work, slots, codes[index] // ops, codes[index] % ops)
        slots.journal.count[0] = 0


@search.compiled
def write_codes(slots: Slots, codes: Numbers) -> None:
    """Write down what runs again, each pair as op · slots + slot."""
    ops = len(slots.first)
    count = 0
    for op in range(ops):
        for place in range(slots.times[op]):
            codes[count] = op * ops + slots.again[op * MOST_AGAIN + place]
            count += 1
