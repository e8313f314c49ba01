"""Getting a schedule under a budget, and making it cheaper there: loops over the moves of `moves`.

    shrink    while something is over budget, give up what saves most for its cost
    improve   undo a part of the schedule, repair that in another way, and keep the better of the two

Chance comes from a fixed sequence, and an allowance is counted in work done, never in seconds: the same graph
gets the same schedule everywhere.
"""

from __future__ import annotations

from lowtide.solvers.ops.search.memory import refresh
from lowtide.solvers.ops.search.moves import drop, excess, hoist, may_run, relax, run_again
from lowtide.solvers.ops.search.state import (
    MOST_AGAIN,
    Slots,
    Work,
    end_of,
    last_use,
    next_use,
    runs_again,
    search,
    serving,
    undo,
)

NO_LIMIT = 1e300


# Candidates ------------------------------------------------------------------------------------------


@search.linked
def first_use_after(work: Work, slots: Slots, value: int, slot: int, moment: int) -> int:
    """The slot of the first use of `value` after op `moment` of `slot` has run."""
    for index in range(work.uses_from[value], work.uses_from[value + 1]):
        op = work.uses[index]
        if op > moment and (op == slot or (op < slot and runs_again(slots, op, slot))):
            return slot
    return next_use(work, slots, value, slot)


@search.linked
def count_over(slots: Slots, budget: int) -> None:
    """For each slot, how many before it are over budget."""
    for slot in range(len(slots.first)):
        is_over = slots.through[slot] + slots.within[slot] > budget
        slots.scratch.over[slot + 1] = slots.scratch.over[slot] + (1 if is_over else 0)


@search.linked
def mark_busy(work: Work, slots: Slots, op: int) -> int:
    """Stamp what `op` reads and makes: it cannot be given up while `op` runs."""
    slots.scratch.stamp[0] += 1
    for index in range(work.reads_from[op], work.reads_from[op + 1]):
        slots.scratch.seen_value[work.reads[index]] = slots.scratch.stamp[0]
    for index in range(work.makes_from[op], work.makes_from[op + 1]):
        slots.scratch.seen_value[work.makes[index]] = slots.scratch.stamp[0]
    return int(slots.scratch.stamp[0])


@search.linked
def gather(work: Work, slots: Slots, slot: int, budget: int, noise: float) -> int:
    """Collect what is held at the highest moment of `slot` and could be given up there; returns how many.

    The score is what giving it up is hoped to save: its bytes in each slot over budget, for each second.
    """
    count_over(slots, budget)
    moment = slots.peak_op[slot]
    busy = mark_busy(work, slots, moment)
    count = 0
    slots.spent[0] += len(work.evictable) // 2
    for index in range(len(work.evictable)):
        value = work.evictable[index]
        maker = work.maker[value]
        if maker >= slot:
            break
        made = serving(slots, maker, slot)
        if slots.scratch.seen_value[value] == busy or (made == slot and maker > moment):
            continue
        target = first_use_after(work, slots, value, slot, moment)
        if target > end_of(work, slots, value, made) or (target == slot and maker < moment):
            continue
        if may_run(work, slots, maker, target):
            begin = last_use(work, slots, value, made, slot + 1)
            passed = max(1, slots.scratch.over[target] - slots.scratch.over[min(begin + 1, slot)])
            slots.scratch.candidate[count] = maker
            slots.scratch.candidate_slot[count] = target
            slots.scratch.score[count] = work.size[value] * passed / slots.estimate[maker]
            slots.scratch.score[count] *= 1.0 - noise * draw(slots, 1024) / 1024.0
            count += 1
    return count


@search.linked
def trial(work: Work, slots: Slots, op: int, slot: int, budget: int, merge: bool, before: int) -> float:
    """Bytes over budget saved for each second if `op` runs again in `slot`. It is undone."""
    mark = slots.journal.count[0]
    extra = slots.extra[0]
    run_again(work, slots, op, slot, budget, merge)
    after, _ = excess(work, slots, budget)
    cost = max(slots.extra[0] - extra, 1e-3 * work.cost[op])
    undo(work, slots, mark)
    refresh(work, slots)
    slots.estimate[op] = cost if after < before else 4.0 * max(cost, slots.estimate[op])
    return float((before - after) / cost)


