"""What plans of one level hold at their worst, by formula: the referee's numbers without its replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.chain.chain import Chain, Ints


@dataclass(frozen=True)
class Moments:
    """The worst moments of each layer in a chain, from which the cost of any segment is a maximum.

    Layer k of a segment (i, j] needs, beside what layers i + 1 … k − 1 saved, s_k in its backward and, when
    it is recomputed, r_k, its input where nobody saves that, and h_j: the gradient that waits at the end of
    the segment with everything settled by then. In the stretch that is kept nothing waits.
    """

    chain: Chain

    @property
    def fixed_bytes(self) -> int:
        """What is there at every moment: the base and the input."""
        return self.chain.base_bytes + self.chain.output_bytes[0]

    def room(self, peak_bytes: int) -> int:
        """What `peak_bytes` leave to a plan. More than keeping everything takes is as good as that."""
        return min(peak_bytes - self.fixed_bytes, int(self.last[0]))

    @cached_property
    def price(self) -> Ints:
        """d_i of tensors 0 … n − 1, but nothing for tensor 0, which is there anyway."""
        return np.concatenate([[0], self.chain.d[1:-1]]).astype(np.int64)

    @cached_property
    def backward(self) -> Ints:
        """A_{k−1} + s_k, at k − 1."""
        return self.chain.saved_before[:-1] + self.chain.s

    @cached_property
    def forward(self) -> Ints:
        """A_{k−1} + r_k, at k − 1: of a layer whose input is there anyway."""
        return self.chain.saved_before[:-1] + self.chain.r

    @cached_property
    def forward_within(self) -> Ints:
        """The same of a layer that is not the first of its segment: its input may be nobody's."""
        unsaved = np.where(self.chain.kept[:-1], 0, self.chain.d[1:-1])
        within: Ints = self.forward + np.concatenate([[0], unsaved])
        return within

    @cached_property
    def waiting(self) -> Ints:
        """h_j of tensors 0 … n: the gradient, and what is settled."""
        return self.chain.g + self.chain.w

    @cached_property
    def last(self) -> Ints:
        """last(i) for i = 0 … n − 1.

        Where the backward of layer i + 1 does not need tensor i, it is there only for the forward of it.
        """
        chain = self.chain
        within = np.maximum(self.backward, self.forward_within)
        from_second = np.append(np.maximum.accumulate(within[::-1])[::-1][1:], 0)
        worst = np.maximum(np.maximum(self.backward, self.forward), from_second) - chain.saved_before[:-1]
        needed = np.concatenate([[False], chain.by_next[:-1]])
        last: Ints = np.where(needed, self.price + worst, np.maximum(worst, self.price + chain.r))
        return last

    def segments_from(self, i: int) -> Ints:
        """U(i, j) for j = i + 1 … n − 1; i is at most n − 2."""
        stop = len(self.chain) - 1
        forward = self.forward_within[i:stop].copy()
        forward[0] = self.forward[i]
        backward = np.maximum.accumulate(self.backward[i:stop])
        forward = np.maximum.accumulate(forward) + self.waiting[i + 1 : stop + 1]
        costs: Ints = np.maximum(backward, forward) - self.chain.saved_before[i]
        return costs

    def peak_of(self, checkpoints: Sequence[int]) -> int:
        """What a step peaks at with `checkpoints`, which are rising and from 1 to n − 1. In O(n)."""
        cuts = np.array([0, *checkpoints], np.int64)
        peak = self.last[cuts[-1]] + self.price[cuts[:-1]].sum()
        if len(cuts) > 1:
            starts, stops = cuts[:-1], cuts[1:]
            forward = self.forward_within.copy()
            forward[starts] = self.forward[starts]
            forward = np.maximum.reduceat(forward[: stops[-1]], starts) + self.waiting[stops]
            backward = np.maximum.reduceat(self.backward[: stops[-1]], starts)
            within = np.maximum(forward, backward) - self.chain.saved_before[starts]
            peak = max(peak, (np.cumsum(self.price[starts]) + within).max())
        return self.fixed_bytes + int(peak)


def peak_of(chain: Chain, checkpoints: Sequence[int]) -> int:
    """What a step of `chain` peaks at with `checkpoints`, which are rising and from 1 to n − 1. In O(n)."""
    return Moments(chain).peak_of(checkpoints)
