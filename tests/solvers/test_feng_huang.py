"""Feng and Huang's method: the textbook sum of chains, proved, and of arbitrary graphs, not proved."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan
from lowtide.chain.unroll import unrolled_graph
from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Origin, Phase, Role
from lowtide.ir.keep import forward_values
from lowtide.ir.schedule import Compute, straight
from lowtide.ir.simulate import simulate
from lowtide.solvers import solve
from lowtide.solvers.chains.division import Part, Shape, Trunk
from lowtide.solvers.chains.feng_huang import FengHuang
from lowtide.solvers.solution import GraphSolution, Status
from tests.helpers.chains import chains
from tests.helpers.effort import examples
from tests.helpers.forwards import row, shaped, strange, there_and_back
from tests.helpers.handmade import Drawing

# The referee ----------------------------------------------------------------------------------------


def subsets(members: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return (chosen for count in range(len(members) + 1) for chosen in combinations(members, count))


def textbook_of_chain(sizes: Sequence[int], kept: Iterable[int]) -> int:
    """Checkpoints and the largest stretch between them; tensors are numbered from 1."""
    ends = [0, *sorted(kept), len(sizes) + 1]
    stretches = (sum(sizes[k - 1] for k in range(first + 1, last)) for first, last in pairwise(ends))
    return sum(sizes[k - 1] for k in kept) + max(stretches)


def textbook_of_graph(graph: Graph, kept: AbstractSet[int]) -> int:
    """What is kept, and the largest set of other forward values that hang together."""
    forward = forward_values(graph)
    together = [
        {*op.reads, *op.creates} & forward - kept
        for op in graph.ops
        if forward & set(op.creates) and not kept & set(op.creates)
    ]
    pieces: list[set[int]] = []
    for group in together:
        joined = set(group).union(*(piece for piece in pieces if piece & group))
        pieces = [piece for piece in pieces if not piece & group] + [joined]
    weigh = graph.counted_bytes
    heaviest = max((sum(map(weigh, piece)) for piece in pieces), default=0)
    return sum(map(weigh, kept)) + heaviest


def kept_by(solution: GraphSolution) -> frozenset[int]:
    """What the method chose to keep; some of the rest may not be needed again."""
    return FengHuang().choose_kept(solution.graph).kept


def solved(graph: Graph) -> GraphSolution:
    """The solution, its claims checked."""
    solution = solve(graph, "feng-huang")
    assert (solution.method, solution.status) == ("feng-huang", Status.FEASIBLE)
    assert solution.objective_bytes == textbook_of_graph(graph, kept_by(solution))
    assert solution.lower_bound_bytes <= solution.peak_bytes == solution.timeline.peak_bytes
    return solution


def kept_for(solution: GraphSolution) -> tuple[list[int], int | None]:
    """What is kept, and the textbook sum of that."""
    return sorted(kept_by(solution)), solution.objective_bytes


# Chains ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "objective", "plan"),
    [
        ([5], 5, "keep all"),
        ([1, 1, 1, 1], 3, "[1-2]"),  # {2} and {3} both give 1 + 2
        ([9, 1, 9, 1, 9], 11, "[1-2][3-4]"),
        ([1] * 9, 5, "[1-5]"),  # 1 + 4; {3, 6} is as good and recomputes more
        ([8, 1, 1, 8], 10, "[1-2]"),  # 1 + 9; {2, 3} is as good and recomputes more
        ([0, 7, 0], 7, "keep all"),
        ([1, 1, 1, 1, 0, 1, 1, 1, 1], 4, "[1-5]"),  # 0 + 4; {3, 5, 7} is found first, with 2 + 2
    ],
)
def test_these_chains_have_these_plans(sizes: list[int], objective: int, plan: str) -> None:
    solution = solve(Chain.from_sizes([3, *sizes]), "feng-huang")
    assert (solution.objective_bytes, str(solution.plan)) == (objective, plan)
    assert solution.status is Status.OPTIMAL


def test_a_checkpoint_at_the_output_counts_but_is_no_segment() -> None:
    solution = solve(Chain.from_sizes([1, 4, 1, 4, 2]), "feng-huang")
    assert solution.objective_bytes == 1 + 6 == textbook_of_chain([4, 1, 4, 2], [2])
    assert textbook_of_chain([4, 1, 4, 2], [2, 4]) == 7  # as good, and the same plan
    assert solution.plan == Plan.at([2])


@settings(max_examples=examples(200), deadline=None)
@given(chains(max_layers=8))
def test_no_set_of_checkpoints_does_better_and_none_as_good_recomputes_less(chain: Chain) -> None:
    solution = solve(chain, "feng-huang")
    sizes = chain.output_bytes[1:]
    tensors = range(1, len(chain) + 1)
    values = {kept: textbook_of_chain(sizes, kept) for kept in subsets(tensors)}
    least = min(values.values())
    seconds = min(
        Plan.at(k for k in kept if k < len(chain)).extra_seconds(chain)
        for kept, value in values.items()
        if value == least
    )
    assert (solution.objective_bytes, solution.extra_seconds) == (least, seconds)


# Taking a graph apart -------------------------------------------------------------------------------

DIAMOND = there_and_back([(0,), (1,), (1,), (2, 3)], [10, 40, 30, 10])
RESIDUAL = there_and_back([(0,), (1,), (1, 2), (3,), (3, 4), (5,), (5, 6)], [10] * 7)
# 3, 6 and 9 put together all that came before; 4, 5 and 7, 8 are layers of two ops
DENSE = there_and_back(
    [(0,), (1,), (1, 2), (3,), (4,), (1, 2, 5), (6,), (7,), (1, 2, 5, 8)], [10, 5, 15, 20, 5, 20, 20, 5, 25]
)


def divided(graph: Graph) -> Part:
    return Trunk.of(graph).divide()


def test_a_diamond_is_a_line_with_branches_in_it() -> None:
    whole = divided(DIAMOND)
    assert (whole.shape, whole.cuts, whole.weight) == (Shape.LINE, (1, 4), 90)
    assert [part.weight for part in whole.parts] == [0, 70, 0]
    branches = whole.parts[1]
    assert (branches.shape, branches.cuts) == (Shape.BRANCHES, ())
    assert [(part.shape, part.cuts, part.weight) for part in branches.parts] == [
        (Shape.LINE, (2,), 40),
        (Shape.LINE, (3,), 30),
    ]


def test_a_skip_connection_does_not_keep_a_line_from_being_one() -> None:
    whole = divided(RESIDUAL)
    assert (whole.shape, whole.cuts) == (Shape.LINE, (1, 3, 5, 7))
    assert [part.cuts for part in whole.parts] == [(), (2,), (4,), (6,), ()]


def test_a_dense_block_is_a_knot_with_its_layers_as_parts() -> None:
    whole = divided(DENSE)
    assert (whole.shape, whole.cuts) == (Shape.LINE, (1, 9))
    knot = whole.parts[1]
    assert (knot.shape, knot.cuts, knot.weight) == (Shape.KNOT, (2, 3, 5, 6), 90)
    # of the last layer also the output: 9 alone reads it
    assert sorted((part.shape, part.cuts) for part in knot.parts) == [
        (Shape.LINE, (4,)),
        (Shape.LINE, (7, 8)),
    ]


def test_the_larger_of_two_overlapping_parts_is_taken() -> None:
    # 2 → 3 → 4 → 5 is a part; so are 2 → 3 → 4 and 3 → 4 → 5 inside it. 1 → 5 and 2 → 6 tie the knot.
    tied = there_and_back([(0,), (1,), (2,), (3,), (1, 4), (2, 5), (6,)], [1] * 7)
    knot = divided(tied).parts[1]
    assert (knot.shape, knot.cuts) == (Shape.KNOT, (2, 5))
    assert [part.cuts for part in knot.parts] == [(3, 4)]


def with_a_cast_weight(readers: int) -> Graph:
    """Row of 3, where op 2 also reads a value made of a parameter; with two readers, op 3 does too."""
    drawing = Drawing()
    batch, weight = drawing.value("batch", 1, Role.BATCH), drawing.value("weight", 4, Role.PARAMETER)
    cast, x1, x2, x3 = (drawing.value(name, 10) for name in ("cast", "x1", "x2", "x3"))
    gradient = drawing.value("gradient", 10)
    drawing.op("aten._to_copy.default", [weight], [cast])
    drawing.op("aten.relu.default", [batch], [x1])
    drawing.op("aten.mm.default", [x1, cast], [x2])
    drawing.op("aten.mm.default", [x2, cast] if readers == 2 else [x2], [x3])
    drawing.op("aten.mul.Tensor", [x1, x2, x3, cast], [gradient], phase=Phase.BACKWARD)
    return drawing.graph(outputs=[gradient])


def test_what_is_made_of_parameters_goes_with_its_only_reader() -> None:
    trunk = Trunk.of(with_a_cast_weight(1))
    assert trunk.ops == ((), (1,), (0, 2), (3,), ())
    assert trunk.weights == (0, 10, 20, 10, 0)
    assert trunk.divide().cuts == (1, 2, 3)


def test_what_is_made_of_parameters_for_several_is_kept() -> None:
    graph = with_a_cast_weight(2)
    assert Trunk.of(graph).ops == ((), (1,), (2,), (3,), ())
    assert 2 in kept_by(solved(graph))


def test_what_is_made_of_parameters_for_a_random_op_is_kept_like_it() -> None:
    graph = with_a_cast_weight(1)
    ops = (*graph.ops[:2], replace(graph.ops[2], random=True), *graph.ops[3:])
    trunk = Trunk.of(replace(graph, ops=ops))
    assert trunk.ops == ((), (1,), (2,), (3,), ())
    assert trunk.weights == (0, 10, 0, 10, 0)
    assert trunk.kept_anyway == {2}


def test_the_way_to_an_output_is_not_folded_up_though_something_comes_after_it() -> None:
    graph = there_and_back([(0,), (1,), (2,), (1,)], [1, 1, 1, 1])
    assert Trunk.of(graph).ops == ((), (0, 1, 2), (3,), ())  # for all one can see, 2 and 3 lead nowhere
    assert Trunk.of(replace(graph, outputs=frozenset({3}))).ops == ((), (0,), (1,), (2,), (3,), ())


def test_what_is_made_for_the_backward_alone_goes_with_what_it_is_made_of() -> None:
    drawing = Drawing()
    batch = drawing.value("batch", 1, Role.BATCH)
    x1, mask, mix, x2, x3, gradient = (drawing.value(name, 10) for name in ("a", "b", "c", "d", "e", "f"))
    drawing.op("aten.relu.default", [batch], [x1])
    drawing.op("aten.le.Scalar", [x1], [mask])
    drawing.op("aten.relu.default", [x1], [x2])
    drawing.op("aten.mul.Tensor", [x1, x2], [mix])  # of two: nowhere to go
    drawing.op("aten.relu.default", [x2], [x3])
    drawing.op("aten.mul.Tensor", [x3, mask, mix], [gradient], phase=Phase.BACKWARD)
    graph = drawing.graph(outputs=[gradient])
    assert Trunk.of(graph).ops == ((), (0, 1), (2,), (4,), ())
    assert mix in kept_by(solved(graph))


# Choosing in a graph --------------------------------------------------------------------------------


def test_of_a_diamond_its_ends_are_kept_and_the_branches_do_not_add_up() -> None:
    solution = solved(DIAMOND)
    assert kept_for(solution) == ([1, 4], 20 + 40)


def test_of_a_residual_chain_the_sums_are_kept() -> None:
    solution = solved(RESIDUAL)
    assert kept_for(solution) == ([3, 5], 20 + 20)
    assert solution.extra_seconds == 3  # x1, x2 and x4; the forward ends in x6, x7
    assert solution.peak_bytes < simulate(RESIDUAL, straight(RESIDUAL)).peak_bytes


def test_of_a_dense_block_all_that_divides_it_is_kept() -> None:
    solution = solved(DENSE)  # not keeping 8 costs as much, and recomputes more
    assert kept_for(solution) == ([1, 2, 3, 5, 6, 8, 9], 85 + 20)
    # which is not the best there is, and not claimed to be
    assert textbook_of_graph(DENSE, {1, 2, 3, 5, 6, 8}) == 60 + 25


def test_a_random_op_is_kept_paid_for_and_a_place_to_start_from() -> None:
    dropout = there_and_back([(0,), (1,), (2,), (3,), (4,)], [10, 10, 4, 10, 10], random={3})
    solution = solved(dropout)
    assert kept_for(solution) == ([3], 4 + 20)
    longer = solved(there_and_back([(k,) for k in range(13)], [10] * 6 + [30] + [10] * 6, random={7}))
    assert longer.objective_bytes == 30 + 20 + 30
    assert {7} < kept_by(longer)


def test_a_chain_and_its_graph_have_the_same_answer() -> None:
    sizes = [9, 1, 9, 1, 9]
    solution = solved(row(sizes))
    chain_solution = solve(Chain.from_sizes([3, *sizes]), "feng-huang")
    assert kept_for(solution) == ([2, 4], chain_solution.objective_bytes)
    assert chain_solution.checkpoints == (2, 4)


def test_the_lower_bound_is_the_op_that_needs_most() -> None:
    drawing = Drawing()
    x = drawing.value("x", 7, Role.BATCH)
    a, b = drawing.value("a", 10), drawing.value("b", 20)
    drawing.op("aten.mm.default", [x], [a], workspace=5)
    drawing.op("aten.mm.default", [a, x], [b], workspace=3)
    drawing.op("aten.mul.Tensor", [b], mutates=[b], phase=Phase.BACKWARD)
    assert solved(drawing.graph(outputs=[b])).lower_bound_bytes == 7 + 10 + 20 + 3


@settings(max_examples=examples(150), deadline=None)
@given(shaped())
def test_the_claim_is_what_is_kept_and_the_largest_segment(graph: Graph) -> None:
    solution = solved(graph)
    forward = forward_values(graph)
    assert {op.creates[0] for op in graph.ops if op.random} <= kept_by(solution) <= forward
    assert solution.objective_bytes is not None
    assert solution.objective_bytes <= textbook_of_graph(graph, forward)


@settings(max_examples=examples(150), deadline=None)
@given(strange())
def test_strange_graphs_are_solved_legally_too(graph: Graph) -> None:
    solved(graph)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_a_row_is_as_good_as_its_chain(sizes: list[int]) -> None:
    chain = Chain.from_sizes([1, *sizes])
    expected = solve(chain, "feng-huang").objective_bytes
    assert solved(row(sizes)).objective_bytes == solved(unrolled_graph(chain)).objective_bytes == expected


# A real model ---------------------------------------------------------------------------------------


def test_a_captured_resnet_keeps_less_and_its_batch_norms_are_recomputed() -> None:
    from lowtide.aot.capture import capture
    from lowtide.zoo import Sizes, workload

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        case = workload("resnet18", Sizes(batch=16, image=64, classes=10))
        graph = capture(case.model, case.args, case.loss)
    solution = solved(graph)
    plain = straight(graph)
    assert solution.peak_bytes < simulate(graph, plain).peak_bytes
    assert solution.objective_bytes is not None
    assert solution.objective_bytes < textbook_of_graph(graph, frozenset()) / 2
    again = Counter(solution.schedule) - Counter(plain)
    norms = [op.id for op in graph.ops if op.target == "aten.native_batch_norm.default"]
    assert sum(again[Compute(op)] for op in norms) >= len(norms) / 4


# Refusals -------------------------------------------------------------------------------------------


def test_a_method_for_chains_takes_no_graph() -> None:
    with pytest.raises(BadRequest, match=r"keep-all takes a chain, and handmade is a graph\. .*feng-huang\."):
        solve(DIAMOND, "keep-all")


def test_what_a_dry_run_saw_cannot_be_rearranged() -> None:
    with pytest.raises(
        BadRequest, match=r"handmade is an eager graph: .* Capture the model .* or build a chain"
    ):
        solve(replace(DIAMOND, origin=Origin.EAGER), FengHuang())


def test_neither_chain_nor_graph_comes_with_a_budget() -> None:
    with pytest.raises(BadRequest, match=r"feng-huang takes no budget: it minimises the textbook sum"):
        solve(Chain.from_sizes([1, 1]), "feng-huang", budget=10)
    with pytest.raises(BadRequest, match=r"feng-huang takes no budget on a graph"):
        solve(DIAMOND, "feng-huang", budget=10)
