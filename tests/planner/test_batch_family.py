"""Graphs for any batch from two: exact numbers on drawn graphs, and every way in which two are on no line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.ir.graph import Graph, Phase, Role, Tensor
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.ir.validate import validate
from lowtide.planner.batch_family import DoesNotScale, check_same_sizes, family_of, with_costs_of
from lowtide.planner.largest import largest_that
from tests.helpers.handmade import Drawing


def drawn(batch: int, *, workspace: int = 7, seconds: float = 0.5, module: str = "conv") -> Graph:
    """weight 40, batch 10·n → hidden 100·n + 3 → loss 4 → weight.grad 40. Workspace 7·n, 0.5 + 0.25·n s."""
    drawing = Drawing()
    weight = drawing.value("weight", 40, Role.PARAMETER)
    data = drawing.value(f"batch ({batch}, 10)", 10 * batch, Role.BATCH)
    hidden = drawing.value("hidden", 100 * batch + 3)
    loss = drawing.value("loss", 4)
    grad = drawing.value("weight.grad", 40, Role.GRADIENT)
    drawing.op(
        "aten.convolution.default",
        [data, weight],
        [hidden],
        extra=[batch, 1.0 / batch],
        module=module,
        workspace=workspace * batch,
        seconds=seconds + 0.25 * batch,
    )
    drawing.op("aten.sum.default", [hidden], [loss], seconds=1e-3)
    drawing.op("aten.backward.default", [hidden], [grad], phase=Phase.BACKWARD)
    return drawing.graph([loss, grad])


def test_everything_that_grows_with_the_batch_grows_along_a_line() -> None:
    graph = family_of(drawn(4), drawn(8), (4, 8)).at(100)
    assert [value.bytes for value in graph.values] == [40, 1000, 10003, 4, 40]
    assert [tensor.shape for tensor in graph.tensors] == [(40,), (1000,), (10003,), (4,), (40,)]
    assert [op.workspace_bytes for op in graph.ops] == [700, 0, 0]
    assert [op.seconds for op in graph.ops] == [25.5, 1e-3, 0.0]
    assert all(op.extrapolated for op in graph.ops)


@pytest.mark.parametrize("batch", [1, 2, 4, 5, 8, 1000])
def test_a_scaled_graph_is_the_one_that_a_capture_makes(batch: int) -> None:
    scaled, real = family_of(drawn(4), drawn(8), (4, 8)).at(batch), drawn(batch)
    check_same_sizes(scaled, real)
    assert [value.bytes for value in scaled.values] == [value.bytes for value in real.values]
    assert simulate(scaled, straight(scaled)).peak_bytes == simulate(real, straight(real)).peak_bytes
    assert validate(scaled)


def test_at_a_sample_nothing_is_extrapolated() -> None:
    graph = family_of(drawn(4), drawn(8), (4, 8)).at(8)
    assert not any(op.extrapolated for op in graph.ops)
    assert [op.seconds for op in graph.ops] == [op.seconds for op in drawn(8).ops]


def test_costs_that_fall_are_taken_to_stay() -> None:
    family = family_of(drawn(4, workspace=20), drawn(8, workspace=5), (4, 8))
    assert family.at(100).ops[0].workspace_bytes == 40  # 80 at four, 40 at eight


def test_costs_never_begin_below_nothing() -> None:
    """A line through 4: 0 and 8: 40 would be steeper than one from nothing at no batch at all."""
    family = family_of(drawn(4, workspace=0), drawn(8, workspace=5), (4, 8))
    assert family.at(16).ops[0].workspace_bytes == 80


def test_a_capture_takes_over_the_costs_of_the_same_step() -> None:
    scaled = replace(family_of(drawn(4), drawn(8), (4, 8)).at(16), profiled_on="cpu", notes=("rough",))
    graph = with_costs_of(drawn(16, workspace=0, seconds=9.0), scaled)
    assert (graph.ops[0].workspace_bytes, graph.ops[0].seconds) == (112, 4.5)
    assert graph.ops[0].args == drawn(16).ops[0].args  # what is not a cost stays
    assert graph.ops[0].extrapolated
    assert (graph.profiled_on, graph.notes) == ("cpu", ("rough",))


def test_a_storage_follows_from_the_extents_of_what_looks_at_it() -> None:
    """Scores of all with all: (n, n) numbers of four bytes. And 12 bytes that nothing looks at."""

    def scores(batch: int) -> Graph:
        drawing = Drawing()
        made = drawing.value("scores", 4 * batch * batch + 12)
        drawing.op("aten.mm.default", creates=[made])
        looks = Tensor(0, made, (batch, batch), (batch, 1), 0, "float32")
        return replace(drawing.graph(), tensors=(looks,))

    graph = family_of(scores(4), scores(8), (4, 8)).at(100)
    assert graph.values[0].bytes == 4 * 100 * 100 + 12
    assert graph.tensors[0].stride == (100, 1)


def test_strides_follow_from_the_extents_inside_of_them() -> None:
    """Scores of two heads: a head is n² apart from the next. Cut out of a row of three, so is every third."""

    def scores(length: int) -> Graph:
        drawing = Drawing()
        made = drawing.value("scores", 4 * 2 * 3 * length * length)
        drawing.op("aten.bmm.default", creates=[made])
        shape, stride = (2, length, length), (3 * length * length, length, 1)
        return replace(drawing.graph(), tensors=(Tensor(0, made, shape, stride, 0, "float32"),))

    graph = family_of(scores(4), scores(8), (4, 8)).at(7)
    assert graph.tensors[0].stride == (147, 7, 1)
    check_same_sizes(graph, scores(7))


def rounded(length: int) -> Graph:
    """What a kernel takes is a multiple of 32, what it is given is not."""
    drawing = Drawing()
    taken = -(-length // 32) * 32
    given, made = drawing.value("given", 4 * length), drawing.value("statistics", 4 * taken)
    drawing.op("aten.attention.default", [given], [made])
    looks = (
        Tensor(0, given, (length,), (1,), 0, "float32"),
        Tensor(1, made, (taken,), (1,), 0, "float32"),
    )
    return replace(drawing.graph(), tensors=looks)


def test_a_third_capture_tells_what_kernels_round_up() -> None:
    told = family_of(rounded(64), rounded(128), (64, 128), "length").told_by(rounded(65), 65)
    assert told.rounded_to == (1, 32)
    for length in (1, 31, 32, 33, 100, 1000):
        check_same_sizes(told.at(length), rounded(length))


def test_what_is_off_its_line_and_not_rounded_up_is_refused() -> None:
    """Rounded to 32 it is not: 96 is what 70 would be, and 65 is told to be 97."""
    family = family_of(rounded(64), rounded(128), (64, 128), "length")
    given, made = rounded(65).tensors
    odd = replace(rounded(65), tensors=(given, replace(made, shape=(97,))))
    with pytest.raises(DoesNotScale, match=r"'statistics' was expected to be \(65,\) and is \(97,\)"):
        family.told_by(odd, 65)


def test_bytes_that_extents_explain_must_be_those_of_the_capture() -> None:
    scaled, real = family_of(drawn(4), drawn(8), (4, 8)).at(16), drawn(16)
    values = [replace(value, bytes=1700) if value.id == 2 else value for value in real.values]
    with pytest.raises(DoesNotScale, match="'hidden' was expected to take 1603 bytes and takes 1700"):
        check_same_sizes(scaled, replace(real, values=tuple(values)))


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.integers(1, 1 << 20))
def test_bytes_are_exact_however_many_there_are(fixed: int, each: int, batch: int) -> None:
    def one(count: int) -> Graph:
        drawing = Drawing()
        drawing.op("aten.ones.default", creates=[drawing.value("a", fixed + each * count)])
        return drawing.graph()

    assert family_of(one(4), one(8), (4, 8)).at(batch).values[0].bytes == fixed + each * batch


# Refusals -------------------------------------------------------------------------------------------------


def test_another_op_is_named() -> None:
    other = drawn(8)
    changed = replace(other, ops=(replace(other.ops[0], target="aten.linear.default"), *other.ops[1:]))
    with pytest.raises(
        DoesNotScale, match=r"op 0 is conv: aten\.convolution in one and conv: aten\.linear in"
    ):
        family_of(drawn(4), changed, (4, 8))


def test_another_module_is_another_op() -> None:
    with pytest.raises(DoesNotScale, match=r"op 0 is conv: .* and other: "):
        family_of(drawn(4), drawn(8, module="other"), (4, 8))


def test_more_ops_are_counted() -> None:
    other = drawn(8)
    longer = replace(other, ops=(*other.ops, replace(other.ops[1], id=3, creates=(), outputs=())))
    with pytest.raises(DoesNotScale, match="one runs 3 ops and the other 4"):
        family_of(drawn(4), longer, (4, 8))


@pytest.mark.parametrize(("size", "told"), [(802, "802 at batch 8"), (399, "399 at batch 8")])
def test_parts_of_bytes_and_what_shrinks_are_refused(size: int, told: str) -> None:
    other = drawn(8)
    values = [replace(value, bytes=size) if value.id == 2 else value for value in other.values]
    with pytest.raises(DoesNotScale, match=f"'hidden' takes 403 bytes at batch 4 and {told}"):
        family_of(drawn(4), replace(other, values=tuple(values)), (4, 8))


def test_parts_of_an_extent_are_refused() -> None:
    other = drawn(8)
    tensors = [replace(tensor, shape=(41,)) if tensor.id == 0 else tensor for tensor in other.tensors]
    values = [replace(value, bytes=41) if value.id == 0 else value for value in other.values]
    grown = replace(other, tensors=tuple(tensors), values=tuple(values))
    with pytest.raises(DoesNotScale, match=r"'weight' is \(40,\) at batch 4 and \(41,\) at batch 8"):
        family_of(drawn(4), grown, (4, 8))


def test_other_values_other_looks_and_other_ends_are_refused() -> None:
    small, large = drawn(4), drawn(8)
    buffers = replace(large, values=(replace(large.values[0], role=Role.BUFFER), *large.values[1:]))
    with pytest.raises(DoesNotScale, match="they hold different values"):
        family_of(small, buffers, (4, 8))
    halves = replace(large, tensors=(replace(large.tensors[0], dtype="float16"), *large.tensors[1:]))
    with pytest.raises(DoesNotScale, match="look at their values in different ways"):
        family_of(small, halves, (4, 8))
    with pytest.raises(DoesNotScale, match="different values outlive the step"):
        family_of(small, replace(large, outputs=frozenset({3})), (4, 8))


def test_a_capture_that_is_off_the_line_is_told_apart() -> None:
    scaled = family_of(drawn(4), drawn(8), (4, 8)).at(16)
    with pytest.raises(DoesNotScale, match=r"was expected to be \(160,\) and is \(170,\)"):
        check_same_sizes(scaled, drawn(17))


# The search -----------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.data())
def test_the_largest_is_found_whatever_the_guess(most: int, data: st.DataObject) -> None:
    answer = data.draw(st.integers(0, most))
    guess = data.draw(st.integers(-5, 2 * most))
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= answer

    assert largest_that(holds, most, guess) == answer
    assert len(asked) == len(set(asked)) <= 2 * most.bit_length() + 2
    assert set(asked) <= set(range(1, most + 1))
    assert {answer, answer + 1} - {0, most + 1} <= set(asked)


def test_a_right_guess_takes_two_questions() -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= 70

    assert largest_that(holds, 1 << 20, 70) == 70
    assert asked == [70, 71]
