"""A schedule as one curve of a report: what runs at each moment, and what the referee counts there.

A moment is a compute of the schedule, numbered from 0. Frees are between moments: they only lower the curve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lowtide.ir.graph import Graph, Op, Phase, Tile
from lowtide.ir.lives import Life, lives
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import Allocator, Bytes, Timeline, allocator_of, simulate


@dataclass(frozen=True)
class Curve:
    """A step of training: plain or as planned. `allocator` rounds sizes; by default the device's own."""

    name: str
    graph: Graph
    schedule: Schedule
    allocator: Allocator | None = None

    @property
    def rounding(self) -> Allocator:
        """How sizes are rounded."""
        return self.allocator or allocator_of(self.graph.device)

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes at every step, as the referee counts them."""
        return simulate(self.graph, self.schedule, self.rounding)

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """Every making of a value, and the steps it lives through."""
        return lives(self.graph, self.schedule, self.rounding)

    @cached_property
    def moments(self) -> tuple[int, ...]:
        """The step of each moment."""
        return tuple(p for p, step in enumerate(self.schedule) if step.runs is not None)

    def moment(self, step: int) -> int:
        """How many moments come before `step`."""
        return bisect_left(self.moments, step)

    @property
    def ops(self) -> Iterator[Op]:
        """The op of each moment."""
        return (self.graph.ops[op] for op in self.schedule.computed)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phase of each moment: an op that runs again recomputes, whatever it was at first."""
        seen: set[int] = set()
        found: list[Phase] = []
        for op in self.ops:
            found.append(Phase.RECOMPUTE if op.id in seen else op.phase)
            seen.add(op.id)
        return tuple(found)

    @cached_property
    def slices(self) -> tuple[tuple[Tile, int, int], ...]:
        """What runs in slices: from which moment to, not including, which; what runs again is there again."""
        blocks = {} if self.graph.tiled is None else {block.first: block for block in self.graph.tiled.blocks}
        found: list[tuple[Tile, int, int]] = []
        for moment, op in enumerate(self.ops):
            block = blocks.get(op.id)
            if block is not None:
                found.append((block, moment, moment + 1))
            elif found and found[-1][2] == moment and found[-1][0].first < op.id < found[-1][0].stop:
                found[-1] = (*found[-1][:2], moment + 1)
        return tuple(found)

    @property
    def stack(self) -> Bytes:
        """Bytes at each moment by category."""
        return self.timeline.stack[list(self.moments)]

    @property
    def peak_moment(self) -> int | None:
        """Where it peaks; None: before the first step, when everything resident is still there."""
        step = self.timeline.peak_step
        return None if step is None else self.moment(step)

    @property
    def timed(self) -> bool:
        """Whether any op's seconds are known."""
        return any(op.seconds for op in self.graph.ops)
