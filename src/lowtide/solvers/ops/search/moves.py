"""Moves over slots: give a value up and make it again, take that back, run it elsewhere.

All of them keep to what may run again where: an op only in slots of its own section. None looks further
than itself; `repairing` puts them together.
"""

from __future__ import annotations

from lowtide.solvers.jit import Numbers
from lowtide.solvers.ops.search.memory import refresh
from lowtide.solvers.ops.search.state import (
    MOST_AGAIN,
    Slots,
    Work,
    end_of,
    is_used,
    last_made,
    last_use,
    next_made,
    next_use,
    runs_again,
    search,
    serving,
    toggle,
    undo,
)


@search.linked
def may_run(work: Work, slots: Slots, op: int, slot: int) -> bool:
    """Whether `op` may run again in `slot`, does not yet, and there is room to write it down."""
    return (
        work.repeats[op] != 0
        and op < slot
        and work.section[op] == work.section[slot]
        and slots.times[op] < MOST_AGAIN
        and not runs_again(slots, op, slot)
    )


@search.linked
def fits(slots: Slots, begin: int, stop: int, size: int, budget: int) -> bool:
    """Whether `size` more bytes fit into the slots from `begin` up to, not including, `stop`."""
    slots.spent[0] += 1
    for slot in range(begin, stop):
        if slots.through[slot] + slots.within[slot] + size > budget:
            slots.spent[0] += (slot - begin) // 64
            return False
    slots.spent[0] += max(0, stop - begin) // 64
    return True


@search.linked
def excess(work: Work, slots: Slots, budget: int) -> tuple[int, int]:
    """The bytes over budget, summed over the slots, and the slot that holds most."""
    refresh(work, slots)
    total, most, worst = 0, 0, 0
    for slot in range(len(slots.first)):
        held = slots.through[slot] + slots.within[slot]
        if held > budget:
            total += held - budget
        if held > most:
            most, worst = held, slot
    slots.spent[0] += 1 + len(slots.first) // 64
    return total, worst


# Making again ----------------------------------------------------------------------------------------


@search.linked
def closure_of(work: Work, slots: Slots, op: int, slot: int, budget: int) -> int:
    """Collect in `slots.scratch.closure` what has to run in `slot` so that `op` can; returns how many.

    What is alive there is used as it is, what can be held until then within the budget is held.
    """
    slots.scratch.stamp[0] += 1
    stamp = slots.scratch.stamp[0]
    slots.scratch.stack[0] = op
    slots.scratch.seen_op[op] = stamp
    depth, count = 1, 0
    while depth:
        depth -= 1
        running = slots.scratch.stack[depth]
        slots.scratch.closure[count] = running
        count += 1
        for index in range(work.reads_from[running], work.reads_from[running + 1]):
            value = work.reads[index]
            maker = work.maker[value]
            if slots.scratch.seen_op[maker] == stamp or not may_run(work, slots, maker, slot):
                continue
            end = end_of(work, slots, value, last_made(slots, maker, slot))
            if end < slot and not fits(slots, end, slot, work.size[value], budget):
                slots.scratch.seen_op[maker] = stamp
                slots.scratch.stack[depth] = maker
                depth += 1
    return count


@search.linked
def run_again(work: Work, slots: Slots, op: int, slot: int, budget: int, merge: bool) -> None:
    """Run `op` in `slot`, and what it needs; an earlier run that nobody uses any more is dropped.

    What was to run again in a later slot anyway is held until then instead: always with `merge`, else if it
    fits into the budget.
    """
    count = closure_of(work, slots, op, slot, budget)
    for index in range(count - 1, -1, -1):
        toggle(work, slots, slots.scratch.closure[index], slot)
    for index in range(count):
        running = slots.scratch.closure[index]
        before = last_made(slots, running, slot)
        if before != running and is_idle(work, slots, running, before):
            drop(work, slots, running, before)
        later = next_made(slots, running, slot)
        if later < len(slots.first) and runs_again(slots, running, slot):
            if merge:
                drop(work, slots, running, later)
            else:
                hold_until(work, slots, running, slot, later, budget)


@search.linked
def hold_until(work: Work, slots: Slots, op: int, slot: int, later: int, budget: int) -> None:
    """Hold until `later` what `op` makes in `slot`, not to run it again there, if the budget allows."""
    size, end = 0, later
    for index in range(work.makes_from[op], work.makes_from[op + 1]):
        size += work.size[work.makes[index]]
        end = min(end, last_use(work, slots, work.makes[index], slot, later))
    if not fits(slots, end + 1, later, size, budget):
        return
    refresh(work, slots)
    most = max(budget, slots.through[end] + slots.within[end])
    mark = slots.journal.count[0]
    drop(work, slots, op, later)
    refresh(work, slots)
    if slots.through[end] + slots.within[end] > most:
        undo(work, slots, mark)


