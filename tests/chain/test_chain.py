"""Chains: what is filled in, what is refused, and the bound that no plan undercuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from lowtide.chain.chain import Chain
from lowtide.chain.unroll import replay
from lowtide.errors import BadRequest
from lowtide.solvers.chains.exhaustive import nested_plans
from tests.helpers.chains import chains, single_level_plans
from tests.helpers.effort import examples

# Drawn by hand --------------------------------------------------------------------------------------


def test_sizes_that_are_not_given_are_those_of_simple_layers() -> None:
    chain = Chain.from_sizes([1, 10, 20])
    assert chain.gradient_bytes == (1, 10, 20)
    assert chain.saved_bytes == (10, 20)
    assert chain.backward_bytes == (10 + 10 + 1, 20 + 20 + 10)
    assert chain.forward_bytes == (10, 20)
    assert chain.settled_bytes == (0, 0)
    assert chain.forward_seconds == (1.0, 1.0)
    assert chain.backward_seconds == (2.0, 2.0)
    assert chain.output_saved_by_itself == chain.output_saved_by_next == (True, True)
    assert (chain.base_bytes, len(chain), chain.seconds) == (0, 2, 6.0)


def test_what_is_settled_stays_through_all_later_backwards() -> None:
    chain = Chain.from_sizes([1, 10, 20], settled_bytes=[5, 7])
    assert chain.w.tolist() == [12, 7, 0]
    assert chain.backward_bytes == (10 + 10 + 1 + 12, 20 + 20 + 10 + 7)


def test_an_output_larger_than_what_its_layer_saves_is_not_among_it() -> None:
    chain = Chain.from_sizes([1, 10, 20], [9, 25])
    assert chain.kept.tolist() == [False, True]
    assert chain.own.tolist() == [9, 5]
    assert chain.forward_bytes == (9 + 10, 5 + 20)


def test_an_output_that_the_backward_has_no_room_for_is_saved_for_the_next_layer_only() -> None:
    chain = Chain.from_sizes([1, 10, 20], backward_bytes=[21, 39])
    assert chain.output_saved_by_itself == (True, False)
    assert chain.output_saved_by_next == (True, True)


def test_sums_are_over_the_layers_before() -> None:
    chain = Chain.from_sizes([1, 10, 20, 30], [11, 22, 33], forward_seconds=[1, 2, 4])
    assert chain.saved_before.tolist() == [0, 11, 33, 66]
    assert chain.forward_before.tolist() == [0.0, 1.0, 3.0, 7.0]


def test_layers_are_named_as_the_user_knows_them() -> None:
    assert Chain.from_sizes([1, 2]).layer(1) == "layer 1"
    assert Chain.from_sizes([1, 2, 3], names=["stem", "head"]).layer(2) == "layer 2 (head)"


def test_the_floor_is_the_worst_layer_with_its_input() -> None:
    chain = Chain.from_sizes([1, 10, 20, 5], base_bytes=100)
    assert chain.floor() == (100 + 1 + 10 + (20 + 20 + 10), 2)


def test_the_floor_counts_the_input_of_a_backward_only_if_it_was_saved() -> None:
    chain = Chain.from_sizes([0, 10, 10], [0, 10])
    assert chain.backward_bytes == (10, 30)
    assert chain.floor() == (30, 2)


def test_the_floor_may_be_a_forward() -> None:
    chain = Chain.from_sizes([0, 10, 10], forward_bytes=[10, 70])
    assert chain.floor() == (10 + 70, 2)


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(40), deadline=None)
@given(chains(max_layers=4))
def test_no_plan_undercuts_the_floor(chain: Chain) -> None:
    floor, worst = chain.floor()
    assert 1 <= worst <= len(chain)
    for plan in {*nested_plans(len(chain)), *single_level_plans(len(chain))}:
        assert replay(chain, plan).peak_bytes >= floor


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Chain.from_sizes([7]),
            "output_bytes has 1 entries; a chain of n layers has n + 1: the input and one output a layer. "
            "Give at least two.",
        ),
        (lambda: Chain.from_sizes([1, 2], [3, 4]), "saved_bytes has 2 entries, but 1 are needed."),
        (
            lambda: Chain.from_sizes([1, 2], gradient_bytes=[1]),
            "gradient_bytes has 1 entries, but 2 are needed.",
        ),
        (
            lambda: Chain.from_sizes([1, 2], settled_bytes=[]),
            "settled_bytes has 0 entries, but 1 are needed.",
        ),
        (lambda: Chain.from_sizes([1, 2], None, []), "backward_bytes has 0 entries, but 1 are needed."),
        (
            lambda: Chain.from_sizes([1, 2], forward_bytes=[]),
            "forward_bytes has 0 entries, but 1 are needed.",
        ),
        (
            lambda: Chain.from_sizes([1, 2], forward_seconds=[]),
            "forward_seconds has 0 entries, but 1 are needed.",
        ),
        (lambda: Chain.from_sizes([1, -2]), "output_bytes[1] is -2; sizes cannot be negative."),
        (lambda: Chain.from_sizes([1, 2], base_bytes=-1), "base_bytes[0] is -1; sizes cannot be negative."),
        (lambda: Chain.from_sizes([1.5, 2]), "output_bytes[0] is 1.5; sizes are whole numbers of bytes."),  # type: ignore[list-item]
        (lambda: Chain.from_sizes([1, True]), "output_bytes[1] is True; sizes are whole numbers of bytes."),
        (
            lambda: Chain.from_sizes([1, 2], forward_seconds=[-1]),
            "forward_seconds[0] is -1; give seconds, zero or more.",
        ),
        (
            lambda: Chain.from_sizes([1, 2], backward_seconds=[float("inf")]),
            "backward_seconds[0] is inf; give seconds, zero or more.",
        ),
        (
            lambda: Chain.from_sizes([1, 2], names=["a", "b"]),
            "names has 2 entries, but the chain has 1 layers.",
        ),
        (
            lambda: Chain.from_sizes([1, 2], forward_bytes=[1]),
            "forward_bytes of layer 1 is 1 B, less than its output and what it saves: 2 B.",
        ),
        (
            lambda: Chain.from_sizes([1, 9], None, [8], names=["stem"]),
            "backward_bytes of layer 1 (stem) is 8 B, less than what it saved, the gradient that arrives and "
            "what is settled: 9 B.",
        ),
        (
            lambda: Chain.from_sizes([9, 1], None, [8]),
            "backward_bytes of layer 1 is 8 B, less than the gradient that leaves and what is settled: 9 B.",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(make: Callable[[], Chain], message: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        make()
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"saved_bytes": (1, 2)},
            "saved_bytes of layer 1 is 1 B, less than its output, which is saved: 2 B.",
        ),
        ({"output_bytes": (1, 2)}, "output_bytes has 2 entries, but 3 are needed."),
        ({"gradient_bytes": (1, 2, 3, 4)}, "gradient_bytes has 4 entries, but 3 are needed."),
        (
            {"output_saved_by_itself": (True,)},
            "output_saved_by_itself has 1 entries, but the chain has 2 layers.",
        ),
        ({"output_saved_by_next": ()}, "output_saved_by_next has 0 entries, but the chain has 2 layers."),
        ({"backward_seconds": (1.0,)}, "backward_seconds has 1 entries, but the chain has 2 layers."),
        ({"names": ("a",)}, "names has 1 entries, but the chain has 2 layers."),
    ],
)
def test_a_chain_whose_parts_do_not_go_together_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        replace(Chain.from_sizes([1, 2, 2]), **change)
    assert str(refusal.value) == message


def test_a_chain_without_layers_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"^a chain needs at least one layer\.$"):
        Chain((1,), (1,), (), (), (), (), (), (), (), ())


def test_sizes_beyond_any_machine_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"output_bytes adds up to .* bytes, more than any machine has"):
        Chain.from_sizes([1, 2**70])
