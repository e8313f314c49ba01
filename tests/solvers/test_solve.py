"""The one door to all methods: what goes in, what comes out, and that nothing passes the referee unseen."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given, settings

from lowtide.chain.chain import Chain, Kind
from lowtide.chain.plan import Plan
from lowtide.chain.unroll import replay
from lowtide.errors import BadRequest, InfeasibleBudget, UnknownMethod
from lowtide.solvers import methods, schedulers, solve
from lowtide.solvers.chains.baselines import EveryK, KeepAll
from lowtide.solvers.chains.rotor import Rotor
from lowtide.solvers.method import Method
from lowtide.solvers.refereed import SolverMistake
from lowtide.solvers.registry import OPS
from lowtide.solvers.solution import Answer, Status
from tests.helpers.chains import chains
from tests.helpers.effort import examples

LIGHT, HEAVY, MIXED = Kind.LIGHT, Kind.HEAVY, Kind.MIXED

FIVE = Chain.from_sizes([1] * 6)
"""Keeping all peaks at 8 bytes, one level at 6, nesting at 5."""

WIDE_IN_THE_MIDDLE = Chain.from_sizes(
    [4, 8, 64, 8, 4, 2], [20, 90, 30, 10, 3], settled_bytes=[1, 9, 9, 1, 0], base_bytes=100,
    names=("stem", "widen", "narrow", "neck", "loss"),
)  # fmt: skip
SHRINKING = Chain.from_sizes([512 >> k for k in range(8)], forward_seconds=[0.5 * k for k in range(7)])
NOTHING_SAVED = Chain.from_sizes([3, 3, 3, 3], [0, 0, 0], [6, 6, 6])
ONE_LAYER = Chain.from_sizes([5, 7], base_bytes=11)

BANK = [
    replace(chain, name=name, kinds=kinds)
    for name, chain, kinds in [
        ("five alike", FIVE, (HEAVY, LIGHT, LIGHT, HEAVY, MIXED)),
        ("wide in the middle", WIDE_IN_THE_MIDDLE, (MIXED, HEAVY, LIGHT, LIGHT, LIGHT)),
        ("shrinking", SHRINKING, (LIGHT, HEAVY) * 3 + (LIGHT,)),
        ("nothing saved", NOTHING_SAVED, (LIGHT, LIGHT, LIGHT)),
        ("one layer", ONE_LAYER, (HEAVY,)),
    ]
]

cut_in_stretches = ["keep-all", "every-k", "chen-sqrt", "chen-greedy"]
"""Methods whose plans are checkpoints and a last stretch that is kept: what hong-quadratic optimises."""


# The referee -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", BANK, ids=lambda chain: chain.name)
@pytest.mark.parametrize("name", methods())
def test_what_a_method_answers_is_replayed(name: str, chain: Chain) -> None:
    solution = solve(chain, name)
    assert solution.method == name
    assert solution.peak_bytes == replay(chain, solution.plan).peak_bytes == solution.timeline.peak_bytes
    assert solution.peak_bytes >= solution.lower_bound_bytes == chain.floor()[0]
    assert solution.extra_seconds == solution.plan.extra_seconds(chain)
    assert solution.status is Status.FEASIBLE or methods()[name].proves
    assert solution.planning_seconds >= 0
    assert solution.budget_bytes is None


@pytest.mark.parametrize("chain", BANK, ids=lambda chain: chain.name)
@pytest.mark.parametrize("name", [name for name, method in methods().items() if method.takes_budget])
def test_a_budget_holds_and_what_was_reached_without_one_is_reached_with_it(name: str, chain: Chain) -> None:
    least = solve(chain, name)
    solution = solve(chain, name, least.peak_bytes)
    assert solution.budget_bytes == least.peak_bytes
    assert solution.peak_bytes <= least.peak_bytes
    assert solution.extra_seconds <= least.extra_seconds


class _Liar(Method):
    """Says that keeping everything takes a byte."""

    name: ClassVar[str] = "liar"
    minimises: ClassVar[str] = "effort"
    takes_budget: ClassVar[bool] = True

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer:
        return Answer(Plan(), Status.OPTIMAL, None if budget_bytes else 1)


def test_a_method_that_claims_another_peak_is_caught() -> None:
    with pytest.raises(SolverMistake, match=r"liar says that keep all peaks at 1 bytes; replayed .* at 8\."):
        solve(FIVE, _Liar())


def test_a_method_that_overruns_its_budget_is_caught() -> None:
    with pytest.raises(SolverMistake, match=r"liar was given 7 bytes; its plan keep all peaks at 8\."):
        solve(FIVE, _Liar(), 7)
    assert solve(FIVE, _Liar(), 8).peak_bytes == 8


# By hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "peak_bytes", "extra_seconds"),
    [
        ("keep-all", 8, 0),
        ("every-k", 6, 3),
        ("chen-sqrt", 7, 2),
        ("chen-greedy", 6, 3),
        ("chen-recursive", 7, 5),
        ("hong-quadratic", 6, 3),
        ("rotor", 5, 9),
        ("exhaustive", 6, 3),
    ],
)
def test_five_equal_layers(method: str, peak_bytes: int, extra_seconds: float) -> None:
    solution = solve(FIVE, method)
    assert (solution.peak_bytes, solution.extra_seconds) == (peak_bytes, extra_seconds)


@pytest.mark.parametrize(
    ("budget", "budget_bytes", "peak_bytes"),
    [("100%", 8, 8), ("75%", 6, 6), (" 87.5 % ", 7, 7), (6, 6, 6), ("7B", 7, 7), ("8GiB", 8 << 30, 8)],
)
def test_a_budget_is_bytes_or_a_part_of_the_plain_peak(
    budget: str | int, budget_bytes: int, peak_bytes: int
) -> None:
    solution = solve(FIVE, "rotor", budget)
    assert (solution.budget_bytes, solution.peak_bytes) == (budget_bytes, peak_bytes)


def test_options_are_given_with_the_method() -> None:
    assert str(solve(FIVE, EveryK(k=2)).plan) == "[1-2][3-4]"
    coarse = solve(Chain.from_sizes([100] * 6), Rotor(slots=4), "80%")
    assert coarse.status is Status.FEASIBLE


def test_a_solution_tells_its_cost_relative_to_the_step() -> None:
    solution = solve(FIVE, EveryK(k=3))
    assert solution.extra_seconds_ratio == pytest.approx(3 / 15)  # one second forward, two back, five times
    assert solution.checkpoints == (3,)


def test_every_method_says_what_it_is() -> None:
    for name, method in methods().items():
        assert method.name == name
        assert method.minimises
        assert method.complexity.startswith("O(")
        assert method.reference
        assert isinstance(method.proves, str)
        assert isinstance(method.takes_budget, bool)
        assert method.__doc__
        assert method().name == name, "a method has no options that must be given"


def test_tables_show_methods_from_the_plainest_to_the_most_thorough() -> None:
    order = [
        "keep-all", "every-k", "selective", "chen-sqrt", "chen-greedy", "chen-recursive", "rotor",
        "exhaustive",
    ]  # fmt: skip
    assert [name for name in methods() if name in order] == order


# Properties ------------------------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(chains(max_layers=9))
def test_no_checkpoints_peak_lower_than_the_optimal_ones(chain: Chain) -> None:
    optimal = solve(chain, "hong-quadratic")
    for name in cut_in_stretches:
        assert solve(chain, name).peak_bytes >= optimal.peak_bytes, name
    assert solve(chain, Rotor(slots=10_000)).peak_bytes <= optimal.peak_bytes


@settings(max_examples=examples(60), deadline=None)
@given(chains(max_layers=8))
def test_no_checkpoints_are_faster_than_nested_ones_within_a_budget(chain: Chain) -> None:
    budget_bytes = max(1, solve(chain, "hong-quadratic").peak_bytes)
    fastest = solve(chain, Rotor(slots=10_000), budget_bytes)
    assert fastest.extra_seconds <= solve(chain, "hong-quadratic", budget_bytes).extra_seconds


# Refusals --------------------------------------------------------------------------------------------


def test_an_unknown_method_is_told_its_nearest() -> None:
    with pytest.raises(UnknownMethod, match=r"no method called 'roter'. Did you mean rotor") as caught:
        solve(FIVE, "roter")
    assert caught.value.nearest[0] == "rotor"
    assert caught.value.known == (*methods(), *schedulers(), OPS)


def test_a_method_without_budgets_names_those_with() -> None:
    with pytest.raises(
        BadRequest, match=r"^chen-sqrt takes no budget: it minimises .*These do: keep-all, "
    ) as e:
        solve(FIVE, "chen-sqrt", "60%")
    able = {name for name, method in methods().items() if method.takes_budget}
    assert set(str(e.value).rpartition("These do: ")[2].rstrip(".").split(", ")) == able
    assert {"keep-all", "every-k", "chen-greedy", "rotor"} <= able


@pytest.mark.parametrize(("method", "least_bytes"), [("rotor", 5), ("every-k", 6), ("keep-all", 8)])
def test_too_small_a_budget_is_told_the_least(method: str, least_bytes: int) -> None:
    with pytest.raises(
        InfeasibleBudget,
        match=rf"of {method} fits in 4 B: .* is {least_bytes} B \({least_bytes} bytes\), needed by layer",
    ) as caught:
        solve(FIVE, method, 4)
    error = caught.value
    assert (error.method, error.budget_bytes, error.least_bytes) == (method, 4, least_bytes)
    assert solve(FIVE, method, least_bytes).peak_bytes == least_bytes


def test_the_layer_that_needs_the_least_is_named_as_in_the_model() -> None:
    with pytest.raises(InfeasibleBudget, match=r"needed by widen\. Raise the budget") as caught:
        solve(WIDE_IN_THE_MIDDLE, "rotor", "10%")
    least_bytes = caught.value.least_bytes
    assert least_bytes == WIDE_IN_THE_MIDDLE.floor()[0]
    assert WIDE_IN_THE_MIDDLE.floor()[1] == 2


@pytest.mark.parametrize("budget", ["0%", "-5%", "lots%", "inf%", "%"])
def test_a_part_is_a_number_above_zero(budget: str) -> None:
    with pytest.raises(BadRequest, match=r"cannot read '.*' as a part of the plain peak"):
        solve(FIVE, KeepAll(), budget)


@pytest.mark.parametrize("budget", ["", "much", "-3", 0])
def test_bytes_are_a_number_above_zero(budget: str | int) -> None:
    with pytest.raises(BadRequest, match=r"Write a size such as"):
        solve(FIVE, KeepAll(), budget)


def test_what_is_neither_a_chain_nor_a_graph_is_refused() -> None:
    with pytest.raises(BadRequest, match="solve takes a Chain or a Graph, not a list"):
        solve([1, 2, 3], "rotor")  # type: ignore[call-overload]
