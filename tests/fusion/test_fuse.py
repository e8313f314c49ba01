"""Ops as kernels: what is written and what is not, what a kernel reads and takes, and schedules of either."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import InfeasibleBudget
from lowtide.fusion.fuse import TARGET, Treatment, fused, last_op, of_ops, steps_of_ops
from lowtide.fusion.in_place import kept_too_long
from lowtide.ir.graph import Fused, Graph, Op, Phase, Ref, Role
from lowtide.ir.recomputable import BETWEEN_GRAPHS
from lowtide.ir.schedule import Schedule, straight
from lowtide.ir.simulate import simulate
from lowtide.ir.validate import validate
from lowtide.solvers import solve
from lowtide.solvers.kernels import in_kernels
from lowtide.solvers.method import Effort
from lowtide.solvers.ops.evict import Evict
from lowtide.solvers.solution import GraphSolution
from lowtide.text.budget import LOWEST
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, graphs, steps
from tests.helpers.slices import in_slices, two_layers

BACK = Phase.BACKWARD
TREATMENTS = {
    "mm": Treatment.WHOLE,
    "sum": Treatment.REDUCTION,
    "copy_": Treatment.REDUCTION,
}


def by_name(graph: Graph, op: Op) -> Treatment:
    """Products are a library's, sums are reductions, everything else is pointwise."""
    if op.target.startswith("lowtide."):
        return Treatment.WHOLE
    return TREATMENTS.get(op.target.split(".")[1], Treatment.POINTWISE)


def kernels_of(graph: Graph) -> Graph:
    return validate(fused(graph, by_name))


def members(graph: Graph) -> tuple[tuple[int, ...], ...]:
    assert graph.fused is not None
    return graph.fused.members


def written(graph: Graph) -> frozenset[int]:
    assert graph.fused is not None
    return graph.fused.written


# By hand ----------------------------------------------------------------------------------------------


def between_products() -> Graph:
    """Two pointwise ops between two products. Values, ops, bytes, seconds:

    resident   0 weight 100   1 x 100
    op 0 mm    (x, weight) → 2 h 1000       2 s
    op 1 relu  (h) → 3 a 1000               3 s
    op 2 mul   (a, x) → 4 b 1000            5 s
    op 3 mm    (b, weight) → 5 y 10         4 s
    """
    drawing = Drawing()
    weight = drawing.value("weight", 100, Role.PARAMETER)
    x = drawing.value("x", 100, Role.BATCH)
    h, a, b = (drawing.value(name, 1000) for name in "hab")
    y = drawing.value("y", 10)
    drawing.op("aten.mm.default", [x, weight], [h], seconds=2.0)
    drawing.op("aten.relu.default", [h], [a], seconds=3.0)
    drawing.op("aten.mul.Tensor", [a, x], [b], seconds=5.0)
    drawing.op("aten.mm.default", [b, weight], [y], seconds=4.0)
    return drawing.graph(outputs=[y], name="between products")


def test_a_pointwise_chain_between_two_products_is_one_kernel_that_writes_its_end() -> None:
    """It reads 1000 + 100 and writes 1000 of the 1000 + 1000 and 1000 + 100 + 1000 that its ops moved."""
    plain = between_products()
    graph = kernels_of(plain)
    assert graph.fused == Fused(plain, ((0,), (1, 2), (3,)), frozenset({0, 2, 3}))
    assert [op.id for op in graph.ops] == [0, 1, 2]
    assert (graph.ops[0], graph.ops[2]) == (plain.ops[0], replace(plain.ops[3], id=2))
    kernel = graph.ops[1]
    assert (kernel.target, kernel.args) == (TARGET, (Ref(2), Ref(1)))
    assert (kernel.reads, kernel.creates, kernel.outputs) == ((2, 1), (4,), (4,))
    assert kernel.seconds == pytest.approx(8 * 2100 / 4100)
    assert kernel.workspace_bytes == 0
    assert [value.bytes for value in graph.values] == [100, 100, 1000, 0, 1000, 10]
    assert graph.resident == (0, 1)
    assert simulate(graph, straight(graph)).peak_bytes == 200 + 1000 + 1000


