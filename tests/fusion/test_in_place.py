"""Kernels that write over what they read last: which do, what that spares, and plans that hold on to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import MalformedGraph
from lowtide.fusion.fuse import Treatment, fused
from lowtide.fusion.in_place import kept_too_long, overwriting
from lowtide.ir.graph import Graph, Op, Phase
from lowtide.ir.recomputable import BETWEEN_GRAPHS
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import allocator_of, simulate
from lowtide.ir.validate import validate
from lowtide.solvers.kernels import in_kernels
from lowtide.solvers.solution import GraphSolution
from tests.helpers.handmade import Drawing, graphs, solved, steps

BACK = Phase.BACKWARD


def kind_of(graph: Graph, op: Op) -> Treatment:
    """Products are a library's, everything else is a kernel of its own."""
    return Treatment.WHOLE if op.target.startswith("aten.mm") else Treatment.REDUCTION


def step(second: int = 1000, reader: bool = False) -> Graph:
    """A gradient that is scaled, and one that a product makes. Values, ops, bytes:

    resident   none
    op 0 mm    → 0 h 1000
    op 1 mm    (h) → 1 y 10
    op 2 mm    (y) → 2 g 1000            backward
    op 3 mul   (g, h) → 3 scaled 1000    backward: the last to read g, and h
    op 4 mm    (scaled) → 4 grad 100     backward
    """
    drawing = Drawing()
    h, y, g = drawing.value("h", 1000), drawing.value("y", 10), drawing.value("g", 1000)
    scaled, grad = drawing.value("scaled", second), drawing.value("grad", 100)
    drawing.op("aten.mm.default", [], [h])
    drawing.op("aten.mm.default", [h], [y])
    drawing.op("aten.mm.default", [y], [g], phase=BACK)
    drawing.op("aten.mul.Tensor", [g, h], [scaled], phase=BACK)
    drawing.op("aten.mm.default", [scaled, g, h] if reader else [scaled], [grad], phase=BACK)
    return drawing.graph(outputs=[y, grad])


# By hand ----------------------------------------------------------------------------------------------


def test_a_kernel_of_the_backward_writes_over_what_it_reads_last() -> None:
    """At op 3 there are y, g and h: 2010. The result takes the place of g."""
    graph = fused(step(), kind_of)
    assert [op.workspace_bytes for op in graph.ops] == [0, 0, 0, -1000, 0]
    assert simulate(step(), straight(step())).peak_bytes == 3010
    assert simulate(graph, straight(graph)).peak_bytes == 2010


def test_what_is_smaller_or_larger_or_read_later_or_of_another_type_is_not_written_over() -> None:
    for size in (999, 1001):
        assert [op.workspace_bytes for op in fused(step(second=size), kind_of).ops] == [0] * 5
    assert [op.workspace_bytes for op in fused(step(reader=True), kind_of).ops] == [0] * 5
    plain = step()
    tensors = tuple(replace(each, dtype="int8") if each.id in (0, 2) else each for each in plain.tensors)
    assert [op.workspace_bytes for op in fused(replace(plain, tensors=tensors), kind_of).ops] == [0] * 5


def test_library_kernels_and_those_of_the_forward_take_new_memory() -> None:
    whole = overwriting(step(), lambda op: False)
    assert [op.workspace_bytes for op in whole.ops] == [0] * 5
    forward = replace(step(), ops=tuple(replace(op, phase=Phase.FORWARD) for op in step().ops))
    assert [op.workspace_bytes for op in fused(forward, kind_of).ops] == [0] * 5
    assert fused(step(), kind_of, apart=frozenset({3})).ops[3].workspace_bytes == 0


def reading_h_alone() -> Graph:
    """The same, where what is scaled is h, which the forward has saved."""
    plain = step()
    without = replace(plain.ops[3], args=plain.ops[3].args[1:], reads=(0,))
    return replace(plain, ops=(*plain.ops[:3], without, plain.ops[4]))


def test_what_the_forward_has_saved_for_the_backward_alone_is_written_over() -> None:
    assert fused(reading_h_alone(), kind_of).ops[3].workspace_bytes == -1000


def test_what_somebody_else_may_have_is_not_written_over() -> None:
    plain = reading_h_alone()
    outside = tuple(replace(op, section=BETWEEN_GRAPHS) if op.id == 1 else op for op in plain.ops)
    assert fused(replace(plain, ops=outside), kind_of).ops[3].workspace_bytes == 0
    shown = replace(plain, outputs=plain.outputs | {0})
    assert fused(shown, kind_of).ops[3].workspace_bytes == 0


def test_what_was_spared_counts_as_the_allocator_rounds_it() -> None:
    graph = replace(step(), device="cuda:0")
    graph = replace(graph, values=tuple(replace(value, device="cuda:0") for value in graph.values))
    assert fused(graph, kind_of).ops[3].workspace_bytes == -1024


def test_a_schedule_that_holds_on_to_both_is_found() -> None:
    graph = fused(step(), kind_of)
    assert kept_too_long(graph, straight(graph)) == frozenset()
    assert kept_too_long(graph, steps(0, 1, 2, 3, "f2", 4, "f0", "f3")) == frozenset()
    assert kept_too_long(graph, steps(0, 1, 2, 3, "f0", 4, "f2", "f3")) == frozenset()
    assert kept_too_long(graph, steps(0, 1, 2, 3, 4, "f0", "f2", "f3")) == {3}
    assert kept_too_long(graph, steps(0, 1, 2, 3, 4)) == {3}


def test_a_plan_that_holds_on_to_what_was_counted_on_is_made_once_more_without() -> None:
    asked: list[list[int]] = []

    def stubborn(graph: Graph) -> GraphSolution:
        asked.append([op.workspace_bytes for op in graph.ops])
        return solved(graph, steps(0, 1, 2, 3, 4, "f0", "f2", "f3"))

    found = in_kernels(step(), kind_of, stubborn)
    assert asked == [[0, 0, 0, -1000, 0], [0] * 5]
    assert found.peak_bytes == 3110


# Properties -------------------------------------------------------------------------------------------

treatments = st.lists(st.sampled_from(Treatment), min_size=8, max_size=8)


@given(graphs(8), treatments)
def test_no_kernel_spares_more_than_it_makes_and_no_step_holds_more_for_it(
    graph: Graph, kinds: list[Treatment]
) -> None:
    everything = frozenset(range(len(graph.ops)))
    held = allocator_of(graph.device).held
    apart = fused(graph, lambda _, op: kinds[op.id], everything)
    over = fused(graph, lambda _, op: kinds[op.id])
    assert (over.values, over.fused) == (apart.values, apart.fused)
    for one, other in zip(over.ops, apart.ops, strict=True):
        made = [held(graph.counted_bytes(value)) for value in one.creates]
        assert other.workspace_bytes - one.workspace_bytes in (0, max(made, default=0))
    plain = straight(apart)
    assert simulate(over, plain).peak_bytes <= simulate(apart, plain).peak_bytes
    assert kept_too_long(over, straight(over)) == frozenset()


# Refusals ---------------------------------------------------------------------------------------------


def test_only_kernels_have_workspaces_below_nothing() -> None:
    graph = fused(step(), kind_of)
    assert validate(graph) is graph
    with pytest.raises(MalformedGraph, match=r"op 3 \(aten.mul\) costs -1000 bytes of workspace"):
        validate(replace(graph, fused=None))
