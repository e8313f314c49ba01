"""Optimal checkpoints for chains, after Hong, Tsai, Wang, Liu and Wu (arXiv 2502.12499, JPDC 2025).

The paper states two problems and how fast they can be solved: the textbook one (what checkpoints and the
largest segment hold together) in O(n³), and one with what PyTorch really holds, where a checkpoint goes
once its segment has been back-propagated, in O(n). The full text of its algorithms is not public; the
recurrences here are our own derivation, and the tests compare them with the replay of every plan.

All plans here are of one level: checkpoints 0 = c₀ < c₁ < … < cₘ < n cut the layers into segments that are
recomputed, and a last stretch, after cₘ, that is kept. In what follows, beside what is always there,

    last(i)   what the stretch after checkpoint i holds at its worst if it is kept, with tensor i
    U(i, j)   what the segment of layers i + 1 … j holds at its worst when it is recomputed, without tensor i
    M(i)      the least that checkpoint i, and whatever comes after it, hold at their worst

    M(i) = min( last(i),  d_i + min over i < j < n of max( M(j), U(i, j) ) )

because while segment (i, j] is recomputed everything after j is gone, and everything after j happens while
only checkpoints up to j are held. The least peak is M(0). The time that a plan adds depends on cₘ alone, so
the least time within P bytes is the smallest c that can be reached and after which all can be kept:

    H(0) = 0,   H(j) = d_j + min{ H(i) : i < j, H(i) + U(i, j) ≤ P },   H(c) − d_c + last(c) ≤ P
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lowtide.chain.chain import Chain, Ints
from lowtide.chain.plan import Plan
from lowtide.solvers.chains.moments import Moments, peak_of
from lowtide.solvers.jit import Unit
from lowtide.solvers.method import Method
from lowtide.solvers.solution import Answer, Status

_REFERENCE = "Hong et al., arXiv 2502.12499, JPDC 2025"

_loops = Unit()

SegmentCosts = Callable[[int], Ints]
"""For i, the costs U(i, i + 1) … U(i, n − 1)."""


# Any segment costs, O(n²) -----------------------------------------------------------------------------


def least_peak(price: Ints, last: Ints, segments_from: SegmentCosts) -> int:
    """M(0), whatever the segments cost."""
    least = last.copy()
    for i in range(len(last) - 2, -1, -1):
        after = np.maximum(least[i + 1 :], segments_from(i))
        least[i] = min(last[i], price[i] + after.min())
    return int(least[0])


def least_recomputation(
    price: Ints, last: Ints, segments_from: SegmentCosts, limit: int
) -> tuple[int, ...] | None:
    """Checkpoints that hold no more than `limit` and of which the last comes first; None if there are none.

    Right whatever the segments cost: what was held before a checkpoint is best as little as can be.
    """
    n = len(last)
    before = np.full(n, limit + 1, np.int64)  # H(j) − d_j; more than the limit: not reached
    before[0] = 0
    came_from = np.zeros(n, np.int64)
    for i in range(n):
        if before[i] + last[i] <= limit:
            return _path(came_from, i)
        held = before[i] + price[i]
        if i < n - 1 and held <= limit:
            better = (held + segments_from(i) <= limit) & (held < before[i + 1 :])
            before[i + 1 :][better] = held
            came_from[i + 1 :][better] = i
    return None


def _path(came_from: Ints, checkpoint: int) -> tuple[int, ...]:
    """The checkpoints on the way to `checkpoint`, and itself; tensor 0 is none."""
    path = []
    while checkpoint > 0:
        path.append(checkpoint)
        checkpoint = int(came_from[checkpoint])
    return tuple(path[::-1])


# Segment costs max B − A, O(n) ------------------------------------------------------------------------


def least_peak_in_one_pass(price: Ints, last: Ints, saved: Ints, worst: Ints) -> int:
    """M(0) where U(i, j) = max of `worst` over layers i + 1 … j, less `saved`[i].

    Such a U rises with j and falls with i, so a queue of the j worth trying is enough. Along it, from its
    front to its back, j rises and M falls:

    * j = i + 1 is new at the front. What is there with no smaller M is never tried again: a longer segment.
    * `second` is the one before the back. Once U(i, second) ≥ M(second), that holds for all smaller i, and
      the back, whose segment is longer, is never better.
    * Else the best is the back or `second`: all others have a larger M.

    The maximum of `worst` up to j is found among its records, the layers that need more than all before them
    down to i + 1. These change at the front only, and the two places looked at only move towards it.
    """
    least = last.copy()
    _fill_least(price, last, saved, worst, least, np.empty_like(last), np.empty_like(last))
    return int(least[0])


@_loops.compiled
def _fill_least(
    price: Ints, last: Ints, saved: Ints, worst: Ints, least: Ints, queue: Ints, records: Ints
) -> None:
    """M of every tensor. `queue` is in use from its back, at `back`, to its front, at `front`; the last of
    `records` is the first."""
    n = len(last)
    back, front, newest = 0, -1, -1
    of_back, of_second = 0, 0  # where in `records` the maxima for the two are
    for i in range(n - 2, -1, -1):
        while front >= back and least[queue[front]] >= least[i + 1]:
            front -= 1
        front += 1
        queue[front] = i + 1
        while newest >= 0 and worst[records[newest] - 1] <= worst[i]:
            newest -= 1
        newest += 1
        records[newest] = i + 1
        of_back = min(of_back, newest)
        of_second = min(of_second, newest)
        second_best = last[i]
        while front > back:
            second = queue[back + 1]
            while records[of_second] > second:
                of_second += 1
            if worst[records[of_second] - 1] - saved[i] < least[second]:
                second_best = price[i] + least[second]
                break
            back += 1
        while records[of_back] > queue[back]:
            of_back += 1
        best = price[i] + max(least[queue[back]], worst[records[of_back] - 1] - saved[i])
        least[i] = min(last[i], best, second_best)


def least_recomputation_in_one_pass(
    price: Ints, last: Ints, saved: Ints, worst: Ints, limit: int
) -> tuple[Ints, int]:
    """The way to the first checkpoint after which all can be kept, and that checkpoint; −1 if there is none.

    For the same U. If i < j and H(j) ≤ H(i), then j reaches at least as far as i and holds no more, so the
    queue has rising H, and its front is the best as long as it reaches; the maximum over (front, j] is that
    of a sliding window.
    """
    held, came_from, queue, window = np.zeros((4, len(last)), np.int64)
    return came_from, _first_to_keep_after(price, last, saved, worst, limit, held, came_from, queue, window)


@_loops.compiled
def _first_to_keep_after(
    price: Ints,
    last: Ints,
    saved: Ints,
    worst: Ints,
    limit: int,
    held: Ints,
    came_from: Ints,
    queue: Ints,
    window: Ints,
) -> int:
    """That checkpoint, or −1. All zeros are handed in; `window` has layers in falling order of `worst`."""
    if last[0] <= limit:
        return 0
    front, back = 0, 0
    first, end = 0, -1
    for j in range(1, len(last)):
        while end >= first and worst[window[end] - 1] <= worst[j - 1]:
            end -= 1
        end += 1
        window[end] = j
        while front <= back:
            i = queue[front]
            while window[first] <= i:
                first += 1
            if held[i] + worst[window[first] - 1] - saved[i] <= limit:
                break
            front += 1
        if front > back:
            return -1
        came_from[j] = queue[front]
        if held[queue[front]] + last[j] <= limit:
            return j
        held[j] = held[queue[front]] + price[j]
        while back >= front and held[queue[back]] >= held[j]:
            back -= 1
        back += 1
        queue[back] = j
    return -1


@dataclass(frozen=True)
class Estimate:
    """Segment costs of the form max B − A that are never above, or never below, the true ones."""

    moments: Moments
    worst: Ints  # B_k, at k − 1

    @classmethod
    def below(cls, moments: Moments) -> Estimate:
        """At least the smallest gradient of all ends to come waits while layer k is recomputed."""
        least_waiting = np.minimum.accumulate(moments.waiting[-2:0:-1])[::-1]
        return cls._of(moments, moments.forward[:-1] + least_waiting)

    @classmethod
    def above(cls, moments: Moments) -> Estimate:
        """At most the largest one, and the layer is not the first."""
        most_waiting = np.maximum.accumulate(moments.waiting[-2:0:-1])[::-1]
        return cls._of(moments, moments.forward_within[:-1] + most_waiting)

    @classmethod
    def _of(cls, moments: Moments, recomputing: Ints) -> Estimate:
        return cls(moments, np.maximum(moments.backward[:-1], recomputing))

    def least_peak(self) -> int:
        moments = self.moments
        saved = moments.chain.saved_before
        return moments.fixed_bytes + least_peak_in_one_pass(moments.price, moments.last, saved, self.worst)

    def least_recomputation(self, peak_bytes: int) -> tuple[int, ...] | None:
        """Checkpoints of the plan that adds least time within `peak_bytes`, by these costs."""
        moments = self.moments
        came_from, checkpoint = least_recomputation_in_one_pass(
            moments.price, moments.last, moments.chain.saved_before, self.worst,
            moments.room(peak_bytes),
        )  # fmt: skip
        return None if checkpoint < 0 else _path(came_from, checkpoint)


# The textbook sum, O(n³) ------------------------------------------------------------------------------


def _lightest_textbook_sum(price: Ints, before: Ints, thresholds: Ints) -> tuple[int, Ints, int]:
    """The least of Σ d over checkpoints + the largest segment, and the way to its last checkpoint.

    For each threshold T in turn, f(j) = d_j + min{ f(i) : i < j, segment between i and j ≤ T } from tensor 0
    to n + 1, both free. Which i may come before j is a window that only moves on, so its least f is at the
    front of a queue with rising f. Every set of checkpoints is met at T = its own largest segment, so of the
    lightest sums the one whose last checkpoint comes first is among those looked at. That is never n: without
    it the last segment grows by no more than d_n.
    """
    best = np.array([before[-1] + 1, len(price) - 1], np.int64)
    best_from, lightest, came_from, queue = np.zeros((4, len(price)), np.int64)
    _weigh_sums(price, before, thresholds, lightest, came_from, queue, best, best_from)
    return int(best[0]), best_from, int(best[1])


@_loops.compiled
def _weigh_sums(
    price: Ints,
    before: Ints,
    thresholds: Ints,
    lightest: Ints,
    came_from: Ints,
    queue: Ints,
    best: Ints,
    best_from: Ints,
) -> None:
    """`best` is the least sum so far and its last checkpoint, `best_from` the way there; f is `lightest`."""
    end = len(price) - 1  # tensor n + 1
    for index in range(len(thresholds)):
        threshold = thresholds[index]
        if threshold > best[0]:
            break
        front, back = 0, -1
        for j in range(1, end + 1):
            while back >= front and lightest[queue[back]] >= lightest[j - 1]:
                back -= 1
            back += 1
            queue[back] = j - 1
            while before[j - 1] - before[queue[front]] > threshold:
                front += 1
            came_from[j] = queue[front]
            lightest[j] = lightest[queue[front]] + price[j]
        total = lightest[end] + threshold
        if total > best[0]:
            continue
        last = 0
        while before[end - 1] - before[last] > threshold or lightest[last] != lightest[end]:
            last += 1
        if total < best[0] or last < best[1]:
            best[0], best[1] = total, last
            for j in range(end + 1):
                best_from[j] = came_from[j]


# The methods ------------------------------------------------------------------------------------------


class HongCubic(Method):
    """The textbook sum: all checkpoints, and the largest segment between them.

    Checkpoints are chosen among tensors 1 … n. Of all sets with the least sum it returns one whose last
    checkpoint comes first, which adds the least time. The sum says nothing of gradients, nor of checkpoints
    being given back, so the plan need not have the least peak.
    """

    name: ClassVar[str] = "hong-cubic"
    minimises: ClassVar[str] = "the textbook sum: checkpoints + largest segment"
    complexity: ClassVar[str] = "O(n³)"
    reference: ClassVar[str] = _REFERENCE
    proves: ClassVar[str] = "always, for the textbook sum"

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer:
        """The plan with the least textbook sum."""
        price = np.concatenate([[0], chain.d[1:], [0]]).astype(np.int64)
        before = np.cumsum(price[:-1])
        segments = (before[np.newaxis, :] - before[:, np.newaxis])[np.triu_indices(len(before))]
        total, came_from, last = _lightest_textbook_sum(price, before, np.unique(segments))
        checkpoints = _path(came_from, last)
        return Answer(Plan.at(checkpoints), Status.OPTIMAL, peak_of(chain, checkpoints), int(total))


class HongQuadratic(Method):
    """The least peak of all plans of one level, whatever their segments cost.

    Of the plans with that peak it returns one that adds the least time.
    """

    name: ClassVar[str] = "hong-quadratic"
    minimises: ClassVar[str] = "the peak"
    complexity: ClassVar[str] = "O(n²)"
    reference: ClassVar[str] = _REFERENCE
    proves: ClassVar[str] = "always, among plans of one level"
    takes_budget: ClassVar[bool] = True

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer | None:
        """The plan with the least peak, or the one that adds the least time within the budget."""
        moments = Moments(chain)
        if budget_bytes is None:
            room = least_peak(moments.price, moments.last, moments.segments_from)
        else:
            room = moments.room(budget_bytes)
        checkpoints = least_recomputation(moments.price, moments.last, moments.segments_from, room)
        if checkpoints is None:
            return None
        return Answer(Plan.at(checkpoints), Status.OPTIMAL, moments.peak_of(checkpoints))


class HongLinear(Method):
    """The least peak of plans of one level in one pass over the layers, with proof where the pass gives one.

    One pass needs segment costs that rise with the segment. The true ones do, but for the gradient that
    waits at the end of a segment while it is recomputed: a longer segment may end at a smaller one. So
    there are two passes, with costs that are never above the true ones and with costs that are never below.
    The first bounds every plan of one level from below; the better plan of the two is returned, and it is
    OPTIMAL if its true peak is that bound (or the chain's floor). Where backwards are the worst moments,
    as in most models, the two costs are the same and so it always is.

    Of the plans with that peak it returns the one that adds the least time if the costs below lead to a plan
    that has that peak, else the least it knows of. With a budget, where the two costs disagree, it asks the
    O(n²) recurrence: the answer is then always the one that adds the least time.
    """

    name: ClassVar[str] = "hong-linear"
    minimises: ClassVar[str] = "the peak"
    complexity: ClassVar[str] = "O(n)"
    reference: ClassVar[str] = _REFERENCE
    proves: ClassVar[str] = "among plans of one level, where the peak is the bound of the pass"
    takes_budget: ClassVar[bool] = True

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer | None:
        """The plan with the least peak, or the one that adds the least time within the budget."""
        moments = Moments(chain)
        if budget_bytes is not None:
            return _least_time_within(moments, budget_bytes)
        below, above = Estimate.below(moments), Estimate.above(moments)
        bound = max(below.least_peak(), chain.floor()[0])
        found = [below.least_recomputation(bound), above.least_recomputation(above.least_peak())]
        reached = min(moments.peak_of(checkpoints) for checkpoints in found if checkpoints is not None)
        found += [below.least_recomputation(reached), above.least_recomputation(reached)]
        peak_bytes, _, checkpoints = min(
            (moments.peak_of(checkpoints), checkpoints[-1:], checkpoints)
            for checkpoints in found
            if checkpoints is not None
        )
        status = Status.OPTIMAL if peak_bytes == bound else Status.FEASIBLE
        return Answer(Plan.at(checkpoints), status, peak_bytes)


def _least_time_within(moments: Moments, budget_bytes: int) -> Answer | None:
    """The plan of one level that adds the least time within the budget, in O(n) where that will do."""
    below = Estimate.below(moments).least_recomputation(budget_bytes)
    if below is None:
        return None
    above = Estimate.above(moments).least_recomputation(budget_bytes)
    checkpoints: tuple[int, ...] | None
    if above is not None and above[-1:] == below[-1:]:
        checkpoints = above
    elif moments.peak_of(below) <= budget_bytes:
        checkpoints = below
    else:
        checkpoints = least_recomputation(
            moments.price, moments.last, moments.segments_from, moments.room(budget_bytes)
        )
    if checkpoints is None:
        return None
    return Answer(Plan.at(checkpoints), Status.OPTIMAL, moments.peak_of(checkpoints))