def test_a_schedule_of_kernels_means_their_ops_in_turn_and_forgets_what_none_writes() -> None:
    plain = between_products()
    graph = kernels_of(plain)
    found = steps_of_ops(graph, steps(0, 1, "f2", 2, "f4"))
    assert found == list(steps(0, 1, 2, "f3", "f2", 3, "f4"))
    again = steps_of_ops(graph, steps(0, 1, "f4", 1, "f2", 2, "f4"))
    assert again == list(steps(0, 1, 2, "f3", "f4", 1, 2, "f3", "f2", 3, "f4"))
    simulate(plain, Schedule(tuple(again)))
    assert (of_ops(graph), of_ops(plain)) == (plain, plain)
    assert [last_op(graph, number) for number in range(3)] == [0, 2, 3]
    assert [last_op(plain, number) for number in range(4)] == [0, 1, 2, 3]
    assert steps_of_ops(plain, straight(plain)) == list(straight(plain))


def test_a_reduction_computes_what_it_reads_on_the_way() -> None:
    """exp is wanted by a quotient of 1000 elements and by a sum: both compute it from x, none writes it."""
    drawing = Drawing()
    x = drawing.value("x", 1000, Role.BATCH)
    e, total, y = drawing.value("e", 1000), drawing.value("total", 8), drawing.value("y", 1000)
    drawing.op("aten.exp.default", [x], [e], seconds=1.0)
    drawing.op("aten.sum.default", [e], [total], seconds=1.0)
    drawing.op("aten.div.Tensor", [e, total], [y], seconds=1.0)
    graph = kernels_of(drawing.graph(outputs=[y]))
    assert members(graph) == ((0, 1), (0, 2))
    assert written(graph) == {2}
    assert [op.reads for op in graph.ops] == [(x,), (x, total)]
    assert graph.ops[0].seconds == 2 * 0.5  # a kernel of two takes as long as one of them at least
    assert simulate(graph, straight(graph)).peak_bytes == 1000 + 8 + 1000
    plain = steps_of_ops(graph, straight(graph))
    assert plain == list(steps(0, 1, "f1", 0, 2, "f1", "f2"))
    assert simulate(of_ops(graph), Schedule(tuple(plain))).peak_bytes == 1000 + 1000 + 8 + 1000


def wanted_twice(second: int) -> Graph:
    """A sum of a product and of another tensor, that two products want element by element."""
    drawing = Drawing()
    x = drawing.value("x", 100, Role.BATCH)
    h, other, total = drawing.value("h", 1000), drawing.value("other", second), drawing.value("total", 1000)
    a, b, y = drawing.value("a", 1000), drawing.value("b", 1000), drawing.value("y", 10)
    drawing.op("aten.mm.default", [x], [h])
    drawing.op("aten.mm.default", [x], [other])
    drawing.op("aten.add.Tensor", [h, other], [total])
    drawing.op("aten.relu.default", [total], [a])
    drawing.op("aten.tanh.default", [total], [b])
    drawing.op("aten.mm.default", [a, b], [y])
    return drawing.graph(outputs=[y])


def test_a_sum_of_two_large_tensors_that_is_wanted_twice_is_written_once() -> None:
    assert members(kernels_of(wanted_twice(251))) == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert written(kernels_of(wanted_twice(251))) == {0, 1, 2, 3, 4, 5}
    assert members(kernels_of(wanted_twice(250))) == ((0,), (1,), (2, 3), (2, 4), (5,))
    assert written(kernels_of(wanted_twice(250))) == {0, 1, 3, 4, 5}


