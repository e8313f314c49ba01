"""The methods after Hong et al. and the exhaustive one, against the replay of every plan of one level."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain.chain import Chain, Ints
from lowtide.chain.plan import Plan
from lowtide.chain.unroll import replay
from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.solvers.chains import hong
from lowtide.solvers.chains.exhaustive import Exhaustive
from lowtide.solvers.chains.hong import (
    Estimate,
    HongCubic,
    HongLinear,
    HongQuadratic,
    least_peak,
    least_peak_in_one_pass,
    least_recomputation,
    least_recomputation_in_one_pass,
)
from lowtide.solvers.chains.moments import Moments, peak_of
from lowtide.solvers.method import Method
from lowtide.solvers.registry import solve
from lowtide.solvers.solution import Status
from tests.helpers.chains import chains, simple_chains, single_level_plans
from tests.helpers.effort import examples

MIB = 2**20
EXACT_METHODS = [HongLinear(), HongQuadratic(), Exhaustive()]

# The referee ----------------------------------------------------------------------------------------


def every_plan(chain: Chain) -> list[tuple[int, float]]:
    """Peak and added seconds of every plan of one level, as replayed."""
    return [
        (replay(chain, plan).peak_bytes, plan.extra_seconds(chain)) for plan in single_level_plans(len(chain))
    ]


def textbook_sum(chain: Chain, checkpoints: Iterable[int]) -> int:
    """What all checkpoints hold, and the largest run of other tensors."""
    kept = set(checkpoints)
    largest = run = 0
    for k, size in enumerate(chain.output_bytes[1:], start=1):
        run = 0 if k in kept else run + size
        largest = max(largest, run)
    return largest + sum(chain.output_bytes[k] for k in kept)


def every_textbook_sum(chain: Chain) -> list[tuple[int, float]]:
    """The sum of every set of checkpoints, the output among them, and what the plan adds in seconds."""
    n = len(chain)
    sets = [cuts for count in range(n + 1) for cuts in combinations(range(1, n + 1), count)]
    last = [max((k for k in cuts if k < n), default=0) for cuts in sets]
    return [
        (textbook_sum(chain, cuts), float(chain.forward_before[c]))
        for cuts, c in zip(sets, last, strict=True)
    ]


# Drawn by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", EXACT_METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize(
    ("sizes", "checkpoints", "peak_bytes"),
    [
        ([5, 7], (), 5 + (7 + 7 + 5)),  # one layer: nothing to recompute
        ([0, 10, 10], (), 10 + 30),  # a checkpoint as large as what it replaces gains nothing
        ([0, 10, 10, 10], (2,), 10 + 30),  # B3 beside tensor 2, B2 beside tensor 1
        ([0, 10, 10, 10, 10], (2,), 10 + 10 + 30),  # as good as [1-3] or [1-2][3-3], with less recomputed
        ([1, 10, 20, 30], (2,), 1 + 20 + 80),
        ([0, 90, 1, 1, 1, 1], (), 90 + (1 + 1 + 90)),  # B2 with its input is the floor: all can be kept
        ([0, 1, 1, 1, 9, 1, 1, 1, 1], (3,), 1 + 9 + (1 + 1 + 9)),  # B5
    ],
)  # fmt: skip
def test_the_least_peak_and_the_least_recomputation_for_it(
    method: Method, sizes: list[int], checkpoints: tuple[int, ...], peak_bytes: int
) -> None:
    solution = solve(Chain.from_sizes(sizes), method)
    assert (solution.checkpoints, solution.peak_bytes) == (checkpoints, peak_bytes)
    assert solution.status is Status.OPTIMAL


@pytest.mark.parametrize("method", EXACT_METHODS, ids=lambda method: method.name)
def test_a_budget_buys_time(method: Method) -> None:
    chain = Chain.from_sizes([0] + [10] * 9)
    bought = {
        budget: solve(chain, method, budget).extra_seconds for budget in (110, 109, 100, 99, 80, 70, 60)
    }
    # With one checkpoint c the kept stretch peaks at 120 − 10 c and the segment at 20 + 10 c: down to 70 with
    # c = 5. For 60 there must be two, at 4 and 7.
    assert bought == {110: 0, 109: 2, 100: 2, 99: 3, 80: 4, 70: 5, 60: 7}
    assert solve(chain, method).checkpoints == (4, 7)


def test_the_textbook_sum_is_of_tensors_alone() -> None:
    chain = Chain.from_sizes([2, 4, 4, 1, 4, 4], base_bytes=1000)
    solution = solve(chain, "hong-cubic")
    assert solution.checkpoints == (3,)
    assert solution.objective_bytes == 1 + 8
    assert solution.peak_bytes == peak_of(chain, [3]) == 1000 + 2 + 1 + 4 + 12
    assert solution.status is Status.OPTIMAL


def test_of_equal_textbook_sums_the_one_that_recomputes_least_is_taken() -> None:
    chain = Chain.from_sizes([0, 1, 2, 1, 1])
    for checkpoints in [(2,), (3,), (1, 3), (2, 3), (2, 4)]:
        assert textbook_sum(chain, checkpoints) == 4
    assert solve(chain, "hong-cubic").objective_bytes == 4
    assert solve(chain, "hong-cubic").checkpoints == (2,)
    assert solve(Chain.from_sizes([0, 5, 0]), "hong-cubic").checkpoints == ()  # 5 + 0 with {1}, 0 + 5 without


def test_where_a_gradient_waits_the_best_segment_need_not_be_the_shortest() -> None:
    chain = Chain.from_sizes(
        [0, 1, 1, 1, 1],
        forward_bytes=[20, 1, 1, 1],
        gradient_bytes=[0, 1, 30, 1, 1],
        backward_bytes=[3, 33, 33, 3],
    )
    # Layer 1 takes 20 to recompute, and 30 wait if the segment ends at tensor 2.
    assert [peak_of(chain, [j]) for j in (1, 2, 3)] == [35, 50, 35]
    row = Moments(chain).segments_from(0)
    assert row.tolist() == [20 + 1, 20 + 30, max(2 + 33, 20 + 1)]


# Chains where forwards need much and gradients differ, so that the two estimates of the one pass disagree.


def test_a_peak_at_the_floor_of_the_chain_is_proved_even_if_the_pass_does_not_prove_it() -> None:
    chain = Chain.from_sizes(
        [0, 3, 3, 4], [0, 4, 0], [5, 5, 2], gradient_bytes=[0, 5, 0, 2], forward_bytes=[6, 10, 7]
    )
    solution = solve(chain, "hong-linear")
    assert Estimate.below(Moments(chain)).least_peak() == 10
    assert solution.peak_bytes == solution.lower_bound_bytes == 3 + 10  # F2 with its input
    assert solution.status is Status.OPTIMAL


def test_where_the_bound_is_not_reached_the_plan_still_recomputes_no_more_than_it_must() -> None:
    chain = Chain.from_sizes(
        [0, 4, 3, 2, 1],
        [3, 4, 1, 4],
        [4, 4, 4, 10],
        gradient_bytes=[0, 1, 0, 3, 6],
        forward_bytes=[7, 7, 6, 7],
    )
    solution = solve(chain, "hong-linear")
    assert (solution.checkpoints, solution.peak_bytes, solution.status) == ((2,), 14, Status.FEASIBLE)
    assert (solution.peak_bytes, solution.extra_seconds) == min(every_plan(chain))


def test_a_budget_is_used_by_what_segments_cost_and_not_by_what_they_could_cost() -> None:
    chain = Chain.from_sizes(
        [0, 2, 2, 3, 2],
        [4, 3, 0, 4],
        [9, 5, 5, 10],
        gradient_bytes=[0, 5, 1, 5, 6],
        forward_bytes=[10, 9, 6, 10],
    )
    assert Estimate.above(Moments(chain)).least_recomputation(16) == (1, 3)
    assert solve(chain, "hong-linear", 16).checkpoints == (2,)


def cnn(batch: int, layers: Sequence[tuple[str, int, int]]) -> Chain:
    """Images of 224 × 224 through layers of a kind, with channels and a side length; fp32.

    ReLUs are in place and belong to the layer before them. Their backward holds output, gradient in and
    gradient out; then a convolution holds one gradient and makes the next. A pooling saves 64-bit indices.
    """
    d, a, s = [batch * 3 * 224 * 224 * 4], [], []
    for kind, channels, side in layers:
        size = batch * channels * side * side * 4
        a.append(3 * size if kind == "pool" else size)
        s.append(3 * size + d[-1] if kind == "pool" else max(3 * size, size + d[-1]))
        d.append(size)
    return Chain.from_sizes(d, a, s)


def vgg19() -> Chain:
    layers = []
    for block, (channels, convolutions) in enumerate([(64, 2), (128, 2), (256, 4), (512, 4), (512, 4)]):
        layers += [("conv", channels, 224 >> block)] * convolutions + [("pool", channels, 112 >> block)]
    return cnn(64, [*layers, ("fc", 4096, 1), ("fc", 4096, 1), ("fc", 1000, 1)])


def alexnet() -> Chain:
    return cnn(
        1024,
        [
            ("conv", 64, 55), ("pool", 64, 27), ("conv", 192, 27), ("pool", 192, 13),
            ("conv", 384, 13), ("conv", 256, 13), ("conv", 256, 13), ("pool", 256, 6),
            ("fc", 4096, 1), ("fc", 4096, 1), ("fc", 1000, 1),
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("chain", "checkpoints", "mebibytes"),
    [
        (vgg19(), (), 4814.25),
        (vgg19(), (5, 10, 14, 19), 3760.75),
        (vgg19(), (3, 12), 3172.75),
        (vgg19(), (3, 6), 3172.75),
        (vgg19(), (3, 11, 24), 3172.75),
        (vgg19(), (3,), 3172.75),
        (alexnet(), (), 3747.5),
        (alexnet(), (4, 7), 3531.25),
        (alexnet(), (2, 4), 2856.75),
        (alexnet(), (2,), 2856.75),
    ],
)
def test_the_plans_for_vgg_and_alexnet_peak_where_the_formulas_say(
    chain: Chain, checkpoints: tuple[int, ...], mebibytes: float
) -> None:
    assert replay(chain, Plan.at(checkpoints)).peak_bytes == mebibytes * MIB


@pytest.mark.parametrize(
    ("chain", "best", "mebibytes", "textbook"),
    [(vgg19(), (3,), 3172.75, (3, 6)), (alexnet(), (2,), 2856.75, (2, 4))],
    ids=["VGG-19", "AlexNet"],
)
def test_the_first_block_of_vgg_and_alexnet_is_all_that_must_be_recomputed(
    chain: Chain, best: tuple[int, ...], mebibytes: float, textbook: tuple[int, ...]
) -> None:
    for method in ("hong-linear", "hong-quadratic"):
        solution = solve(chain, method)
        assert (solution.checkpoints, solution.status) == (best, Status.OPTIMAL)
        assert solution.peak_bytes == mebibytes * MIB
    assert solve(chain, "hong-cubic").checkpoints == textbook


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(150), deadline=None)
@given(chains(max_layers=6))
def test_the_formula_says_what_the_replay_counts(chain: Chain) -> None:
    for plan in single_level_plans(len(chain)):
        assert peak_of(chain, plan.checkpoints) == replay(chain, plan).peak_bytes


@settings(max_examples=examples(150), deadline=None)
@given(chains(max_layers=6))
def test_without_a_budget_no_plan_of_one_level_has_a_lower_peak_or_the_same_in_less_time(
    chain: Chain,
) -> None:
    best = min(every_plan(chain))
    quadratic = solve(chain, "hong-quadratic")
    assert (quadratic.peak_bytes, quadratic.extra_seconds) == best
    assert quadratic.status is Status.OPTIMAL
    linear = solve(chain, "hong-linear")
    assert linear.peak_bytes >= best[0]
    if linear.status is Status.OPTIMAL:
        assert linear.peak_bytes == best[0]


@settings(max_examples=examples(60), deadline=None)
@given(chains(max_layers=5))
def test_trying_everything_finds_the_same(chain: Chain) -> None:
    results = every_plan(chain)
    exhaustive = solve(chain, "exhaustive")
    assert (exhaustive.peak_bytes, exhaustive.extra_seconds) == min(results)
    for budget in {peak for peak, _ in results}:
        assert solve(chain, "exhaustive", max(budget, 1)).extra_seconds == least_time(results, max(budget, 1))


@settings(max_examples=examples(150), deadline=None)
@given(simple_chains(max_layers=7))
def test_where_backwards_are_the_worst_moments_one_pass_is_enough(chain: Chain) -> None:
    solution = solve(chain, "hong-linear")
    assert solution.status is Status.OPTIMAL
    assert (solution.peak_bytes, solution.extra_seconds) == min(every_plan(chain))


@settings(max_examples=examples(150), deadline=None)
@given(chains(max_layers=6))
def test_the_two_estimates_have_the_least_peak_between_them(chain: Chain) -> None:
    moments = Moments(chain)
    below, above = Estimate.below(moments), Estimate.above(moments)
    least = min(every_plan(chain))[0]
    assert below.least_peak() <= least <= above.least_peak()
    found = above.least_recomputation(above.least_peak())
    assert found is not None
    assert moments.peak_of(found) <= above.least_peak()


def least_time(results: list[tuple[int, float]], budget: int) -> float | None:
    return min((seconds for peak, seconds in results if peak <= budget), default=None)


@settings(max_examples=examples(100), deadline=None)
@given(chains(max_layers=6))
def test_within_any_budget_no_plan_of_one_level_adds_less_time(chain: Chain) -> None:
    results = every_plan(chain)
    peaks = {peak for peak, _ in results}
    for budget in sorted(peaks | {peak - 1 for peak in peaks} | {10**30}):
        for method in (HongLinear(), HongQuadratic()):
            answer = method.choose(chain, budget)
            seconds = None if answer is None else answer.plan.extra_seconds(chain)
            assert seconds == least_time(results, budget)
            if answer is not None:
                assert answer.peak_bytes == replay(chain, answer.plan).peak_bytes <= budget


@settings(max_examples=examples(25), deadline=None)
@given(chains(min_layers=10, max_layers=30, most=1000))
def test_more_memory_never_costs_more_time(chain: Chain) -> None:
    for method in (HongLinear(), HongQuadratic()):
        least = method.choose(chain, None)
        assert least is not None
        assert least.peak_bytes is not None
        budgets = np.linspace(least.peak_bytes, peak_of(chain, []), 20).astype(int).tolist()
        answers = [method.choose(chain, budget) for budget in budgets]
        seconds = [answer.plan.extra_seconds(chain) for answer in answers if answer is not None]
        assert len(seconds) == 20
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[-1] == 0


@settings(max_examples=examples(50), deadline=None)
@given(simple_chains(min_layers=20, max_layers=60, most=1000))
def test_on_longer_chains_one_pass_finds_what_all_pairs_find(chain: Chain) -> None:
    linear, quadratic = solve(chain, "hong-linear"), solve(chain, "hong-quadratic")
    assert linear.peak_bytes == quadratic.peak_bytes
    assert linear.extra_seconds == quadratic.extra_seconds
    assert linear.status is Status.OPTIMAL


@settings(max_examples=examples(50), deadline=None)
@given(chains(min_layers=20, max_layers=50, most=1000))
def test_on_longer_chains_of_any_kind_the_bounds_hold(chain: Chain) -> None:
    linear, quadratic = solve(chain, "hong-linear"), solve(chain, "hong-quadratic")
    moments = Moments(chain)
    assert Estimate.below(moments).least_peak() <= quadratic.peak_bytes <= linear.peak_bytes
    assert linear.peak_bytes <= Estimate.above(moments).least_peak()
    if linear.status is Status.OPTIMAL:
        assert linear.peak_bytes == quadratic.peak_bytes


@settings(max_examples=examples(150), deadline=None)
@given(chains(max_layers=8))
def test_no_set_of_checkpoints_has_a_smaller_textbook_sum_or_the_same_in_less_time(chain: Chain) -> None:
    solution = solve(chain, "hong-cubic")
    assert (solution.objective_bytes, solution.extra_seconds) == min(every_textbook_sum(chain))
    assert solution.objective_bytes == textbook_sum(chain, solution.checkpoints)


def cost_by_definition(price: Ints, last: Ints, costs: Ints, checkpoints: Sequence[int]) -> int:
    """The most held at once: at each segment all checkpoints up to its start, and what it costs."""
    held, worst = 0, 0
    for start, stop in pairwise([0, *checkpoints]):
        held += int(price[start])
        worst = max(worst, held + int(costs[start, stop]))
    return max(worst, held + int(last[checkpoints[-1] if checkpoints else 0]))


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_any_segment_costs_will_do_for_the_quadratic_recurrence(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    price = np.append(0, rng.integers(0, 9, n - 1))
    last, costs = rng.integers(0, 40, n) + price, rng.integers(0, 30, (n, n))
    sets = [cuts for count in range(n) for cuts in combinations(range(1, n), count)]
    by_definition = {cuts: cost_by_definition(price, last, costs, cuts) for cuts in sets}
    least = least_peak(price, last, lambda i: costs[i, i + 1 :])
    assert least == min(by_definition.values())
    for limit in sorted({*by_definition.values(), least - 1}):
        found = least_recomputation(price, last, lambda i: costs[i, i + 1 :], limit)
        fitting = [cuts[-1:] for cuts, cost in by_definition.items() if cost <= limit]
        assert (found is None) == (not fitting)
        if found is not None:
            assert by_definition[found] <= limit
            assert found[-1:] == min(fitting)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_one_pass_finds_the_same_for_costs_that_rise_with_the_segment(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    price = np.append(0, rng.integers(0, 9, n - 1))
    last = rng.integers(0, 60, n)
    saved = np.append(0, np.cumsum(rng.integers(0, 9, n)))
    worst = saved[: n - 1] + rng.integers(0, 20, n - 1)

    def segments_from(i: int) -> Ints:
        return np.asarray(np.maximum.accumulate(worst[i:]) - saved[i], np.int64)

    least = least_peak(price, last, segments_from)
    assert least_peak_in_one_pass(price, last, saved, worst) == least
    for limit in range(least - 1, least + 30, 3):
        found = least_recomputation(price, last, segments_from, limit)
        came_from, checkpoint = least_recomputation_in_one_pass(price, last, saved, worst, limit)
        assert checkpoint == (-1 if found is None else max(found, default=0))
        held = 0
        while checkpoint > 0:
            checkpoint = int(came_from[checkpoint])
            held += int(price[checkpoint])
        assert held <= limit or found is None


def test_segments_that_hold_their_output_and_its_gradient_are_one_such_case() -> None:
    """As reentrant checkpointing does, while any layer but the last of a segment goes back."""
    chain = alexnet()
    moments, n = Moments(chain), len(chain)
    costs = np.zeros((n, n), np.int64)
    for i, j in combinations(range(n), 2):
        inner = moments.backward[i : j - 1].max(initial=0) + chain.d[j] + chain.g[j]
        costs[i, j] = max(moments.backward[j - 1], inner) - chain.saved_before[i]

    def mebibytes(checkpoints: tuple[int, ...]) -> float:
        held = cost_by_definition(moments.price, moments.last, costs, checkpoints)
        return (moments.fixed_bytes + held) / MIB

    assert mebibytes((4, 7)) == pytest.approx(3785, abs=0.5)
    assert mebibytes((2, 4)) == pytest.approx(3221, abs=0.5)
    sets = [cuts for count in range(n) for cuts in combinations(range(1, n), count)]
    least = least_peak(moments.price, moments.last, lambda i: costs[i, i + 1 :])
    assert (moments.fixed_bytes + least) / MIB == min(map(mebibytes, sets))


@settings(max_examples=examples(30), deadline=None)
@given(chains(max_layers=12))
def test_without_the_compiler_the_answers_are_the_same(chain: Chain) -> None:
    for method in (HongLinear(), HongCubic()):
        expected = method.choose(chain, None)
        with pytest.MonkeyPatch.context() as patch:
            for loop in hong._loops.entries:
                patch.setattr(hong, loop, hong._loops.functions[loop])
            assert method.choose(chain, None) == expected


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", EXACT_METHODS, ids=lambda method: method.name)
def test_a_budget_that_no_plan_keeps_is_refused_with_the_least_that_one_does(method: Method) -> None:
    chain = Chain.from_sizes([0] + [10] * 9, names=[f"block{k}" for k in range(1, 10)])
    with pytest.raises(InfeasibleBudget, match=f"no plan of {method.name} fits in 59 B: .* 60 B") as refusal:
        solve(chain, method, 59)
    assert refusal.value.least_bytes == 60


def test_the_textbook_sum_takes_no_budget() -> None:
    with pytest.raises(BadRequest, match=r"^hong-cubic takes no budget: it minimises the textbook sum"):
        solve(Chain.from_sizes([1, 1]), "hong-cubic", 100)


def test_trying_everything_is_refused_for_long_chains() -> None:
    with pytest.raises(BadRequest) as refusal:
        solve(Chain.from_sizes([1] * 18, name="long"), "exhaustive")
    assert str(refusal.value) == (
        "exhaustive replays every plan, and long with its 17 layers has 2^16 of them; it takes chains of at "
        "most 16 layers. Use hong-quadratic, which finds the same, or rotor, which finds nested plans too."
    )
