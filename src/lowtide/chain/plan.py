"""A plan for a chain: which stretches of layers are recomputed.

    Plan    = segments                            of the whole chain
    Segment = layers after `start` up to `stop`   with segments inside it

A layer outside every segment saves what its backward needs. A segment saves nothing but its input,
tensor `start`; when the backward arrives there its layers are run again, saving now, except that the
segments inside it are again only passed through. So a layer is recomputed once for every segment around
it. This is what nested non-reentrant checkpointing does, and every method's answer can be said in it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowtide.chain.chain import Chain
from lowtide.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers `start` + 1 … `stop`, recomputed as one, with segments inside that are recomputed again."""

    start: int
    stop: int
    inside: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Segments in order, none overlapping, each within the one around it.

    Raises:
        BadRequest: segments that are empty, out of order, or reach out of the one around them.
    """

    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        _check(self.segments, 0, None)

    @classmethod
    def at(cls, checkpoints: Iterable[int]) -> Plan:
        """Recompute everything up to the last of `checkpoints`, cutting at each of them.

        The layers after the last checkpoint are kept. A checkpoint at n, the output, means that the
        last stretch is recomputed too.
        """
        cuts = [0, *sorted(set(checkpoints))]
        return cls(tuple(Segment(start, stop) for start, stop in pairwise(cuts)))

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Where the outermost segments end. `Plan.at` of these is the plan, if it is of one level and
        leaves no layer out before the last of them."""
        return tuple(segment.stop for segment in self.segments)

    @property
    def levels(self) -> int:
        """How often the most recomputed layer is recomputed."""
        return _levels(self.segments)

    def walk(self) -> Iterator[Segment]:
        """Every segment, outer ones before those inside."""
        waiting = list(self.segments[::-1])
        while waiting:
            segment = waiting.pop()
            yield segment
            waiting.extend(segment.inside[::-1])

    def without(self, layers: Container[int]) -> Plan:
        """The same plan, except that those of `layers` (1 … n) are recomputed in none of its segments."""
        return Plan(tuple(_without(self.segments, layers)))

    def recomputed_layers(self) -> int:
        """How many forwards of a layer the plan adds."""
        return sum(segment.stop - segment.start for segment in self.walk())

    def extra_seconds(self, chain: Chain) -> float:
        """The time that recomputation adds."""
        before = chain.forward_before
        starts = np.fromiter((segment.start for segment in self.walk()), np.int64)
        stops = np.fromiter((segment.stop for segment in self.walk()), np.int64)
        return float((before[stops] - before[starts]).sum())

    def __str__(self) -> str:
        """'[1-3][4-11 [5-7]]': brackets are recomputed, the rest is kept."""
        return "".join(map(_written, self.segments)) or "keep all"

    @classmethod
    def read(cls, text: str) -> Plan:
        """The plan that `str` writes like this.

        Raises:
            BadRequest: the text is not a plan.
        """
        if text.strip() == "keep all":
            return cls()
        tokens = re.findall(r"\[(\d+)-(\d+)|(\])", text)
        if re.sub(r"\[\d+-\d+|\]|\s", "", text):
            raise BadRequest(f"'{text}' is not a plan. A plan looks like [1-3][4-11 [5-7]].")
        stack: list[tuple[int, int, list[Segment]]] = [(0, 0, [])]
        for first, last, closing in tokens:
            if not closing:
                stack.append((int(first) - 1, int(last), []))
            elif len(stack) > 1:
                start, stop, inside = stack.pop()
                stack[-1][2].append(Segment(start, stop, tuple(inside)))
            else:
                raise BadRequest(f"'{text}' is not a plan: a bracket closes that was not opened.")
        if len(stack) != 1:
            raise BadRequest(f"'{text}' is not a plan: a bracket is not closed.")
        return cls(tuple(stack[0][2]))


def _without(segments: Iterable[Segment], layers: Container[int]) -> Iterator[Segment]:
    """What is left of `segments` between those layers."""
    for segment in segments:
        inside = tuple(_without(segment.inside, layers))
        left = [layer for layer in range(segment.start + 1, segment.stop + 1) if layer in layers]
        for start, end in pairwise([segment.start, *left, segment.stop + 1]):
            if start < end - 1:
                within = (each for each in inside if start <= each.start and each.stop < end)
                yield Segment(start, end - 1, tuple(within))


def _written(segment: Segment) -> str:
    inside = "".join(map(_written, segment.inside))
    return f"[{segment.start + 1}-{segment.stop}{' ' if inside else ''}{inside}]"


def _levels(segments: tuple[Segment, ...]) -> int:
    return max((1 + _levels(segment.inside) for segment in segments), default=0)


def _check(segments: tuple[Segment, ...], start: int, stop: int | None) -> None:
    for segment in segments:
        if (
            segment.start < start
            or segment.stop <= segment.start
            or (stop is not None and segment.stop > stop)
        ):
            raise BadRequest(
                f"layers {segment.start + 1} to {segment.stop} cannot be a segment here: segments are not "
                "empty, in order, apart from each other and within the one around them."
            )
        _check(segment.inside, segment.start, segment.stop)
        start = segment.stop