def test_what_takes_thirteen_ops_and_is_wanted_twice_is_written_once() -> None:
    def branching(count: int) -> Graph:
        drawing = Drawing()
        value = drawing.value("x", 1000, Role.BATCH)
        for number in range(count):
            made = drawing.value(f"v{number}", 1000)
            drawing.op("aten.relu.default", [value], [made])
            value = made
        ends = [drawing.value(name, 8) for name in "ab"]
        for end in ends:
            drawing.op("aten.sum.default", [value], [end])
        return drawing.graph(ends)

    shared = tuple(range(12))
    assert members(kernels_of(branching(12))) == ((*shared, 12), (*shared, 13))
    assert members(kernels_of(branching(13))) == ((*shared, 12), (13,), (14,))


def test_ops_for_a_few_numbers_do_not_count_but_where_the_compiler_writes_by_itself() -> None:
    """Of thirteen ops before two readers twelve are for each element, and one for each row."""
    drawing = Drawing()
    x, row = drawing.value("x", 1000, Role.BATCH), drawing.value("row", 8, Role.BATCH)
    root = drawing.value("root", 8)
    drawing.op("aten.rsqrt.default", [row], [root])
    value = x
    for number in range(12):
        made = drawing.value(f"v{number}", 1000)
        drawing.op("aten.mul.Tensor", [value, root], [made])
        value = made
    ends = [drawing.value(name, 8) for name in "ab"]
    for end in ends:
        drawing.op("aten.sum.default", [value], [end])
    graph, shared = drawing.graph(ends), tuple(range(13))
    assert members(kernels_of(graph)) == ((*shared, 13), (*shared, 14))
    assert members(fused(graph, by_name, as_told=False)) == ((shared), (13,), (14,))


def adding_up(between: bool) -> Graph:
    """Three products are added up, and the third is made after two of them are: or before."""
    drawing = Drawing()
    x = drawing.value("x", 100, Role.BATCH)
    a, b, c, two, three, y = (drawing.value(name, 1000) for name in ("a", "b", "c", "two", "three", "y"))
    made = [("aten.add.Tensor", [a, b], [two]), ("aten.mm.default", [x], [c])]
    drawing.op("aten.mm.default", [x], [a])
    drawing.op("aten.mm.default", [x], [b])
    for target, reads, creates in made if between else reversed(made):
        drawing.op(target, reads, creates)
    drawing.op("aten.add.Tensor", [two, c], [three])
    drawing.op("aten.mm.default", [three], [y])
    return drawing.graph(outputs=[y])


def test_what_is_added_up_does_not_wait_in_parts_for_what_a_library_makes() -> None:
    """Gradients of a weight that is used three times: two are there at once, not three."""
    assert members(kernels_of(adding_up(between=False))) == ((0,), (1,), (2,), (3, 4), (5,))
    graph = kernels_of(adding_up(between=True))
    assert members(graph) == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert simulate(graph, straight(graph)).peak_bytes == 100 + 3000


def masked(mask_bytes: int) -> Graph:
    """A mask of a product, made in the forward and wanted in the backward alone."""
    drawing = Drawing()
    x = drawing.value("x", 100, Role.BATCH)
    h, mask, y = drawing.value("h", 1000), drawing.value("mask", mask_bytes), drawing.value("y", 10)
    gradient, masked_, g = drawing.value("g", 1000), drawing.value("m", 1000), drawing.value("x.grad", 100)
    drawing.op("aten.mm.default", [x], [h])
    drawing.op("aten.gt.Scalar", [h], [mask])
    drawing.op("aten.mm.default", [h], [y])
    drawing.op("aten.mm.default", [y], [gradient], phase=BACK)
    drawing.op("aten.where.self", [mask, gradient], [masked_], phase=BACK)
    drawing.op("aten.mm.default", [masked_], [g], phase=BACK)
    return drawing.graph(outputs=[y, g])


def test_a_mask_that_waits_for_the_backward_is_written_if_it_is_small() -> None:
    small = kernels_of(masked(500))
    assert members(small) == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert written(small) == {0, 1, 2, 3, 4, 5}
    large = kernels_of(masked(501))
    assert members(large) == ((0,), (2,), (3,), (1, 4), (5,))
    assert large.ops[3].phase is BACK
    assert written(large) == {0, 2, 3, 4, 5}


