"""What a plan does, event by event. Solvers are judged by this, so it is judged by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment
from lowtide.chain.unroll import replay, unrolled_graph, unrolled_schedule
from lowtide.errors import BadRequest
from lowtide.ir.schedule import Compute, Free
from lowtide.solvers.chains.exhaustive import nested_plans
from tests.helpers.chains import chains
from tests.helpers.effort import examples

NESTED = Plan((Segment(0, 3, (Segment(0, 2),)),))

# The names of things in the stories below: F3 is the forward of layer 3, B3 its backward, H3 handing the
# gradient on; t3 is its output, s3 what it saves beside, g3 the gradient of tensor 3. A minus is a free.
LETTERS = {"forward": "F", "backward": "B", "hand on": "H"}
WORDS = {"tensor": "t", "saved by layer": "s", "gradient of tensor": "g"}


def story(chain: Chain, plan: Plan) -> str:
    """The schedule in short, without the values of no size that only keep the order of a backward."""
    graph = unrolled_graph(chain)
    told = []
    for step in unrolled_schedule(chain, plan).steps:
        if isinstance(step, Compute):
            op = graph.ops[step.op]
            kind = op.target.removeprefix("chain.").removesuffix(".default")
            told.append("L" if kind == "loss" else LETTERS[kind] + op.module.removeprefix("layer "))
            continue
        assert isinstance(step, Free)
        name = graph.values[step.value].name
        if name == "gradient of the loss":
            told.append(f"-g{len(chain)}")
        elif not name.startswith("backward of"):
            what, _, number = name.rpartition(" ")
            told.append(f"-{WORDS[what]}{number}")
    return " ".join(told)


def peak(chain: Chain, plan: Plan) -> int:
    return replay(chain, plan).peak_bytes


# Drawn by hand --------------------------------------------------------------------------------------


def test_plain_training_saves_everything_until_its_backward() -> None:
    assert story(Chain.from_sizes([1, 10, 20]), Plan()) == "F1 F2 L B2 -s2 -g2 -t2 H2 B1 -s1 -g1 -t1 H1"


def test_an_output_that_nobody_saves_goes_once_it_has_been_read() -> None:
    chain = Chain.from_sizes([1, 10, 20], [2, 2])
    assert story(chain, Plan()) == "F1 F2 -t1 -t2 L B2 -s2 -g2 H2 B1 -s1 -g1 H1"


def test_an_output_saved_for_the_next_layer_only_goes_after_its_backward() -> None:
    chain = Chain.from_sizes([1, 10, 20], backward_bytes=[19, 39])
    assert not chain.by_itself.any()
    assert story(chain, Plan()) == "F1 F2 -t2 L B2 -s2 -g2 H2 -t1 B1 -s1 -g1 H1"


def test_a_segment_keeps_its_input_and_is_run_again_when_the_backward_arrives() -> None:
    assert story(Chain.from_sizes([1, 10, 20, 30]), Plan.at([2])) == (
        "F1 -s1 F2 -s2 -t1 F3 L "
        "B3 -s3 -g3 -t3 H3 -t2 "
        "F1 F2 B2 -s2 -g2 -t2 H2 B1 -s1 -g1 -t1 H1"
    )  # fmt: skip


def test_a_checkpoint_that_the_kept_stretch_does_not_need_goes_at_once() -> None:
    assert story(Chain.from_sizes([1, 10, 20], [2, 2]), Plan.at([1])) == (
        "F1 -s1 F2 -t1 -t2 L B2 -s2 -g2 H2 "
        "F1 -t1 B1 -s1 -g1 H1"
    )  # fmt: skip


def test_a_checkpoint_between_segments_stays_until_the_later_one_is_done() -> None:
    assert story(Chain.from_sizes([1, 10, 20, 30], [2, 2, 2]), Plan.at([1, 2])) == (
        "F1 -s1 F2 -s2 F3 -t2 -t3 L B3 -s3 -g3 H3 "
        "F2 -t2 B2 -s2 -g2 H2 -t1 "
        "F1 -t1 B1 -s1 -g1 H1"
    )  # fmt: skip


def test_a_segment_inside_a_segment_is_passed_through_again() -> None:
    assert story(Chain.from_sizes([0, 10, 10, 10, 10]), NESTED) == (
        "F1 -s1 F2 -s2 -t1 F3 -s3 -t2 F4 L B4 -s4 -g4 -t4 H4 -t3 "
        "F1 -s1 F2 -s2 -t1 F3 B3 -s3 -g3 -t3 H3 -t2 "
        "F1 F2 B2 -s2 -g2 -t2 H2 B1 -s1 -g1 -t1 H1"
    )  # fmt: skip


def test_the_last_stretch_can_be_recomputed_too() -> None:
    assert story(Chain.from_sizes([1, 10, 20]), Plan.at([1, 2])) == (
        "F1 -s1 F2 -s2 -t2 L F2 B2 -s2 -g2 -t2 H2 -t1 F1 B1 -s1 -g1 -t1 H1"
    )


@pytest.mark.parametrize(
    ("plan", "peak_bytes"),
    [
        (Plan(), 1 + (10 + 20) + (30 + 30 + 20)),  # in B3, with what layers 1 and 2 saved
        (Plan.at([1]), 1 + 10 + 20 + (30 + 30 + 20)),  # the checkpoint is as large as what layer 1 saves
        (Plan.at([2]), 1 + 20 + (30 + 30 + 20)),  # in B3, with the checkpoint alone
        (Plan.at([1, 2]), 1 + 10 + 20 + (30 + 30 + 20)),
    ],
)
def test_the_peak_is_in_the_backward_of_the_largest_layer(plan: Plan, peak_bytes: int) -> None:
    assert peak(Chain.from_sizes([1, 10, 20, 30]), plan) == peak_bytes


def test_the_base_is_always_there() -> None:
    assert peak(Chain.from_sizes([1, 10, 20, 30], base_bytes=1000), Plan.at([2])) == 1101


def test_the_peak_may_be_where_a_segment_is_recomputed() -> None:
    chain = Chain.from_sizes([0, 10, 10, 10], forward_bytes=[10, 60, 10])
    assert peak(chain, Plan()) == 10 + 60  # F2 beside tensor 1
    assert peak(chain, Plan.at([2])) == 10 + 60 + 10  # F2 again, and the gradient of tensor 2 waits
    assert peak(chain, Plan.at([1])) == 10 + 60


def test_a_checkpoint_that_is_not_needed_counts_for_one_forward_only() -> None:
    chain = Chain.from_sizes([0, 50, 10, 10], [5, 10, 10], gradient_bytes=[0, 5, 10, 10])
    assert peak(chain, Plan()) == 50 + 5 + 10  # F2 reads tensor 1, beside what layer 1 saved
    assert peak(chain, Plan.at([1])) == 50 + 10  # the same without that
    assert peak(chain, Plan.at([1, 2])) == 50 + 10 + 30  # B3 with both checkpoints


def test_settled_bytes_stay_to_the_end() -> None:
    chain = Chain.from_sizes([3, 10, 10], settled_bytes=[5, 7])
    assert peak(chain, Plan()) == 3 + 10 + (10 + 10 + 10 + 7)
    assert peak(chain, Plan.at([1])) == 3 + 10 + (10 + 10 + 10 + 7)
    assert replay(chain, Plan.at([1])).live_bytes[-1] == 3 + 3 + (5 + 7)  # input, its gradient, settled


def test_nesting_holds_less_than_one_level_can() -> None:
    chain = Chain.from_sizes([0, 10, 10, 10, 10])
    assert peak(chain, Plan()) == 30 + 30
    assert peak(chain, Plan.at([2])) == 10 + 10 + 30
    assert peak(chain, NESTED) == 10 + 30  # each backward with one tensor beside


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(chains(max_layers=5), st.data())
def test_any_nested_plan_runs_each_backward_once_and_each_forward_as_often_as_it_says(
    chain: Chain, data: st.DataObject
) -> None:
    plan = data.draw(st.sampled_from(list(nested_plans(len(chain)))))
    graph = unrolled_graph(chain)
    computes = [step for step in replay(chain, plan).steps if isinstance(step, Compute)]
    runs = Counter((graph.ops[step.op].target, graph.ops[step.op].module) for step in computes)
    for k in range(1, len(chain) + 1):
        around = sum(segment.start < k <= segment.stop for segment in plan.walk())
        assert runs["chain.forward.default", f"layer {k}"] == 1 + around
        assert runs["chain.backward.default", f"layer {k}"] == 1
    seconds = sum(graph.ops[step.op].seconds for step in computes)
    assert seconds == chain.seconds + plan.extra_seconds(chain)


@settings(max_examples=examples(100), deadline=None)
@given(chains(max_layers=5), st.data())
def test_in_the_end_only_gradients_are_left(chain: Chain, data: st.DataObject) -> None:
    plan = data.draw(st.sampled_from(list(nested_plans(len(chain)))))
    left = chain.base_bytes + chain.output_bytes[0] + chain.gradient_bytes[0] + sum(chain.settled_bytes)
    assert replay(chain, plan).live_bytes[-1] == left


@settings(max_examples=examples(60), deadline=None)
@given(chains(max_layers=5), st.data())
def test_to_recompute_the_last_stretch_too_never_lowers_the_peak(chain: Chain, data: st.DataObject) -> None:
    n = len(chain)
    cuts = data.draw(st.sets(st.integers(1, n - 1)) if n > 1 else st.just(set()))
    assert peak(chain, Plan.at([*cuts, n])) >= peak(chain, Plan.at(cuts))


# Refusals -------------------------------------------------------------------------------------------


def test_a_plan_for_a_longer_chain_is_refused() -> None:
    with pytest.raises(BadRequest) as refusal:
        replay(Chain.from_sizes([1, 1, 1], name="tiny"), Plan.at([1, 5]))
    assert str(refusal.value) == (
        "the plan [1-1][2-5] recomputes layer 5, but tiny has only 2 layers: it was made for another chain."
    )
