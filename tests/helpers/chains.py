"""Small chains for tests: drawn at random, but such as a chain may be."""

from __future__ import annotations

from itertools import combinations

from hypothesis import strategies as st

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan


@st.composite
def chains(draw: st.DrawFn, min_layers: int = 1, max_layers: int = 7, most: int = 9) -> Chain:
    """Any chain of `min_layers` to `max_layers` layers whose sizes are at most a few times `most` bytes.

    Everything varies: which outputs are saved and by whom, temporaries, settled bytes, the base. Seconds
    are small whole numbers, zero among them, so that sums of them are exact and often tie.
    """
    n = draw(st.integers(min_layers, max_layers))

    def sizes(count: int, limit: int = most) -> list[int]:
        return draw(st.lists(st.integers(0, limit), min_size=count, max_size=count))

    def flags() -> list[bool]:
        return draw(st.lists(st.booleans(), min_size=n, max_size=n))

    d, g, own, w = sizes(n + 1), sizes(n + 1), sizes(n), sizes(n, 3)
    by_itself, by_next = flags(), flags()
    more_forward, more_backward = sizes(n), sizes(n)
    settled = [sum(w[k:]) for k in range(n + 1)]
    return Chain(
        output_bytes=tuple(d),
        gradient_bytes=tuple(g),
        saved_bytes=tuple(own[k] + d[k + 1] * (by_itself[k] or by_next[k]) for k in range(n)),
        forward_bytes=tuple(own[k] + d[k + 1] + more_forward[k] for k in range(n)),
        backward_bytes=tuple(
            max(own[k] + d[k + 1] * by_itself[k] + g[k + 1] + settled[k + 1], g[k] + settled[k])
            + more_backward[k]
            for k in range(n)
        ),
        settled_bytes=tuple(w),
        output_saved_by_itself=tuple(by_itself),
        output_saved_by_next=tuple(by_next),
        forward_seconds=tuple(float(seconds) for seconds in sizes(n, 3)),
        backward_seconds=tuple(float(seconds) for seconds in sizes(n, 3)),
        base_bytes=draw(st.integers(0, most)),
    )


@st.composite
def simple_chains(draw: st.DrawFn, min_layers: int = 1, max_layers: int = 7, most: int = 9) -> Chain:
    """A chain as `Chain.from_sizes` makes it from a ≥ d and s ≥ a + both gradients.

    Of these the backward is the worst moment of a layer: what the literature's formulas take for granted.
    """
    n = draw(st.integers(min_layers, max_layers))

    def sizes(count: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=count, max_size=count))

    d, more_saved, more_backward = sizes(n + 1), sizes(n), sizes(n)
    a = [d[k + 1] + more_saved[k] for k in range(n)]
    s = [a[k] + d[k + 1] + d[k] + more_backward[k] for k in range(n)]
    return Chain.from_sizes(d, a, s, base_bytes=draw(st.integers(0, most)))


def single_level_plans(n: int) -> list[Plan]:
    """Every plan of one level that keeps the last layer: one for each set of checkpoints."""
    return [Plan.at(cuts) for size in range(n) for cuts in combinations(range(1, n), size)]
