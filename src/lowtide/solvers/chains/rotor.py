"""rotor: the least time within a budget, with recomputation nested as deep as it pays.

After Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, *Optimal checkpointing for heterogeneous chains*
(arXiv 1911.13214): a dynamic program over stretches of the chain and the memory left for them. It is
optimal among the plans of `lowtide.chain.plan`, up to the rounding of memory to slots. The recurrence here is
theirs, restated for what `lowtide.chain.unroll` counts: outputs that nobody saves, temporaries, gradients
that differ from their tensors, gradients of parameters that settle.

A *pass* over layers i + 1 … j runs them forward, saving, and then the whole way back; layer j saves
always, because recomputing it at once is no use. With `m` free when it starts, the least time that it
adds by recomputing, X(i, j, m), begins in one of two ways:

* layer i + 1 saves:          X(i + 1, j, m − a)
* layers i + 1 … k do not:    F(i, k) + X(k, j, m − d) + X(i, k, m), where the last is a new pass over them

where F(i, k) are the seconds of those forwards, a what the layer saves and d the checkpoint, tensor k.
Both need that what runs first fits beside the gradient that waits for the pass. There are two X, which
differ in who pays for tensor i: somebody else, for as long as the pass lasts (*held*), or nobody, so that
the pass pays, until layer i + 1 has read it or for as long as it is a checkpoint (*passing*).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from lowtide.chain.chain import Chain, Floats, Ints
from lowtide.chain.plan import Plan, Segment
from lowtide.errors import BadRequest
from lowtide.solvers.chains.worst import worst_moment
from lowtide.solvers.method import Method
from lowtide.solvers.solution import Answer, Status


@dataclass(frozen=True)
class Rotor(Method):
    """Least time within a budget, recomputation nested; memory is counted in slots.

    The plain peak is cut into `slots`, and sizes are rounded up to them, so a budget always holds. The
    slots are the same for every budget: more budget never costs more time.

    Raises:
        BadRequest: `slots` is not a whole number of at least one.
    """

    slots: int = 500

    name: ClassVar[str] = "rotor"
    minimises: ClassVar[str] = "time within a budget; without one, peak"
    complexity: ClassVar[str] = "O(n³ · slots)"
    reference: ClassVar[str] = "Beaumont et al., arXiv 1911.13214"
    proves: ClassVar[str] = "if a slot is one byte, or nothing need be recomputed"
    takes_budget: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.slots, int) or isinstance(self.slots, bool) or self.slots < 1:
            raise BadRequest(f"rotor cannot work with slots={self.slots!r}: give a whole number, 1 or more.")

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer | None:
        """The plan of least time that fits; without a budget, the one of least peak."""
        plain_bytes = worst_moment(chain, Plan()).peak_bytes
        if budget_bytes is not None and plain_bytes <= budget_bytes:
            return Answer(Plan(), Status.OPTIMAL, plain_bytes)
        always_bytes = chain.base_bytes + chain.output_bytes[0]
        free_bytes = None if budget_bytes is None else budget_bytes - always_bytes
        found, exact = _search(chain, plain_bytes - always_bytes, self.slots, free_bytes)
        if found is None:
            return None
        return Answer(
            Plan(found.segments),
            Status.OPTIMAL if exact else Status.FEASIBLE,
            always_bytes + found.needed_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """A pass as the table has it: its segments, what it needs to the byte, and the seconds it adds."""

    segments: tuple[Segment, ...]
    needed_bytes: int
    seconds: float


def _search(chain: Chain, plain_bytes: int, slots: int, free_bytes: int | None) -> tuple[_Found | None, bool]:
    """The best plan that needs no more than `free_bytes`, and whether it is proved to be.

    A slot that suits the plain peak is coarse for the least one, so unless a slot is a byte there is a
    second table, which ends at the least peak of the first. What it has is compared at every budget, not
    only at small ones: or else a budget just above the end of the second table could cost more time.
    """
    slot_bytes = max(1, -(-plain_bytes // slots))
    table = _PassTable(chain, slot_bytes, _plain_slots(chain, slot_bytes))
    tables, least = [table], table.least()
    if slot_bytes > 1 and least is not None:
        fine_bytes = max(1, -(-least.needed_bytes // slots))
        tables.append(_PassTable(chain, fine_bytes, -(-least.needed_bytes // fine_bytes)))
    plans = [table.least() if free_bytes is None else table.fastest(free_bytes) for table in tables]
    found = [plan for plan in plans if plan is not None]
    if free_bytes is None:
        best = min(found, key=lambda plan: (plan.needed_bytes, plan.seconds), default=None)
    else:
        best = min(found, key=lambda plan: (plan.seconds, plan.needed_bytes), default=None)
    return best, slot_bytes == 1


def _plain_slots(chain: Chain, slot_bytes: int) -> int:
    """The slots that keeping everything needs once every size is rounded up."""
    kept_before = np.concatenate([[True], chain.kept[:-1]])
    forward = chain.r + np.where(kept_before, 0, chain.d[:-1])
    saved = np.concatenate([[0], np.cumsum(_up(chain.a, slot_bytes))[:-1]])
    return int((saved + _up(np.maximum(forward, chain.s), slot_bytes)).max())


def _up(sizes: Ints, slot_bytes: int) -> Ints:
    """Sizes in slots, rounded up."""
    return -(-sizes // slot_bytes)


def _later(values: Floats, slots: int) -> Floats:
    """`values` of the memory that is left when `slots` are taken: infinite where there are not so many."""
    if slots == 0:
        return values
    moved = np.full_like(values, np.inf)
    moved[slots:] = values[:-slots]
    return moved


class _PassTable:
    """X of every pass and every number of free slots, and the way back from it to a plan.

    Passes are filled in by their last layer j, and for one j from the shortest to the longest: then
    everything that the recurrence asks for is there, and the minimum over k is one operation on two
    contiguous blocks.
    """

    def __init__(self, chain: Chain, slot_bytes: int, slots: int) -> None:
        n = len(chain)
        self.chain = chain
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.saved_slots = [int(size) for size in _up(chain.a, slot_bytes)]
        self.tensor_slots = [int(size) for size in _up(chain.d, slot_bytes)]
        self.waiting = np.where(np.arange(n + 1) < n, chain.g + chain.w, 0)  # on the first pass, none
        self.through = [_needed_through(chain, i) for i in range(n)]
        width = slots + 1
        # recomputing[i][k − i − 1]: seconds that a segment of layers i + 1 … k adds, passes inside included
        self.recomputing = [np.empty((n - i - 1, width)) for i in range(n)]
        # going_on[j][k]: seconds that the pass over … j adds after k, when the layers up to k did not save
        self.going_on = [np.empty((j, width)) for j in range(n + 1)]
        self.held_saves = [np.empty((j, width), np.bool_) for j in range(n + 1)]
        self.passing_saves = [np.empty((j, width), np.bool_) for j in range(n + 1)]
        self.whole = np.empty(width)
        self._scratch = np.empty((n, width))
        self._passes: dict[tuple[int, int, int], _Found] = {}
        for j in range(1, n + 1):
            self._fill(j)

    def _fill(self, j: int) -> None:
        """Every pass that ends with layer j."""
        chain, before = self.chain, self.chain.forward_before
        waiting = int(self.waiting[j])
        held = passing = np.zeros(self.slots + 1)
        worst = 0
        for i in range(j - 1, -1, -1):
            size = self.tensor_slots[i]
            if i + 1 < j:
                saving = _later(held if chain.kept[i] else passing, self.saved_slots[i])
            else:
                saving = np.zeros(self.slots + 1)
            forward, backward = waiting + int(chain.r[i]), int(chain.s[i])
            saving_held = self._from(saving, max(forward, backward))
            saving_passing = self._from(saving, max(forward + int(chain.d[i]), backward))
            worst = max(worst, forward, backward)
            # Below the worst layer nothing fits; from where saving takes no time on, nothing beats it.
            segment = self._best_segment(i, j, self._slots_for(worst), int(np.count_nonzero(saving_held)))
            segment_passing = _later(segment, size)
            held = np.minimum(saving_held, segment)
            passing = np.minimum(saving_passing, segment_passing)
            # Where both ways take the same time, saving needs no more memory later on.
            np.less_equal(saving_held, segment, out=self.held_saves[j][i])
            np.less_equal(saving_passing, segment_passing, out=self.passing_saves[j][i])
            if i > 0:
                self.going_on[j][i] = _later(held, size) if chain.by_next[i - 1] else passing
            if j < len(chain):
                np.add(held, before[j] - before[i], out=self.recomputing[i][j - i - 1])
        self.whole = held

    def _best_segment(self, i: int, j: int, fewest: int, enough: int) -> Floats:
        """The least time over where the segment that starts the pass ends, for fewest … enough − 1 slots.

        What running through it needs grows with k in steps: one operation for the k of each step.
        """
        best = np.full(self.slots + 1, np.inf)
        count = j - i - 1
        needed, firsts = self.through[i]
        for first, following in pairwise([*firsts, len(needed)]):
            least = max(fewest, self._slots_for(int(self.waiting[j]) + int(needed[first])))
            last = min(count, following)
            if first >= count or least >= enough:
                break
            sums = np.add(
                self.recomputing[i][first:last, least:enough],
                self.going_on[j][i + 1 + first : i + 1 + last, least:enough],
                out=self._scratch[: last - first, least:enough],
            )
            np.minimum(best[least:enough], sums.min(axis=0), out=best[least:enough])
        return best

    def _slots_for(self, needed_bytes: int) -> int:
        return -(-needed_bytes // self.slot_bytes)

    def _from(self, values: Floats, needed_bytes: int) -> Floats:
        """`values` where at least `needed_bytes` are free, infinite elsewhere."""
        result = values.copy()
        result[: self._slots_for(needed_bytes)] = np.inf
        return result

    # From the table to plans --------------------------------------------------------------------------

    def least(self) -> _Found | None:
        """The plan that needs the fewest slots."""
        feasible = np.flatnonzero(np.isfinite(self.whole))
        return self._pass(0, len(self.chain), int(feasible[0])) if feasible.size else None

    def fastest(self, free_bytes: int) -> _Found | None:
        """The plan of least time in the table that needs no more than `free_bytes`.

        Rounding makes plans look larger than they are, by less than a slot for each layer and each tensor
        held. So plans for more slots than there are may fit after all; the first that does, from above,
        is the fastest.
        """
        if free_bytes < 0:
            return None
        most = free_bytes // self.slot_bytes
        if self.slot_bytes > 1:
            most += 2 * len(self.chain) + 1
        for slots in range(min(most, self.slots), -1, -1):
            if not np.isfinite(self.whole[slots]):
                return None
            found = self._pass(0, len(self.chain), slots)
            if found.needed_bytes <= free_bytes:
                return found
        return None

    def _pass(self, start: int, stop: int, slots: int) -> _Found:
        """The best pass over layers start + 1 … stop, with tensor `start` held and `slots` free."""
        key = start, stop, slots
        if key not in self._passes:
            self._passes[key] = self._walk(start, stop, slots)
        return self._passes[key]

    def _walk(self, start: int, stop: int, slots: int) -> _Found:
        chain, waiting = self.chain, int(self.waiting[stop])
        d = chain.output_bytes
        segments: list[Segment] = []
        needed = beside = 0
        seconds = 0.0
        i, held = start, True
        while i < stop:
            saves = (self.held_saves if held else self.passing_saves)[stop]
            if saves[i, slots]:
                forward = waiting + chain.forward_bytes[i] + (0 if held else d[i])
                needed = max(needed, beside + max(forward, chain.backward_bytes[i]))
                beside += chain.saved_bytes[i]
                slots -= self.saved_slots[i]
                held = bool(chain.kept[i])
                i += 1
                continue
            if not held:
                beside += d[i]
                slots -= self.tensor_slots[i]
            k, through = self._end_of_segment(i, stop, slots)
            inner = self._pass(i, k, slots)
            segments.append(Segment(i, k, inner.segments))
            needed = max(needed, beside + max(through, inner.needed_bytes))
            seconds += float(chain.forward_before[k] - chain.forward_before[i]) + inner.seconds
            held = bool(chain.by_next[k - 1])
            if held:
                beside += d[k]
                slots -= self.tensor_slots[k]
            i = k
        return _Found(tuple(segments), needed, seconds)

    def _end_of_segment(self, i: int, j: int, slots: int) -> tuple[int, int]:
        """Where the best segment that starts the pass ends, and the bytes that running through it needs."""
        needed = self.through[i][0][: j - i - 1] + self.waiting[j]
        count = int(np.searchsorted(needed, slots * self.slot_bytes, side="right"))
        sums = self.recomputing[i][:count, slots] + self.going_on[j][i + 1 : i + 1 + count, slots]
        best = int(sums.argmin())
        return i + 1 + best, int(needed[best])


def _needed_through(chain: Chain, i: int) -> tuple[Ints, list[int]]:
    """What running from tensor i to tensor i + 1, i + 2, … needs beside tensor i, and where that grows."""
    needs = np.concatenate([chain.r[i : i + 1], chain.d[i + 1 : -1] + chain.r[i + 1 :]])
    needed = np.maximum.accumulate(needs)
    return needed, [0, *(np.flatnonzero(np.diff(needed)) + 1).tolist()]