@search.compiled
def forget(work: Work, slots: Slots, kept: Numbers, turn: int) -> None:
    """Hold nothing from before slot `turn` to after it but what is `kept`; the latest is given up first."""
    for index in range(len(work.evictable) - 1, -1, -1):
        value = work.evictable[index]
        maker = work.maker[value]
        target = next_use(work, slots, value, turn - 1)
        if (
            not kept[value]
            and maker < turn
            and target < len(slots.first)
            and may_run(work, slots, maker, target)
        ):
            slots.journal.count[0] = 0
            run_again(work, slots, maker, target, 0, True)
    slots.journal.count[0] = 0
    refresh(work, slots)


# Holding again ---------------------------------------------------------------------------------------


@search.linked
def is_idle(work: Work, slots: Slots, op: int, made: int) -> bool:
    """Whether nobody uses what `op` makes in slot `made`."""
    stop = next_made(slots, op, made)
    for index in range(work.makes_from[op], work.makes_from[op + 1]):
        if is_used(work, slots, work.makes[index], made, stop):
            return False
    return True


@search.linked
def drop(work: Work, slots: Slots, op: int, slot: int) -> None:
    """Run `op` no longer in `slot`, nor anything that ran again only for its sake."""
    ops = len(slots.first)
    slots.scratch.stack[0] = op * ops + slot
    depth = 1
    while depth:
        depth -= 1
        removed, place = slots.scratch.stack[depth] // ops, slots.scratch.stack[depth] % ops
        if not runs_again(slots, removed, place):
            continue
        toggle(work, slots, removed, place)
        for index in range(work.reads_from[removed], work.reads_from[removed + 1]):
            maker = work.maker[work.reads[index]]
            made = serving(slots, maker, place)
            if made != maker and is_idle(work, slots, maker, made):
                slots.scratch.stack[depth] = maker * ops + made
                depth += 1


@search.linked
def restore(work: Work, slots: Slots, op: int, slot: int, budget: int) -> int:
    """Run `op` no longer in `slot`; undone, and 0, if that goes over budget or costs no less."""
    refresh(work, slots)
    made = last_made(slots, op, slot)
    for index in range(work.makes_from[op], work.makes_from[op + 1]):
        value = work.makes[index]
        if next_use(work, slots, value, slot - 1) < next_made(slots, op, slot):
            end = end_of(work, slots, value, made)
            if not fits(slots, end + 1, slot, work.size[value], budget):
                return 0
    mark = slots.journal.count[0]
    extra = slots.extra[0]
    drop(work, slots, op, slot)
    over, _ = excess(work, slots, budget)
    if over == 0 and slots.extra[0] < extra:
        return 1
    undo(work, slots, mark)
    refresh(work, slots)
    return 0


@search.compiled
def relax(work: Work, slots: Slots, budget: int) -> int:
    """Hold again what ran again, the dearest first, wherever that fits and costs less; returns how often."""
    done = 0
    for index in range(len(work.dearest)):
        op = work.dearest[index]
        for place in range(slots.times[op] - 1, -1, -1):
            if place < slots.times[op]:
                done += restore(work, slots, op, slots.again[op * MOST_AGAIN + place], budget)
    return done


# Elsewhere -------------------------------------------------------------------------------------------


@search.linked
def hoist(work: Work, slots: Slots, slot: int, hop: int, budget: int, before: int) -> bool:
    """Run some slots earlier what runs again in `slot`; undone, and False, unless less is over budget then.

    Earlier, what the slot's own op reads may not have been made yet.
    """
    target = slot - hop
    if target < 0 or work.stretch[target] != work.stretch[slot]:
        return False
    mark = slots.journal.count[0]
    count = 0
    node = slots.first[slot]
    while node >= 0:
        slots.scratch.closure[count] = slots.node_op[node]
        count += 1
        node = slots.node_next[node]
    for index in range(count):
        op = slots.scratch.closure[index]
        if may_run(work, slots, op, target):
            toggle(work, slots, op, target)
            toggle(work, slots, op, slot)
    over, _ = excess(work, slots, budget)
    if over < before:
        return True
    undo(work, slots, mark)
    refresh(work, slots)
    return False


@search.compiled
def is_in_place(work: Work, slots: Slots) -> bool:
    """Whether everything that runs again is first used in the stretch in which it runs."""
    for op in range(len(slots.first)):
        for place in range(slots.times[op]):
            slot = slots.again[op * MOST_AGAIN + place]
            first = len(slots.first)
            for index in range(work.makes_from[op], work.makes_from[op + 1]):
                first = min(first, next_use(work, slots, work.makes[index], slot - 1))
            if first < len(slots.first) and work.stretch[first] != work.stretch[slot]:
                return False
    return True
