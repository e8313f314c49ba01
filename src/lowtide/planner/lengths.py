"""The lengths of an epoch: how many samples there are of each, and a few classes to pad them to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, TypeAlias

import numpy as np

from lowtide.errors import BadRequest

Lengths: TypeAlias = Iterable[Any] | Mapping[int, int]


def counted_lengths(lengths: Lengths, key: str | None = None) -> dict[int, int]:
    """How many samples there are of each length, the shortest first.

    `lengths` are a list of them, a histogram {length: samples}, or, with a `key`, a dataset: what a sample
    has under that key is its length, or has it ("length", or "input_ids").

    Raises:
        BadRequest: there are none, or something among them is no length.
    """
    if key is None and isinstance(lengths, Mapping):
        counts = Counter({_length(length): _samples(length, count) for length, count in lengths.items()})
    else:
        counts = Counter(length_of(sample, key) for sample in lengths)
    if not counts:
        raise BadRequest(
            "there are no lengths. Give those of the epoch: [128, 512], or {128: 900, 512: 100}."
        )
    return dict(sorted(counts.items()))


def length_of(sample: Any, key: str | None = None) -> int:
    """The length that a sample is, or has under a key.

    Raises:
        BadRequest: that is no length.
    """
    return _length(_under(sample, key))


def best_classes(
    counts: Mapping[int, int], most: int, cost: Callable[[int], float] = float
) -> tuple[int, ...]:
    """At most `most` lengths to pad to, so that all samples together cost the least; the shortest first.

    A sample costs what the class does that it is padded to, the shortest that it fits in: `cost(length)`, by
    default its tokens. The longest length is always a class. An exact dynamic program over the distinct
    lengths, in their number squared times `most`. Where fewer classes cost no more, there are fewer.

    Raises:
        BadRequest: there are no lengths, or no classes are wanted.
    """
    if most < 1:
        raise BadRequest(f"{most} classes hold no samples. Ask for at least 1.")
    lengths = list(counted_lengths(counts))
    up_to = np.concatenate(([0], np.cumsum([counts[length] for length in lengths])))
    costs = np.array([cost(length) for length in lengths])
    least = np.full(len(lengths) + 1, np.inf)  # of the shortest so many lengths, with so many classes
    least[0] = 0.0
    choices: list[list[int]] = []
    totals = []
    for _ in range(min(most, len(lengths))):
        chosen = [0]
        after = np.full_like(least, np.inf)
        for stop in range(1, len(lengths) + 1):
            ways = least[:stop] + (up_to[stop] - up_to[:stop]) * costs[stop - 1]
            chosen.append(int(ways.argmin()))
            after[stop] = ways[chosen[-1]]
        least = after
        choices.append(chosen)
        totals.append(float(least[-1]))
    fewest = 1 + totals.index(min(totals))
    return _traced_back(choices[:fewest], lengths)


def _traced_back(choices: Sequence[Sequence[int]], lengths: Sequence[int]) -> tuple[int, ...]:
    """The classes that the choices of the dynamic program lead to."""
    found = []
    stop = len(lengths)
    for chosen in reversed(choices):
        found.append(lengths[stop - 1])
        stop = chosen[stop]
    return tuple(reversed(found))


def _under(sample: Any, key: str | None) -> Any:
    if key is None:
        return sample
    if not isinstance(sample, Mapping) or key not in sample:
        known = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
        raise BadRequest(f"the samples of this dataset have no '{key}'. They have: {known}.")
    found = sample[key]
    is_one_number = getattr(found, "ndim", 1) == 0  # a tensor has a len all the same
    is_list = isinstance(found, Sized) and not isinstance(found, str) and not is_one_number
    return len(found) if is_list else found


def _length(length: Any) -> int:
    if isinstance(length, bool) or not hasattr(length, "__index__"):
        raise BadRequest(
            f"{length!r:.60} is no length. Lengths are whole numbers; for a dataset name the key that tells "
            'them: "length", or "input_ids".'
        )
    if int(length) < 1:
        raise BadRequest(f"a length of {int(length)} leaves nothing to train on. Leave such samples out.")
    return int(length)


def _samples(length: Any, count: int) -> int:
    if count < 1:
        raise BadRequest(f"there are {count} samples of length {length}. Leave out lengths that do not come.")
    return int(count)