def after_a_product(reader: str, **options: object) -> Drawing:
    """x → mm → h, relu → a, and whoever reads a."""
    drawing = Drawing()
    x = drawing.value("x", 100, Role.BATCH)
    h, a, y = (drawing.value(name, 1000) for name in "hay")
    drawing.op("aten.mm.default", [x], [h])
    drawing.op("aten.relu.default", [h], [a], **options)  # type: ignore[arg-type]
    drawing.op(reader, [a], [y])
    return drawing


def test_what_a_library_reads_is_written() -> None:
    assert members(kernels_of(after_a_product("aten.mm.default").graph([3]))) == ((0,), (1,), (2,))
    assert members(kernels_of(after_a_product("aten.tanh.default").graph([3]))) == ((0,), (1, 2))


def test_what_outlives_the_step_or_is_drawn_at_random_or_read_by_nobody_is_written() -> None:
    alone = ((0,), (1,), (2,))
    assert members(kernels_of(after_a_product("aten.tanh.default").graph([2, 3]))) == alone
    assert members(kernels_of(after_a_product("aten.tanh.default", random=True).graph([3]))) == alone
    unread = kernels_of(after_a_product("aten.tanh.default").graph())
    assert members(unread) == ((0,), (1, 2))
    assert written(unread) == {0, 2}


def test_kernels_end_where_a_captured_graph_does() -> None:
    graph = after_a_product("aten.tanh.default").graph([3])
    ops = (*graph.ops[:2], replace(graph.ops[2], section=1))
    assert members(kernels_of(replace(graph, ops=ops))) == ((0,), (1,), (2,))
    between = (graph.ops[0], *(replace(op, section=BETWEEN_GRAPHS) for op in graph.ops[1:]))
    assert members(kernels_of(replace(graph, ops=between))) == ((0,), (1,), (2,))


def test_what_an_op_changes_is_in_memory_and_nothing_is_computed_later_of_what_is_changed() -> None:
    drawing = after_a_product("aten.tanh.default")
    drawing.op("aten.copy_.default", mutates=[2])
    graph = kernels_of(drawing.graph([3]))
    assert members(graph) == ((0,), (1,), (2,), (3,))
    drawing = after_a_product("aten.tanh.default")
    drawing.op("aten.copy_.default", mutates=[1])  # h, of which a is computed: after all that is made of a
    assert members(kernels_of(drawing.graph([3]))) == ((0,), (1, 2), (3,))
    late = drawing.value("late", 1000)
    drawing.op("aten.sin.default", [2], [late])  # and before something is
    assert members(kernels_of(drawing.graph([3, late]))) == ((0,), (1,), (2,), (3,), (4,))


def test_a_kernel_that_changes_something_computes_on_the_way_what_it_writes() -> None:
    """The new running mean is computed and written in one kernel; the buffer is among its arguments."""
    drawing = after_a_product("aten.tanh.default")
    mean = drawing.value("mean", 1000, Role.BUFFER)
    drawing.op("aten.copy_.default", [3], mutates=[mean])
    graph = kernels_of(drawing.graph())
    assert members(graph) == ((0,), (1, 2, 3))
    kernel = graph.ops[1]
    assert (kernel.reads, kernel.mutates, kernel.creates) == ((1,), (mean,), ())
    assert kernel.args == (Ref(1), Ref(mean))


def test_a_kernel_reads_at_most_four_large_tensors_for_what_it_does_not_write() -> None:
    def summed(count: int) -> Graph:
        drawing = Drawing()
        made = [drawing.value(f"h{number}", 1000) for number in range(count)]
        total, y = drawing.value("total", 1000), drawing.value("y", 1000)
        for value in made:
            drawing.op("aten.mm.default", [], [value])
        drawing.op("aten.stack.default", made, [total])
        drawing.op("aten.relu.default", [total], [y])
        return kernels_of(drawing.graph([y]))

    assert members(summed(4))[-1] == (4, 5)
    assert members(summed(5))[-2:] == ((5,), (6,))


