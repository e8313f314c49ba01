"""What each layer of a cut model saves and needs, read off the record of the plain step.

So these are the bytes that plain PyTorch really keeps, on the path that the step took: the chain with
nothing recomputed peaks exactly where the step does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from lowtide.chain.chain import Chain, Kind
from lowtide.chain.cuts import Cuts, Granularity, RecordedStep, chosen_places, is_heavy
from lowtide.errors import BadRequest
from lowtide.ir.graph import Op, Phase, Role
from lowtide.ir.simulate import allocator_of, simulate
from lowtide.ir.walk import walk


def chain_of(
    step: RecordedStep, granularity: Granularity = Granularity.LAYER, modules: Collection[str] | None = None
) -> Chain:
    """The chain view of `step`.

    `modules` names the modules to cut around instead of those that `granularity` would choose; their
    calls must follow one another. Seconds are those of the profile; where the graph has none, a layer
    counts as long as its forward touches bytes at a terabyte a second, and `chain.timed` is False.

    Raises:
        BadRequest: the step has no backward, calls the model several times, or a named module is not
            called or not a place where the model can be cut.
    """
    if step.forward_end == len(step.graph.ops):
        raise BadRequest("the step has no backward, so there is nothing to save or recompute.")
    cuts = Cuts(step)
    chosen = chosen_places(step, cuts, granularity, modules)
    return _LayerSizes(step, cuts, [step.root.first, *chosen, step.forward_end]).chain()


class _LayerSizes:
    """What each layer between two places saves and needs, from the record of the plain step."""

    def __init__(self, step: RecordedStep, cuts: Cuts, places: Sequence[int]) -> None:
        self.step = step
        self.cuts = cuts
        self.places = list(places)
        self.n = len(places) - 1
        graph = step.graph
        timeline = simulate(graph, step.schedule)
        rounded = allocator_of(graph.device).held
        self.held = [rounded(graph.counted_bytes(value.id)) for value in graph.values]
        self.live = timeline.live_bytes.astype(np.int64)
        self.at: dict[int, int] = {}  # where in the schedule an op is
        self.born: dict[int, int] = {}
        self.dies: dict[int, int] = {}
        for event in walk(graph, step.schedule):
            if event.op is not None:
                self.at[event.op.id] = event.position
            self.born.update(dict.fromkeys(event.born, event.position))
            self.dies.update(dict.fromkeys(event.died, event.position))
        self.backward_start = self.at[step.forward_end]
        self.backward_end = self.at[max(op.id for op in graph.ops if op.phase is Phase.BACKWARD)] + 1
        self.layer_of_value = self._layers_of_values()
        self.aside = self._held_aside()
        for value in self.aside:  # counted with what is always there
            born, dies = self.born[value], self.dies.get(value, len(self.live))
            self.live[born:dies] -= self.held[value]
        self.live -= self.there_bytes

    @cached_property
    def there_bytes(self) -> int:
        """What is there all the time. Gradients of the step before are not, if this one drops them first."""
        first = self.at[self.places[0]]
        there = [value for value in self.step.graph.resident if self.dies.get(value, first) >= first]
        return sum(self.held[value] for value in there)

    def _layers_of_values(self) -> dict[int, int]:
        """The layer (1 … n) whose forward makes a value. What ran before the model belongs to the first."""
        made: dict[int, int] = {}
        for op in self.step.graph.ops[: self.step.forward_end]:
            layer = min(max(bisect_right(self.places, op.id), 1), self.n)
            made.update(dict.fromkeys(op.creates, layer))
        return made

    def _held_aside(self) -> set[int]:
        """Values made by the forward that are held whatever is planned.

        They outlive the backward (the loss and the model's output, which the caller holds), or go past a
        cut without being its carrier.
        """
        end = self.backward_end
        aside = {value for value in self.layer_of_value if self.dies.get(value, end) >= end}
        for value, layer in self.layer_of_value.items():
            if value not in self.cuts.trained and layer < self.n:
                past = self.cuts.last_use.get(value, -1) >= self.places[layer]
                aside.update({value} if past else ())
        return aside

    def _alive(self, value: int, position: int) -> bool:
        return self.born[value] < position <= self.dies.get(value, len(self.live))

    def chain(self) -> Chain:
        n = self.n
        carriers = [
            self.cuts.carrier.get(place, -1) if 0 < k < n else -1 for k, place in enumerate(self.places)
        ]
        d = [0 if value < 0 or value in self.aside else self.held[value] for value in carriers]
        saved: list[set[int]] = [set() for _ in range(n + 1)]
        for value, layer in self.layer_of_value.items():
            if value not in self.aside and self._alive(value, self.backward_start):
                saved[layer].add(value)
        a = [sum(self.held[value] for value in saved[k]) for k in range(1, n + 1)]
        kept = [d[k] > 0 and carriers[k] in saved[k] for k in range(1, n + 1)]
        own = [a[k] - (d[k + 1] if kept[k] else 0) for k in range(n)]
        before = np.concatenate([[0], np.cumsum(a)])
        starts = self._backward_starts()
        g, w = self._gradients(starts)
        by_itself = [kept[k - 1] and self._alive(carriers[k], starts[k]) for k in range(1, n + 1)]
        by_next = [
            kept[k - 1] and (not by_itself[k - 1] or self._read_by(carriers[k], starts[k + 1], starts[k]))
            if k < n
            else False
            for k in range(1, n + 1)
        ]
        r, s = [], []
        for k in range(1, n + 1):
            worst = self._worst_forward(k, carriers[k - 1] if k > 1 and not kept[k - 2] else -1)
            r.append(max(worst - int(before[k - 1]), own[k - 1] + d[k]))
            arriving = own[k - 1] + (d[k] if by_itself[k - 1] else 0) + g[k] + w[k]
            worst = int(self.live[starts[k] : starts[k - 1]].max(initial=0)) - int(before[k - 1])
            s.append(max(worst, arriving, g[k - 1] + w[k - 1]))
        timed, forward, backward = self._seconds(starts)
        return Chain(
            output_bytes=tuple(d),
            gradient_bytes=tuple(g),
            saved_bytes=tuple(a),
            forward_bytes=tuple(r),
            backward_bytes=tuple(s),
            settled_bytes=tuple(w[k - 1] - w[k] for k in range(1, n + 1)),
            output_saved_by_itself=tuple(by_itself),
            output_saved_by_next=tuple(by_next),
            forward_seconds=tuple(forward),
            backward_seconds=tuple(backward),
            base_bytes=self.there_bytes + sum(self.held[value] for value in self.aside),
            name=self.step.graph.name,
            names=tuple(self._name(first, stop) for first, stop in pairwise(self.places)),
            kinds=tuple(self._kind(first, stop) for first, stop in pairwise(self.places)),
            places=tuple(self.places),
            calls=(self.step.root, *self.step.inner_calls),
            timed=timed,
            changed_buffers=self._changed_buffers(),
        )

    def _worst_forward(self, k: int, fading: int) -> int:
        """The most that is live while layer k runs forward, less its input if that is not saved."""
        first = self.at[self.places[k - 1]]
        stop = self.at[self.places[k]] if k < self.n else self.backward_start
        live = self.live[first:stop].copy()
        if fading >= 0 and fading not in self.aside:
            live[: max(min(self.dies[fading], stop) - first, 0)] -= self.held[fading]
        return int(live.max(initial=0))

    def _backward_starts(self) -> list[int]:
        """For k = 0 … n, where in the schedule the backward of layer k begins; for 0, where it is all over.

        A layer that nothing is propagated through begins where the one before it does.
        """
        starts = [self.backward_end] * (self.n + 1)
        layer = self.n + 1
        for op in self.step.graph.ops[self.step.forward_end :]:
            source = self.step.forward_ops.get(op.id)
            if op.phase is not Phase.BACKWARD or (source is None and layer <= self.n):
                continue
            here = self.n if source is None else min(max(bisect_right(self.places, source), 1), self.n)
            for reached in range(here, layer):
                starts[reached] = min(starts[reached], self.at[op.id])
            layer = min(layer, here)
        return starts

    def _gradients(self, starts: Sequence[int]) -> tuple[list[int], list[int]]:
        """When the backward arrives at tensor k: bytes it holds that will go, and bytes that will stay."""
        passing, settled = [0] * (self.n + 1), [0] * (self.n + 1)
        for value, born in self.born.items():
            if born < self.backward_start:
                continue
            dies = self.dies.get(value)
            for k, start in enumerate(starts):
                if born < start and dies is None:
                    settled[k] += self.held[value]
                elif born < start <= (dies or 0):
                    passing[k] += self.held[value]
        return passing, settled

    def _read_by(self, value: int, start: int, stop: int) -> bool:
        readers = self.step.graph.readers.get(value, ())
        return any(start <= self.at[op] < stop for op in readers if op in self.at)

    def _seconds(self, starts: Sequence[int]) -> tuple[bool, list[float], list[float]]:
        graph = self.step.graph
        timed = any(op.seconds for op in graph.ops)
        forward, backward = [0.0] * self.n, [0.0] * self.n
        layers_end = [starts[k - 1] for k in range(1, self.n + 1)]
        for op in graph.ops:
            seconds = op.seconds if timed else self._nominal_seconds(op)
            if op.id < self.step.forward_end:
                forward[min(max(bisect_right(self.places, op.id), 1), self.n) - 1] += seconds
            elif op.phase is Phase.BACKWARD:
                at = self.at[op.id]
                layer = next((k for k in range(self.n, 0, -1) if at < layers_end[k - 1]), 1)
                backward[layer - 1] += seconds
        return timed, forward, backward

    def _nominal_seconds(self, op: Op) -> float:
        return sum(self.held[value] for value in {*op.reads, *op.creates}) * 1e-12

    def _changed_buffers(self) -> tuple[str, ...]:
        values = self.step.graph.values
        changed = {value for op in self.step.graph.ops[: self.step.forward_end] for value in op.mutates}
        return tuple(sorted(values[value].name for value in changed if values[value].role is Role.BUFFER))

    def _name(self, first: int, stop: int) -> str:
        """The modules of a layer: the outermost that it holds whole, first and last."""
        inside = [call for call in self.step.inner_calls if first <= call.first and call.stop <= stop]
        if not inside:
            return "(in the model's own forward)"
        last = max(inside, key=lambda call: (call.stop, call.stop - call.first))
        return inside[0].module if inside[0] is last else f"{inside[0].module} … {last.module}"

    def _kind(self, first: int, stop: int) -> Kind:
        ops = self.step.graph.ops[first:stop]
        heavy = [op.id for op in ops if is_heavy(op)]
        if not heavy:
            return Kind.LIGHT
        working = [op.id for op in ops if op.creates or op.mutates]
        return Kind.HEAVY if len(heavy) == 1 and working[-1] == heavy[0] else Kind.MIXED
