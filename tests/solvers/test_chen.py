"""Chen et al.'s three rules: where they put checkpoints, and what the steps then are."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment
from lowtide.chain.unroll import replay, unrolled_graph, unrolled_schedule
from lowtide.ir.schedule import Compute, Free
from lowtide.solvers.chains.chen import ChenGreedy, ChenRecursive, ChenSqrt, equal_cuts
from lowtide.solvers.solution import Status
from tests.helpers.chains import chains
from tests.helpers.effort import examples


def alike(n: int) -> Chain:
    return Chain.from_sizes([1] * (n + 1))


def steps(chain: Chain, plan: Plan) -> str:
    """The schedule in short: F3 and B3 run layer 3, -S3 frees what it saved, -x3 its output.

    Left out is what follows each backward under every plan: the gradient that is handed on.
    """
    graph = unrolled_graph(chain)
    words = []
    for step in unrolled_schedule(chain, plan):
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            letter = {"chain.forward.default": "F", "chain.backward.default": "B"}.get(op.target)
            name = op.module
        else:
            assert isinstance(step, Free)
            name = graph.values[step.value].name
            letter = "-S" if name.startswith("saved") else "-x" if name.startswith("tensor") else None
        if letter is not None:
            words.append(letter + name.split()[-1])
    return " ".join(words)


# By hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "plan", "expected"),
    [
        (1, "keep all", "F1 B1 -S1 -x1"),
        (
            4,
            "[1-2 [1-1]][3-3]",
            """F1 -S1 F2 -S2 -x1  F3 -S3  F4  B4 -S4 -x4 -x3
            F3 B3 -S3 -x3 -x2
            F1 -S1 F2 B2 -S2 -x2 -x1
            F1 B1 -S1 -x1""",
        ),
        (
            8,
            "[1-4 [1-2 [1-1]][3-3]][5-6 [5-5]][7-7]",
            """F1 -S1 F2 -S2 -x1 F3 -S3 -x2 F4 -S4 -x3  F5 -S5 F6 -S6 -x5  F7 -S7  F8  B8 -S8 -x8 -x7
            F7 B7 -S7 -x7 -x6
            F5 -S5 F6 B6 -S6 -x6 -x5
            F5 B5 -S5 -x5 -x4
            F1 -S1 F2 -S2 -x1  F3 -S3  F4 B4 -S4 -x4 -x3
            F3 B3 -S3 -x3 -x2
            F1 -S1 F2 B2 -S2 -x2 -x1
            F1 B1 -S1 -x1""",
        ),
        (
            13,
            "[1-6 [1-3 [1-1][2-2]][4-4][5-5]][7-9 [7-7][8-8]][10-11 [10-10]][12-12]",
            """F1 -S1 F2 -S2 -x1 F3 -S3 -x2 F4 -S4 -x3 F5 -S5 -x4 F6 -S6 -x5
            F7 -S7 F8 -S8 -x7 F9 -S9 -x8  F10 -S10 F11 -S11 -x10  F12 -S12  F13 B13 -S13 -x13 -x12
            F12 B12 -S12 -x12 -x11
            F10 -S10 F11 B11 -S11 -x11 -x10
            F10 B10 -S10 -x10 -x9
            F7 -S7  F8 -S8  F9 B9 -S9 -x9 -x8
            F8 B8 -S8 -x8 -x7
            F7 B7 -S7 -x7 -x6
            F1 -S1 F2 -S2 -x1 F3 -S3 -x2  F4 -S4  F5 -S5  F6 B6 -S6 -x6 -x5
            F5 B5 -S5 -x5 -x4
            F4 B4 -S4 -x4 -x3
            F1 -S1  F2 -S2  F3 B3 -S3 -x3 -x2
            F2 B2 -S2 -x2 -x1
            F1 B1 -S1 -x1""",
        ),
    ],
)
def test_halving_computes_and_frees_in_this_order(n: int, plan: str, expected: str) -> None:
    answer = ChenRecursive().choose(alike(n), None)
    assert (str(answer.plan), answer.status) == (plan, Status.FEASIBLE)
    assert steps(alike(n), answer.plan) == " ".join(expected.split())


@pytest.mark.parametrize(
    ("n", "plan"),
    [
        (1, "keep all"),
        (2, "keep all"),
        (3, "[1-1]"),
        (4, "[1-2]"),
        (9, "[1-3][4-6]"),
        (10, "[1-3][4-6]"),
        (16, "[1-4][5-8][9-12]"),
    ],
)
def test_the_square_root_of_the_layers(n: int, plan: str) -> None:
    answer = ChenSqrt().choose(alike(n), None)
    assert (str(answer.plan), answer.status) == (plan, Status.FEASIBLE)


def test_nine_layers_in_five_stretches_leave_no_remainder_to_the_last() -> None:
    assert equal_cuts(9, 5) == [1, 3, 5, 7]  # 1, 2, 2, 2 and 2 layers


def test_the_greedy_rule_tries_limits_around_the_balance() -> None:
    """Sixteen equal layers. Limit 0: x = 15, y = 1, so √15 = 3.87, and six from 2.74 to 5.48.

    The stretches are then of 1, 4, 3, 4, 4, 5, 5 and 6 layers. The peak of all but the first is 10, and
    those of 4 and of 6 layers keep the most in the end.
    """
    answer = ChenGreedy().choose(alike(16), None)
    assert answer is not None
    assert str(answer.plan) == "[1-4][5-8][9-12]"
    assert answer.peak_bytes == 10
    assert answer.plan.extra_seconds(alike(16)) == 12


def test_the_greedy_rule_goes_by_size() -> None:
    """d = 8 1 6 1 4 1 and a = 8 9 6 7 4 5, so x = 21, y = 9, and the limits are 0, 13.7 and 9.7 … 19.4."""
    chain = Chain.from_sizes([2, 8, 1, 6, 1, 4, 1, 4], [8, 9, 6, 7, 4, 5, 4])
    answer = ChenGreedy().choose(chain, None)
    assert answer is not None
    assert (str(answer.plan), answer.peak_bytes) == ("[1-2][3-4]", 28)
    faster = ChenGreedy().choose(chain, 33)
    assert faster is not None
    assert (str(faster.plan), faster.peak_bytes) == ("[1-3]", 33)
    assert ChenGreedy().choose(chain, 27) is None


# Properties ------------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.integers(1, 40))
def test_stretches_differ_by_a_layer_at_most(n: int, stretches: int) -> None:
    if stretches > n:
        return
    ends = [0, *equal_cuts(n, stretches), n]
    lengths = {stop - start for start, stop in pairwise(ends)}
    assert len(ends) == stretches + 1
    assert max(lengths) - min(lengths) <= 1


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(2, 200))
def test_halving_holds_no_more_tensors_than_it_can_halve(n: int) -> None:
    """Beside the input and a layer's backward, which is its output and both gradients."""
    answer = ChenRecursive().choose(alike(n), None)
    assert replay(alike(n), answer.plan).peak_bytes <= 1 + math.ceil(math.log2(n)) + 3
    assert answer.plan.recomputed_layers() <= n / 2 * math.log2(n)