def test_a_kernel_of_fifty_ops_is_cut_in_two() -> None:
    drawing = Drawing()
    value = drawing.value("x", 1000, Role.BATCH)
    for number in range(50):
        made = drawing.value(f"v{number}", 1000)
        drawing.op("aten.relu.default", [value], [made])
        value = made
    assert members(kernels_of(drawing.graph([value]))) == (tuple(range(49)), (49,))


def test_blocks_of_slices_are_single_kernels_and_their_ops_come_back() -> None:
    sliced = in_slices(two_layers(), 2)
    graph = validate(fused(sliced, by_name))
    assert sliced.tiled is not None
    assert graph.tiled is None
    blocks = [op for op in graph.ops if op.target == "lowtide.block.default"]
    assert len(blocks) == len(sliced.tiled.blocks)
    assert [last_op(graph, op.id) for op in blocks] == [block.first for block in sliced.tiled.blocks]
    back = Schedule(tuple(steps_of_ops(graph, straight(graph))))
    assert set(back.computed) == set(range(len(sliced.ops)))
    assert simulate(sliced, back).peak_bytes >= simulate(graph, straight(graph)).peak_bytes


# Properties -------------------------------------------------------------------------------------------

treatments = st.lists(st.sampled_from(Treatment), min_size=8, max_size=8)


def at_random(graph: Graph, kinds: list[Treatment]) -> Graph:
    return validate(fused(graph, lambda _, op: kinds[op.id]))


@given(graphs(8), treatments)
def test_kernels_are_well_formed_and_every_op_is_in_one(graph: Graph, kinds: list[Treatment]) -> None:
    found = at_random(graph, kinds)
    assert {op for chain in members(found) for op in chain} == set(range(len(graph.ops)))
    assert all(list(chain) == sorted(set(chain)) for chain in members(found))
    assert [last_op(found, op.id) for op in found.ops] == sorted(chain[-1] for chain in members(found))
    for op, chain in zip(found.ops, members(found), strict=True):
        ends = graph.ops[chain[-1]]
        assert (op.creates, op.mutates, op.updates) == (ends.creates, ends.mutates, ends.updates)
        assert op.seconds <= sum(graph.ops[number].seconds for number in chain)
    assert found.outputs == graph.outputs
    assert found.resident == graph.resident
    assert simulate(found, straight(found)).resident_bytes == simulate(graph, straight(graph)).resident_bytes


@given(graphs(8), treatments)
def test_the_ops_of_a_plain_schedule_are_a_legal_schedule(graph: Graph, kinds: list[Treatment]) -> None:
    found = at_random(graph, kinds)
    simulate(graph, Schedule(tuple(steps_of_ops(found, straight(found)))))


@settings(max_examples=examples(60))
@given(graphs(8, seconds=st.sampled_from([0.0, 1.0, 2.0])), treatments, st.floats(0, 1))
def test_the_ops_of_whatever_is_planned_are_a_legal_schedule(
    graph: Graph, kinds: list[Treatment], part: float
) -> None:
    def planned(budget: str | int) -> GraphSolution:
        return in_kernels(
            graph,
            lambda _, op: kinds[op.id],
            lambda kernels: solve(kernels, Evict(Effort.QUICK), budget),
        )

    most = simulate(graph, straight(graph)).peak_bytes
    solutions = [planned(LOWEST)]
    with suppress(InfeasibleBudget):  # kernels that have to take new memory may need more
        solutions.append(planned(max(1, round(part * (most + solutions[0].peak_bytes)))))
    for solution in solutions:
        assert kept_too_long(solution.graph, solution.schedule) == frozenset()
        back = Schedule(tuple(steps_of_ops(solution.graph, solution.schedule)))
        assert simulate(graph, back).resident_bytes == solution.timeline.resident_bytes
