"""What people do without a method: keep all, a checkpoint every k layers, drop what is cheap."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain.chain import Chain, Kind
from lowtide.chain.plan import Plan
from lowtide.chain.unroll import replay
from lowtide.errors import BadRequest
from lowtide.solvers.chains.baselines import EveryK, KeepAll
from lowtide.solvers.chains.selective import Selective
from lowtide.solvers.solution import Answer, Status
from tests.helpers.chains import chains
from tests.helpers.effort import examples

FIVE = Chain.from_sizes([1] * 6)
LETTERS = {"l": Kind.LIGHT, "h": Kind.HEAVY, "m": Kind.MIXED}


def of_kinds(letters: str) -> Chain:
    chain = Chain.from_sizes([1] * (len(letters) + 1))
    return replace(chain, kinds=tuple(LETTERS[letter] for letter in letters))


def shown(answer: Answer | None) -> tuple[str, int | None] | None:
    return None if answer is None else (str(answer.plan), answer.peak_bytes)


# By hand ---------------------------------------------------------------------------------------------


def test_keep_all_keeps_all_or_gives_up() -> None:
    answer = KeepAll().choose(FIVE, None)
    assert shown(answer) == ("keep all", 8)
    assert answer is not None
    assert answer.status is Status.OPTIMAL
    assert shown(KeepAll().choose(FIVE, 8)) == ("keep all", 8)
    assert KeepAll().choose(FIVE, 7) is None


@pytest.mark.parametrize(
    ("k", "plan", "peak_bytes"),
    [
        (1, "[1-1][2-2][3-3][4-4]", 8),
        (2, "[1-2][3-4]", 6),
        (3, "[1-3]", 6),
        (4, "[1-4]", 7),
        (5, "keep all", 8),
        (9, "keep all", 8),
        (None, "[1-3]", 6),  # as low as k = 2, and a layer less to run again
    ],
)
def test_a_checkpoint_every_k_layers(k: int | None, plan: str, peak_bytes: int) -> None:
    answer = EveryK(k).choose(FIVE, None)
    assert shown(answer) == (plan, peak_bytes)
    assert answer is not None
    assert answer.status is Status.FEASIBLE


@pytest.mark.parametrize(
    ("k", "budget_bytes", "expected"),
    [
        (None, 8, ("keep all", 8)),
        (None, 7, ("[1-3]", 6)),
        (None, 6, ("[1-3]", 6)),
        (None, 5, None),
        (2, 6, ("[1-2][3-4]", 6)),
        (2, 5, None),
    ],
)
def test_of_all_k_that_fit_the_fastest(
    k: int | None, budget_bytes: int, expected: tuple[str, int] | None
) -> None:
    assert shown(EveryK(k).choose(FIVE, budget_bytes)) == expected


@pytest.mark.parametrize(
    ("letters", "plan"),
    [
        ("hhhh", "keep all"),
        ("mmmm", "keep all"),
        ("l", "keep all"),
        ("hlhl", "[2-3]"),  # the convolution after the run is in it, the last layer never
        ("hllhllhl", "[2-4][5-7]"),  # convolution, normalisation, activation
        ("hllhhlm", "[2-4][6-6]"),  # one convolution only; what is mixed is kept
        ("llll", "[1-3]"),
        ("hllh", "[2-3]"),  # the convolution is the last layer
        ("lh", "[1-1]"),
        ("mlmlm", "[2-2][4-4]"),
        ("lhlhm", "[1-2][3-4]"),
    ],
)
def test_light_layers_are_recomputed_with_the_heavy_one_after_them(letters: str, plan: str) -> None:
    answer = Selective().choose(of_kinds(letters), None)
    assert (str(answer.plan), answer.status) == (plan, Status.FEASIBLE)


# Properties ------------------------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(chains(max_layers=9), st.integers(0, 120))
def test_no_other_k_is_better(chain: Chain, budget_bytes: int) -> None:
    n = len(chain)
    plans = [Plan.at(range(k, n, k)) for k in range(1, n + 1)]
    known = [(replay(chain, plan).peak_bytes, plan.extra_seconds(chain)) for plan in plans]
    least = EveryK().choose(chain, None)
    assert least is not None
    assert (least.peak_bytes, least.plan.extra_seconds(chain)) == min(known)
    answer = EveryK().choose(chain, budget_bytes)
    fitting = [(seconds, peak_bytes) for peak_bytes, seconds in known if peak_bytes <= budget_bytes]
    if answer is None:
        assert not fitting
    else:
        assert (answer.plan.extra_seconds(chain), answer.peak_bytes) == min(fitting)


@given(st.text("lhm", min_size=1, max_size=12))
def test_every_light_layer_but_the_last_and_no_mixed_one_is_recomputed(letters: str) -> None:
    plan = Selective().choose(of_kinds(letters), None).plan
    recomputed = {k for segment in plan.segments for k in range(segment.start + 1, segment.stop + 1)}
    light = {k for k, letter in enumerate(letters, start=1) if letter == "l"}
    heavy_after_light = {k for k in range(2, len(letters) + 1) if letters[k - 2 : k] == "lh"}
    assert recomputed == (light | heavy_after_light) - {len(letters)}


# Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "two"])
def test_k_is_counted(k: object) -> None:
    with pytest.raises(BadRequest, match=r"checkpoint every .* layers: give a whole number, 1 or more"):
        EveryK(k)  # type: ignore[arg-type]


def test_choosing_by_kind_needs_kinds() -> None:
    with pytest.raises(BadRequest, match=r"kind of each layer.*comes from a model"):
        Selective().choose(FIVE, None)
