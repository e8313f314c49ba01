"""The lengths of an epoch: counted from whatever tells them, and the classes that waste least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from lowtide.errors import BadRequest
from lowtide.planner.lengths import best_classes, counted_lengths
from tests.helpers.effort import examples


def held(counts: Mapping[int, int], classes: tuple[int, ...], cost: Any = float) -> float:
    """What all samples cost, each padded to the shortest class that it fits in."""
    costs = (
        samples * cost(min(each for each in classes if each >= length)) for length, samples in counts.items()
    )
    return float(sum(costs))


def test_lengths_are_counted_the_shortest_first() -> None:
    assert list(counted_lengths([7, 3, 7, 7]).items()) == [(3, 1), (7, 3)]
    assert counted_lengths({512: 2, 64: 5}) == {64: 5, 512: 2}
    assert counted_lengths(Counter([4, 4])) == {4: 2}


@pytest.mark.parametrize("key", ["length", "ids", "array", "one"])
def test_a_dataset_tells_lengths_under_a_key(key: str) -> None:
    samples = [
        {"length": n, "ids": [0] * n, "array": torch.zeros(n), "one": torch.tensor(n)} for n in (5, 2, 5)
    ]
    assert counted_lengths(samples, key) == {2: 1, 5: 2}


def test_classes_by_hand() -> None:
    """With two, ten of 10 and six of 100 are 700 tokens; 760 if the first is 40, and 850 if it is 50."""
    counts = {10: 10, 40: 4, 50: 1, 100: 1}
    assert best_classes(counts, 1) == (100,)
    assert best_classes(counts, 2) == (10, 100)
    assert best_classes(counts, 3) == (10, 50, 100)
    assert best_classes(counts, 4) == best_classes(counts, 9) == (10, 40, 50, 100)


def test_classes_that_spare_nothing_are_left_out() -> None:
    assert best_classes({1: 5, 2: 5, 3: 5}, 3, cost=lambda length: 1.0) == (3,)


def test_a_cost_decides() -> None:
    """Where all but the longest cost the same, only the longest is apart."""
    counts = {10: 9, 20: 1, 90: 1, 100: 1}
    assert best_classes(counts, 2) == (10, 100)
    assert best_classes(counts, 2, cost=lambda length: 1.0 if length < 100 else 100.0) == (90, 100)


@given(
    st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 8),
    st.sampled_from([float, lambda length: length**2.0, lambda length: 5.0 + length]),
)
@settings(max_examples=examples(200), deadline=None)
def test_no_other_classes_cost_less(counts: dict[int, int], most: int, cost: Any) -> None:
    longest = max(counts)
    others = [length for length in counts if length < longest]
    ways = [
        (*sorted(chosen), longest)
        for count in range(min(most, len(counts)))
        for chosen in combinations(others, count)
    ]
    found = best_classes(counts, most, cost)
    assert found[-1] == longest
    assert len(found) <= most
    assert set(found) <= set(counts)
    assert held(counts, found, cost) == pytest.approx(min(held(counts, way, cost) for way in ways))


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "there are no lengths. Give those of the epoch"),
        ({}, "there are no lengths"),
        ([4, 0], "a length of 0 leaves nothing to train on"),
        ([-3], "a length of -3 leaves nothing"),
        ([2.5], "2.5 is no length. Lengths are whole numbers"),
        ([True], "True is no length"),
        (["long"], "'long' is no length"),
        ({8: 0}, "there are 0 samples of length 8"),
    ],
)
def test_what_is_no_length_is_refused(lengths: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        counted_lengths(lengths)


def test_a_key_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(BadRequest, match=r"have no 'tokens'\. They have: ids, label"):
        counted_lengths([{"ids": [1], "label": 0}], "tokens")
    with pytest.raises(BadRequest, match=r"have no 'ids'\. They have: tuple"):
        counted_lengths([(1, 2)], "ids")


def test_no_classes_are_refused() -> None:
    with pytest.raises(BadRequest, match="0 classes hold no samples"):
        lowtide.best_classes({5: 1}, 0)