@settings(max_examples=examples(50), deadline=None)
@given(chains(max_layers=9), st.integers(0, 120))
def test_the_greedy_rule_keeps_to_a_budget(chain: Chain, budget_bytes: int) -> None:
    least = ChenGreedy().choose(chain, None)
    assert least is not None
    assert least.peak_bytes is not None
    answer = ChenGreedy().choose(chain, budget_bytes)
    assert (answer is None) == (budget_bytes < least.peak_bytes)
    if answer is not None:
        assert replay(chain, answer.plan).peak_bytes == answer.peak_bytes
        assert answer.peak_bytes is not None
        assert answer.peak_bytes <= budget_bytes
        assert answer.plan.extra_seconds(chain) <= least.plan.extra_seconds(chain)


@settings(max_examples=examples(50), deadline=None)
@given(chains(max_layers=12))
def test_the_last_layer_is_never_recomputed(chain: Chain) -> None:
    for method in (ChenSqrt(), ChenGreedy(), ChenRecursive()):
        answer = method.choose(chain, None)
        assert answer is not None
        assert all(segment.stop < len(chain) for segment in answer.plan.segments)
        assert all(_ends_with_a_layer_that_saves(segment) for segment in answer.plan.walk())


def _ends_with_a_layer_that_saves(segment: Segment) -> bool:
    return not segment.inside or segment.inside[-1].stop < segment.stop
