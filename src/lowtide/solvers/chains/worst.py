"""The worst moment of a chain under a plan, counted by a compiled loop.

`chain.unroll` writes down what a plan does, step by step, and `simulate` replays the steps: that is the
definition. It takes a tenth of a millisecond a layer. Here the same computes and frees are followed without
being written down, in nanoseconds: solvers try many plans, and chains can have a million layers. What is
alive is followed too; a plan that is found to read or free what is not there is handed to the referee.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.chain.chain import Chain, Ints
from lowtide.chain.plan import Plan, Segment
from lowtide.chain.unroll import replay
from lowtide.solvers.jit import Numbers, Record, Unit

_loops = Unit()

_NO_SEGMENT = -1
_LIVE, _PEAK, _LAYER, _ILLEGAL = 0, 1, 2, 3  # where they are in `_Following.count`


@dataclass(frozen=True, slots=True)
class Worst:
    """The most bytes that are held at once, and the module of the first layer at which they are."""

    peak_bytes: int
    module: str


def worst_moment(chain: Chain, plan: Plan) -> Worst:
    """The peak of `replay(chain, plan)`, and the module that runs at it.

    Raises:
        BadRequest: the plan has layers that the chain has not.
    """
    n = len(chain)
    if not plan.segments or plan.segments[-1].stop <= n:
        step = _Following.of(chain, plan)
        _follow(step, n)
        if not step.count[_ILLEGAL]:
            return Worst(int(step.count[_PEAK]), _module(chain, int(step.count[_LAYER])))
    replay(chain, plan)  # says what is wrong
    raise AssertionError(f"{plan} of {chain.name} is legal to the referee and not to the compiled count.")


def _module(chain: Chain, k: int) -> str:
    if k == 0:
        return "the loss"
    return chain.names[k - 1] if chain.names else f"layer {k}"


@dataclass(frozen=True, eq=False)
class _Following(Record):
    """A chain, a plan, and what is alive in the midst of a step.

    Values are tensors 0 … n, what layers 0 … n save beside their outputs, the gradients of tensors 0 … n and
    what layers 0 … n settle, each n + 1 of them; there is no layer 0. Segments are in order, each before
    those inside it, whose numbers are the next ones; `after` is the one after all of these, `last` is the
    last one inside, and `previous` the one before it within the same.
    """

    size: Numbers  # of values
    alive: Numbers
    forward: Numbers  # workspaces of layers 0 … n
    backward: Numbers
    by_itself: Numbers  # of tensors 0 … n
    by_next: Numbers
    start: Numbers  # of segments
    stop: Numbers
    after: Numbers
    last: Numbers
    previous: Numbers
    count: Numbers

    @classmethod
    def of(cls, chain: Chain, plan: Plan) -> _Following:
        """Before the step, with the input there."""
        settled = np.asarray(chain.settled_bytes, np.int64)
        held = chain.own + chain.g[1:] + chain.w[1:] + np.where(chain.by_itself, chain.d[1:], 0)
        alive = np.zeros(4 * (len(chain) + 1), np.int64)
        alive[0] = True
        resident = chain.base_bytes + chain.output_bytes[0]
        start, stop, after, last, previous = _numbered(plan)
        return cls(
            size=np.concatenate([chain.d, _padded(chain.own), chain.g, _padded(settled)]),
            alive=alive,
            forward=_padded(chain.r - chain.own - chain.d[1:]),
            backward=_padded(chain.s - held),
            by_itself=_padded(chain.by_itself.astype(np.int64)),
            by_next=_padded(chain.by_next.astype(np.int64)),
            start=start,
            stop=stop,
            after=after,
            last=last,
            previous=previous,
            count=np.array([resident, -1, 0, False], np.int64),
        )


def _padded(layers: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), layers])


def _numbered(plan: Plan) -> Sequence[Ints]:
    """Columns `start`, `stop`, `after`, `last` and `previous` of the segments, with the whole plan at 0."""
    rows: list[list[int]] = []
    whole = Segment(0, 0, plan.segments)
    waiting: list[tuple[int, Iterator[Segment]]] = [(_NO_SEGMENT, iter((whole,)))]
    while waiting:
        around, segments = waiting[-1]
        segment = next(segments, None)
        if segment is None:
            waiting.pop()
            if around != _NO_SEGMENT:
                rows[around][2] = len(rows)
            continue
        number = len(rows)
        previous = _NO_SEGMENT
        if around != _NO_SEGMENT:
            previous, rows[around][3] = rows[around][3], number
        rows.append([segment.start, segment.stop, 0, _NO_SEGMENT, previous])
        waiting.append((number, iter(segment.inside)))
    return [np.ascontiguousarray(column) for column in np.array(rows, np.int64).T]


# Compiled: `chain.unroll`, with what is alive instead of steps --------------------------------------------


@_loops.compiled
def _follow(step: _Following, n: int) -> None:
    """The whole step."""
    if not _forward(step, 0, n, 1, step.after[0]):
        _drop(step, n)
    _make(step, 2 * (n + 1) + n)
    _look(step, 0, 0)
    _backward(step, 0, n, step.last[0])
    for k in range(1, n + 1):
        _need(step, 3 * (n + 1) + k)


@_loops.linked
def _forward(step: _Following, start: int, stop: int, segment: int, end: int) -> bool:
    """Layers start + 1 … stop, saving except in segments; whether the backward needs the output."""
    saving = False
    k = start
    while k < stop:
        if segment < end and step.start[segment] == k:
            while k < step.stop[segment]:
                k += 1
                _run(step, k)
                _drop(step, len(step.by_next) + k)
                if k - 1 > step.start[segment]:
                    _drop(step, k - 1)
            saving = False
            segment = step.after[segment]
        else:
            k += 1
            _run(step, k)
            kept = step.by_next[k - 1] != 0 or (saving and step.by_itself[k - 1] != 0)
            if k - 1 > start and not kept:
                _drop(step, k - 1)
            saving = True
    return saving and step.by_itself[stop] != 0


@_loops.linked
def _backward(step: _Following, start: int, stop: int, segment: int) -> None:
    """Back over layers stop … start + 1; `segment` is the last of these."""
    k = stop
    while k > start:
        if segment >= 0 and step.stop[segment] == k:
            first = step.start[segment]
            if not _forward(step, first, k, segment + 1, step.after[segment]):
                _drop(step, k)
            _backward(step, first, k, step.last[segment])
            segment = step.previous[segment]
            needed = True
        else:
            _back(step, k)
            first = k - 1
            needed = step.by_next[first] != 0
        saved_before = segment < 0 or step.stop[segment] != first
        if first > start and needed and not (saved_before and step.by_itself[first] != 0):
            _drop(step, first)
        k = first


@_loops.linked
def _run(step: _Following, k: int) -> None:
    """The forward of layer k."""
    _need(step, k - 1)
    _make(step, k)
    _make(step, len(step.by_next) + k)
    _look(step, step.forward[k], k)


@_loops.linked
def _back(step: _Following, k: int) -> None:
    """The backward of layer k, and the gradient handed on."""
    width = len(step.by_next)
    if k > 1 and step.by_next[k - 1] != 0:
        _need(step, k - 1)
    if step.by_itself[k] != 0:
        _need(step, k)
    _need(step, width + k)
    _need(step, 2 * width + k)
    _look(step, step.backward[k], k)
    _drop(step, width + k)
    _drop(step, 2 * width + k)
    if step.by_itself[k] != 0:
        _drop(step, k)
    _make(step, 2 * width + k - 1)
    _make(step, 3 * width + k)
    _look(step, 0, k)


@_loops.linked
def _need(step: _Following, value: int) -> None:
    if step.alive[value] == 0:
        step.count[_ILLEGAL] = 1


@_loops.linked
def _make(step: _Following, value: int) -> None:
    if step.alive[value] != 0:
        step.count[_ILLEGAL] = 1
    step.alive[value] = 1
    step.count[_LIVE] += step.size[value]


@_loops.linked
def _drop(step: _Following, value: int) -> None:
    _need(step, value)
    step.alive[value] = 0
    step.count[_LIVE] -= step.size[value]


@_loops.linked
def _look(step: _Following, workspace: int, k: int) -> None:
    """Layer k is running: is this the worst moment so far?"""
    if step.count[_LIVE] + workspace > step.count[_PEAK]:
        step.count[_PEAK] = step.count[_LIVE] + workspace
        step.count[_LAYER] = k