@search.linked
def choose(work: Work, slots: Slots, count: int, budget: int, merge: bool, width: int, over: int) -> int:
    """The best candidate, or -1. Scores are what each was worth when last tried: the leader is tried anew."""
    best, best_worth = -1, 0.0
    tries = 0
    while best < 0 or tries < width:
        slots.spent[0] += count // 32
        leader = 0
        for index in range(1, count):
            if slots.scratch.score[index] > slots.scratch.score[leader]:
                leader = index
        if slots.scratch.score[leader] <= best_worth:
            break
        tries += 1
        op, slot = slots.scratch.candidate[leader], slots.scratch.candidate_slot[leader]
        worth = 0.0
        if may_run(work, slots, op, slot):
            worth = trial(work, slots, op, slot, budget, merge, over)
        slots.scratch.score[leader] = max(worth, 0.0)
        if worth > best_worth:
            best, best_worth = leader, worth
    return best


# Repair ----------------------------------------------------------------------------------------------


@search.compiled
def shrink(
    work: Work, slots: Slots, budget: int, merge: bool, width: int, limit: float, noise: float, allowance: int
) -> bool:
    """Give up, each time, what saves most bytes over budget for its cost, until nothing is over.

    False if nothing helps any more, if it costs more than `limit`, takes more work than `allowance`, or can
    no longer be undone: what was done so far stays.
    """
    stop = slots.spent[0] + allowance
    room = len(slots.journal.entries) // 4
    over, worst = excess(work, slots, budget)
    while over > 0:
        if slots.extra[0] > limit or slots.spent[0] > stop:
            return False
        count = gather(work, slots, worst, budget, noise)
        start = over
        while count and slots.through[worst] + slots.within[worst] > budget:
            chosen = choose(work, slots, count, budget, merge, width, over)
            if chosen < 0 or slots.journal.count[0] > 3 * room:
                break
            op, slot = slots.scratch.candidate[chosen], slots.scratch.candidate_slot[chosen]
            run_again(work, slots, op, slot, budget, merge)
            slots.scratch.score[chosen] = 0.0
            over, _ = excess(work, slots, budget)
        hop = 1
        while over >= start and hop <= 8:
            if hoist(work, slots, worst, hop, budget, over):
                over, _ = excess(work, slots, budget)
            hop += 1
        if over >= start or slots.journal.count[0] > 3 * room:
            return False
        over, worst = excess(work, slots, budget)
    return True


@search.linked
def draw(slots: Slots, count: int) -> int:
    """A number below `count`, the next of a fixed sequence."""
    slots.dice[0] = (slots.dice[0] * 1103515245 + 12345) % 2147483648
    return int((slots.dice[0] >> 8) % count)


@search.linked
def ruin(work: Work, slots: Slots, middle: int) -> None:
    """Drop some of what runs again: all of it in a few slots, all of a few ops, or here and there."""
    ops = len(slots.first)
    kind = draw(slots, 4)
    reach = 1 + draw(slots, 1 + min(ops // 8, 4 << draw(slots, 5)))
    if kind == 0:
        for slot in range(max(0, middle - reach), min(ops, middle + reach)):
            while slots.first[slot] >= 0:
                drop(work, slots, slots.node_op[slots.first[slot]], slot)
    elif kind == 1:
        middle = draw(slots, ops)
        for op in range(max(0, middle - reach), min(ops, middle + reach)):
            while slots.times[op] > 0:
                drop(work, slots, op, slots.again[op * MOST_AGAIN + slots.times[op] - 1])
    else:
        for _ in range(1 + draw(slots, 8)):
            op = draw(slots, ops)
            skipped = 0
            while slots.times[op] == 0 and skipped < ops:
                op = (op + 1) % ops
                skipped += 1
            if slots.times[op] > 0:
                drop(work, slots, op, slots.again[op * MOST_AGAIN + draw(slots, slots.times[op])])


@search.compiled
def improve(work: Work, slots: Slots, budget: int, allowance: int, width: int) -> int:
    """Ruin and repair until that much work is done; returns how often that was for the better.

    Less over budget is better, and where nothing is, less cost. What is no better is undone.
    """
    better = 0
    over, worst = excess(work, slots, budget)
    stop = slots.spent[0] + allowance
    while slots.spent[0] < stop and (over > 0 or slots.extra[0] > 0.0):
        slots.journal.count[0] = 0
        slots.spent[0] += 16
        extra = slots.extra[0]
        middle = worst if over > 0 and draw(slots, 2) else draw(slots, len(slots.first))
        ruin(work, slots, middle)
        merge = draw(slots, 2) == 0
        limit = 1.05 * extra if over == 0 else NO_LIMIT
        shrink(work, slots, budget, merge, width, limit, 0.25 * draw(slots, 4), stop - slots.spent[0])
        left, place = excess(work, slots, budget)
        if left == 0:
            relax(work, slots, budget)
        if left < over or (left == over and slots.extra[0] < extra):
            better += 1
            over, worst = left, place
        else:
            undo(work, slots, 0)
            refresh(work, slots)
    slots.journal.count[0] = 0
    return better
