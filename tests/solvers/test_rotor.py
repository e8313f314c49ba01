"""rotor against every plan there is, replayed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment
from lowtide.chain.unroll import replay
from lowtide.errors import BadRequest
from lowtide.solvers.chains.exhaustive import nested_plans
from lowtide.solvers.chains.rotor import Rotor
from lowtide.solvers.solution import Answer, Status
from tests.helpers.chains import chains
from tests.helpers.effort import examples

# The referee: every plan, replayed -------------------------------------------------------------------


def lists_of_segments(start: int, stop: int, *, whole: bool = True) -> Iterator[tuple[Segment, ...]]:
    """Every way to put segments into layers start + 1 … stop; not `whole`: but one over all of them."""
    if start >= stop:
        yield ()
        return
    yield from lists_of_segments(start + 1, stop)
    for k in range(start + 1, stop + whole):
        for inside in lists_of_segments(start, k, whole=False):
            for rest in lists_of_segments(k, stop):
                yield (Segment(start, k, inside), *rest)


def outcomes(chain: Chain, plans: Iterable[Plan]) -> list[tuple[int, float]]:
    return [(replay(chain, plan).peak_bytes, plan.extra_seconds(chain)) for plan in plans]


def outcome(chain: Chain, answer: Answer | None) -> tuple[int, float] | None:
    """Peak and added time, replayed; what rotor believes the peak to be must be that."""
    if answer is None:
        return None
    [(peak_bytes, seconds)] = outcomes(chain, [answer.plan])
    assert answer.peak_bytes == peak_bytes
    return peak_bytes, seconds


def budgets_around(known: list[tuple[int, float]]) -> range:
    peaks = [peak_bytes for peak_bytes, _ in known]
    return range(max(1, min(peaks) - 2), max(peaks) + 2)


def assert_as_good_as(chain: Chain, known: list[tuple[int, float]]) -> None:
    """At every budget rotor takes the least time of the `known` plans that fit, and proves it."""
    assert outcome(chain, Rotor(slots=10_000).choose(chain, None)) == min(known)
    for budget_bytes in budgets_around(known):
        answer = Rotor(slots=10_000).choose(chain, budget_bytes)
        fitting = [seconds for peak_bytes, seconds in known if peak_bytes <= budget_bytes]
        found = outcome(chain, answer)
        if answer is None or found is None:
            assert not fitting
        else:
            assert found[0] <= budget_bytes
            assert found[1] == min(fitting)
            assert answer.status is Status.OPTIMAL


# By hand ---------------------------------------------------------------------------------------------

ALIKE = Chain.from_sizes([1] * 6)
UNLIKE = Chain.from_sizes([1, 4, 2, 3, 1], [6, 3, 5, 1], forward_seconds=[1, 2, 3, 4])


@pytest.mark.parametrize(
    ("chain", "budget_bytes", "plan", "peak_bytes", "seconds"),
    [
        (ALIKE, 100, "keep all", 8, 0),
        (ALIKE, 8, "keep all", 8, 0),
        (ALIKE, 7, "[3-4]", 7, 2),
        (ALIKE, 6, "[1-3]", 6, 3),
        (ALIKE, 5, "[1-4 [1-3 [1-2]]]", 5, 9),
        (ALIKE, None, "[1-4 [1-3 [1-2]]]", 5, 9),
        (UNLIKE, 20, "keep all", 20, 0),
        (UNLIKE, 19, "[1-1]", 18, 1),
        (UNLIKE, 17, "[1-1][2-2]", 17, 3),
        (UNLIKE, 16, "[1-2]", 16, 3),
        (UNLIKE, 15, "[1-2 [1-1]]", 14, 4),
        (UNLIKE, None, "[1-2 [1-1]]", 14, 4),
    ],
)
def test_the_less_memory_the_more_is_recomputed(
    chain: Chain, budget_bytes: int | None, plan: str, peak_bytes: int, seconds: float
) -> None:
    answer = Rotor().choose(chain, budget_bytes)
    assert answer is not None
    assert (str(answer.plan), answer.status) == (plan, Status.OPTIMAL)
    assert outcome(chain, answer) == (peak_bytes, seconds)


@pytest.mark.parametrize(("chain", "least_bytes"), [(ALIKE, 5), (UNLIKE, 14)])
def test_below_the_least_peak_there_is_no_plan(chain: Chain, least_bytes: int) -> None:
    assert Rotor().choose(chain, least_bytes - 1) is None
    assert Rotor().choose(chain, 1) is None


def test_an_output_that_nobody_saves_need_not_be_held() -> None:
    """Layers 2 and 3 save nothing, tensor 2 is read once: only tensor 1 is held over the way back."""
    chain = Chain(
        output_bytes=(0, 5, 5, 5), gradient_bytes=(0, 0, 0, 0), saved_bytes=(5, 0, 0),
        forward_bytes=(5, 5, 5), backward_bytes=(5, 2, 2), settled_bytes=(0, 0, 0),
        output_saved_by_itself=(True, False, False), output_saved_by_next=(False, False, False),
        forward_seconds=(1, 1, 1), backward_seconds=(1, 1, 1),
    )  # fmt: skip
    assert outcome(chain, Rotor().choose(chain, None)) == (10, 1.0)
    assert outcome(chain, Rotor().choose(chain, 15)) == (15, 0.0)


def test_what_waits_for_a_pass_is_there_while_it_runs_through_layers() -> None:
    """Layer 4 leaves no room to save anything. While layers 1 to 3 run again, 4 bytes of gradient wait.

    With it and its input, 5 bytes, layer 2 needs 11, though its own pass, where nothing waits, needs 8.
    """
    chain = Chain.from_sizes([0, 5, 1, 0, 0], [6, 2, 1, 1], [6, 2, 5, 10], gradient_bytes=[0, 0, 0, 4, 0])
    assert Rotor().choose(chain, 10) is None
    assert_as_good_as(chain, outcomes(chain, nested_plans(4)))


def test_coarse_slots_prove_nothing_unless_all_is_kept() -> None:
    chain = Chain.from_sizes([700] * 6)
    plain_bytes = replay(chain, Plan()).peak_bytes
    for budget_bytes, status in [(plain_bytes, Status.OPTIMAL), (plain_bytes - 1, Status.FEASIBLE)]:
        answer = Rotor(slots=50).choose(chain, budget_bytes)
        assert answer is not None
        assert answer.status is status


def test_nesting_without_end_reaches_the_bound() -> None:
    """Of forty equal layers: [1-39 [1-38 [… [1-2]]]], and 39 + 38 + … + 2 layers run again."""
    chain = Chain.from_sizes([1 << 20] * 41)
    answer = Rotor(slots=200).choose(chain, None)
    assert answer is not None
    assert outcome(chain, answer) == (chain.floor()[0], 779.0)


# Properties ------------------------------------------------------------------------------------------


@settings(max_examples=examples(150), deadline=None)
@given(chains(max_layers=5))
def test_no_memory_persistent_plan_is_better(chain: Chain) -> None:
    assert_as_good_as(chain, outcomes(chain, nested_plans(len(chain))))


@settings(max_examples=examples(100), deadline=None)
@given(chains(max_layers=3))
def test_nor_is_any_other_plan(chain: Chain) -> None:
    """Not even those that recompute the last layer of a pass."""
    assert_as_good_as(chain, outcomes(chain, map(Plan, lists_of_segments(0, len(chain)))))


@settings(max_examples=examples(150), deadline=None)
@given(chains(max_layers=9, most=60), st.integers(1, 40))
def test_at_any_slots_a_budget_holds_and_more_of_it_never_costs_time(chain: Chain, slots: int) -> None:
    plain_bytes = replay(chain, Plan()).peak_bytes
    least = outcome(chain, Rotor(slots).choose(chain, None))
    assert least is not None
    before = float("inf")
    for budget_bytes in range(least[0], plain_bytes + 1, max(1, (plain_bytes - least[0]) // 10)):
        found = outcome(chain, Rotor(slots).choose(chain, budget_bytes))
        assert found is not None, "what it reaches without a budget it reaches with that budget"
        assert found[0] <= budget_bytes
        assert found[1] <= before
        before = found[1]


@settings(max_examples=examples(100), deadline=None)
@given(chains(min_layers=2, max_layers=9), st.integers(1, 40))
def test_finer_slots_only_help_down_to_a_byte(chain: Chain, slots: int) -> None:
    budget_bytes = (chain.floor()[0] + replay(chain, Plan()).peak_bytes) // 2
    coarse = outcome(chain, Rotor(slots).choose(chain, budget_bytes))
    assume(coarse is not None)
    exact = outcome(chain, Rotor(10_000).choose(chain, budget_bytes))
    assert exact is not None
    assert coarse is not None
    assert exact[1] <= coarse[1]


@settings(max_examples=examples(100), deadline=None)
@given(chains(min_layers=4, max_layers=9))
def test_what_fits_in_slots_that_divide_every_size_is_exact(chain: Chain) -> None:
    """Every size 8 times as large, in slots of 8 bytes: the same answers, though nothing is proved."""
    larger = _times(chain, 8)
    span = replay(chain, Plan()).peak_bytes - chain.base_bytes - chain.output_bytes[0]
    assume(span > 0)
    budget_bytes = (chain.floor()[0] + replay(chain, Plan()).peak_bytes) // 2
    exact = outcome(chain, Rotor(span).choose(chain, budget_bytes))
    found = outcome(larger, Rotor(span).choose(larger, 8 * budget_bytes))
    assert (exact is None) == (found is None)
    if exact is not None and found is not None:
        assert found[1] == exact[1]


def _times(chain: Chain, factor: int) -> Chain:
    def larger(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(factor * size for size in sizes)

    return Chain(
        larger(chain.output_bytes), larger(chain.gradient_bytes), larger(chain.saved_bytes),
        larger(chain.forward_bytes), larger(chain.backward_bytes), larger(chain.settled_bytes),
        chain.output_saved_by_itself, chain.output_saved_by_next,
        chain.forward_seconds, chain.backward_seconds, factor * chain.base_bytes,
    )  # fmt: skip


# Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, -3, 2.5, True, "many"])
def test_slots_are_counted(slots: object) -> None:
    with pytest.raises(BadRequest, match=r"slots=.*give a whole number, 1 or more"):
        Rotor(slots=slots)  # type: ignore[arg-type]
