"""A plan as stretches of layers: what of each is held until its backward, plainly and under the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment

_BETWEEN = " … "  # as a chain names a layer of several modules: first … last


@dataclass(frozen=True)
class Stretch:
    """Layers `first` … `last`, kept together or recomputed together.

    `again` is how often the most recomputed of them is run again. `plain_bytes` are held of them when the
    backward begins in plain training, `held_bytes` under the plan: what the layers save, or the one
    tensor that they are run again from.
    """

    first: int
    last: int
    modules: str
    again: int
    plain_bytes: int
    held_bytes: int
    extra_seconds: float


def stretches(chain: Chain, plan: Plan) -> tuple[Stretch, ...]:
    """The chain from its first layer to its last. Held bytes sum to what the replay holds at the loss."""
    return tuple(_stretches(chain, plan))


def _stretches(chain: Chain, plan: Plan) -> Iterator[Stretch]:
    done = 0
    for segment in plan.segments:
        if done < segment.start:
            yield _kept(chain, done, segment.start, after_segment=done > 0)
        yield _recomputed(chain, segment, after_kept=done < segment.start)
        done = segment.stop
    if done < len(chain):
        yield _kept(chain, done, len(chain), after_segment=done > 0)


def _kept(chain: Chain, start: int, stop: int, after_segment: bool) -> Stretch:
    saved = _saved(chain, start, stop)
    # A segment before hands its output on and holds it no longer; the first layer's backward may need it.
    needed = after_segment and bool(chain.by_next[start - 1])
    held = saved + (chain.output_bytes[start] if needed else 0)
    return Stretch(start + 1, stop, _modules(chain, start, stop), 0, saved, held, 0.0)


def _recomputed(chain: Chain, segment: Segment, after_kept: bool) -> Stretch:
    start, stop = segment.start, segment.stop
    # The batch is there anyway, and a kept layer may have saved its output for itself.
    counted = start == 0 or (after_kept and bool(chain.kept[start - 1]))
    inner = Plan((segment,))
    return Stretch(
        first=start + 1,
        last=stop,
        modules=_modules(chain, start, stop),
        again=inner.levels,
        plain_bytes=_saved(chain, start, stop),
        held_bytes=0 if counted else chain.output_bytes[start],
        extra_seconds=inner.extra_seconds(chain),
    )


def _saved(chain: Chain, start: int, stop: int) -> int:
    """What layers start + 1 … stop save; the last output of all has no next layer whose backward needs it."""
    unneeded = stop == len(chain) and bool(chain.kept[-1]) and not bool(chain.by_itself[-1])
    return int(chain.a[start:stop].sum()) - (chain.output_bytes[-1] if unneeded else 0)


def _modules(chain: Chain, start: int, stop: int) -> str:
    if not chain.names:
        return ""
    first, last = chain.names[start].split(_BETWEEN)[0], chain.names[stop - 1].split(_BETWEEN)[-1]
    return first if first == last else f"{first}{_BETWEEN}{last}"
