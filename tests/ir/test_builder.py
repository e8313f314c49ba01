"""Graphs that grow: ids, bytes and ways to look at values; strides beside those that torch works out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import BadRequest, ShapeMismatch
from lowtide.ir import strides
from lowtide.ir.builder import Growing, Place, dense, empty
from lowtide.ir.calls import add, apply, bmm, mm, promoted, reduced, unbroadcast
from lowtide.ir.graph import Arg, Graph, Origin, Phase, Ref, Role, Symbol, Tensor, Value
from lowtide.ir.names import tensor_called
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate

# By hand -----------------------------------------------------------------------------------------------


def test_an_op_is_appended_with_the_bytes_of_what_it_makes() -> None:
    growing = Growing(empty("row"))
    x = growing.resident("x", (2, 3))
    w = growing.resident("w", (3, 4), "float64", Role.PARAMETER)
    y = growing.call("aten.exp.default", [x], dense((2, 3), "float32"), name="y")
    graph = growing.finish([growing.tensors[y.tensor].value], {"y": y.tensor})
    assert [(value.name, value.bytes, value.role) for value in graph.values] == [
        ("x", 24, Role.BATCH),
        ("w", 96, Role.PARAMETER),
        ("y", 24, Role.INTERMEDIATE),
    ]
    (op,) = graph.ops
    assert (op.reads, op.creates, op.outputs, op.phase) == ((0,), (2,), (2,), Phase.FORWARD)
    assert (graph.origin, graph.outputs, graph.results) == (Origin.EXPRESSION, frozenset({2}), (("y", 2),))
    assert graph.resident == (0, 1)
    assert growing.dtype(w) == "float64"
    assert simulate(graph, straight(graph)).peak_bytes == 144


def test_what_was_there_stays_as_it_was() -> None:
    growing = Growing(empty("row"))
    x = growing.resident("x", (2,))
    before = growing.finish([0], {"x": 0})
    more = Growing(before)
    add(more, x, x)
    after = more.finish([1], {"twice": 1})
    assert after.values[:1] == before.values
    assert after.tensors[:1] == before.tensors
    assert (after.outputs, after.results) == (frozenset({0, 1}), (("x", 0), ("twice", 1)))
    assert before.ops == ()
    assert len(after.ops) == 1


def test_a_value_that_is_handed_over_twice_is_read_once() -> None:
    growing = Growing(empty("row"))
    x = growing.resident("x", (2, 2))
    mm(growing, x, growing.transposed(x))
    assert growing.finish().ops[0].reads == (0,)


def test_outputs_that_are_left_out_make_no_values() -> None:
    growing = Growing(empty("row"))
    x = growing.resident("x", (2,))
    made = growing.calls("aten.f.default", [x], [None, dense((3,), "int64")])
    assert made[0] is None
    assert made[1] is not None
    assert growing.shape(made[1]) == (3,)
    assert growing.finish().ops[0].outputs == (None, 1)


def test_ops_belong_to_the_place_where_they_were_appended() -> None:
    growing = Growing(empty("row"))
    x = growing.resident("x", (2,))
    with growing.at(Place(Phase.BACKWARD, "layers.3", call=1, section=2)):
        add(growing, x, 1)
    add(growing, x, 2)
    inside, outside = growing.finish().ops
    assert (inside.phase, inside.module, inside.call, inside.section) == (Phase.BACKWARD, "layers.3", 1, 2)
    assert (outside.phase, outside.module, outside.call, outside.section) == (Phase.FORWARD, "", 0, 0)
    assert growing.values[1].module == "layers.3"


def looks(growing: Growing, look: Ref) -> tuple[object, ...]:
    tensor = growing.tensors[look.tensor]
    return tensor.value, tensor.shape, tensor.stride, tensor.offset


def test_views_look_at_the_same_value() -> None:
    growing = Growing(empty("views"))
    x = growing.resident("x", (2, 3, 4))
    assert looks(growing, growing.transposed(x)) == (0, (2, 4, 3), (12, 1, 4), 0)
    assert looks(growing, growing.permuted(x, (2, 0, 1))) == (0, (4, 2, 3), (1, 12, 4), 0)
    assert looks(growing, growing.sliced(x, -1, 1, 3)) == (0, (2, 3, 2), (12, 4, 1), 1)
    assert looks(growing, growing.selected(x, 1, 2)) == (0, (2, 4), (12, 1), 8)
    assert looks(growing, growing.stepped(x, 2, 3)) == (0, (2, 3, 2), (12, 4, 3), 0)
    assert looks(growing, growing.unsqueezed(x, [0, 4])) == (0, (1, 2, 3, 4, 1), (24, 12, 4, 1, 1), 0)
    assert looks(growing, growing.expanded(growing.selected(x, 0, 0), (5, 3, 4))) == (
        0,
        (5, 3, 4),
        (0, 4, 1),
        0,
    )
    assert looks(growing, growing.reshaped(x, (6, 4))) == (0, (6, 4), (4, 1), 0)
    assert growing.ops == []


def test_equal_looks_are_one_tensor() -> None:
    growing = Growing(empty("views"))
    x = growing.resident("x", (2, 3))
    assert growing.transposed(growing.transposed(x)) == x
    assert growing.transposed(x) == growing.transposed(x)
    assert len(growing.tensors) == 2


def test_what_cannot_be_another_look_is_copied_first() -> None:
    growing = Growing(empty("views"))
    x = growing.resident("x", (2, 3))
    flat = growing.reshaped(growing.transposed(x), (6,))
    assert looks(growing, flat) == (1, (6,), (1,), 0)
    (op,) = growing.ops
    assert op.target == "aten.clone.default"
    assert op.kwargs == (("memory_format", Symbol("memory_format", "contiguous_format")),)


def test_a_tensor_owns_its_value_if_it_shows_every_element_once() -> None:
    growing = Growing(empty("views"))
    x = growing.resident("x", (2, 3))
    row = growing.selected(x, 0, 0)
    assert growing.owns(x)
    assert growing.owns(growing.transposed(x))
    assert growing.owns(growing.reshaped(x, (6,)))
    assert not growing.owns(row)
    assert not growing.owns(growing.expanded(growing.unsqueezed(row, [0]), (2, 3)))


@pytest.mark.parametrize(
    ("dtypes", "number", "expected"),
    [
        (["float32", "float32"], None, "float32"),
        (["float32", "float64"], None, "float64"),
        (["float16", "bfloat16"], None, "float32"),
        (["bool", "float16"], None, "float16"),
        (["int64", "float32"], None, "float32"),
        (["int64"], 2.5, "float32"),
        (["int64"], 2, "int64"),
        (["float16"], 2.5, "float16"),
        (["bool"], 3, "int64"),
        (["uint8", "int32"], None, "int32"),
    ],
)
def test_dtypes_are_promoted_as_torch_does(dtypes: list[str], number: float | None, expected: str) -> None:
    growing = Growing(empty("dtypes"))
    operands: list[Arg] = [growing.resident(str(n), (2,), dtype) for n, dtype in enumerate(dtypes)]
    tensors: list[Any] = [torch.zeros(2, dtype=getattr(torch, dtype)) for dtype in dtypes]
    if number is not None:
        operands.append(number)
        tensors.append(number)
    assert promoted(growing, operands) == expected
    assert str(torch.result_type(*(tensors if len(tensors) > 1 else tensors * 2))) == f"torch.{expected}"


def test_a_tensor_of_one_number_decides_only_if_it_is_of_a_higher_kind() -> None:
    growing = Growing(empty("dtypes"))
    half, number = growing.resident("h", (2,), "float16"), growing.resident("n", (), "float64")
    whole = growing.resident("w", (2,), "int64")
    assert promoted(growing, [half, number]) == "float16"
    assert promoted(growing, [whole, number]) == "float64"


def seen_as(*looks_at_it: tuple[tuple[int, ...], tuple[int, ...], int]) -> Growing:
    """A graph of one value of six numbers, which is looked at like this."""
    tensors = (Tensor(n, 0, *look, "float32") for n, look in enumerate(looks_at_it))
    value = Value(0, 24, Role.PARAMETER, "w")
    return Growing(Graph("seen", Origin.JOINT, "cpu", (), (value,), tuple(tensors)))


def test_a_name_means_the_row_major_look_at_all_of_a_value() -> None:
    growing = seen_as(((2,), (1,), 0), ((2, 3), (1, 2), 0), ((3, 2), (2, 1), 0))
    assert tensor_called(growing, "w") == Ref(2)


def test_what_is_given_goes_before_what_is_computed() -> None:
    growing = Growing(empty("names"))
    x = growing.resident("add", (2,))
    add(growing, x, 1)
    assert tensor_called(Growing(growing.finish()), "add") == x


def test_a_matrix_that_is_only_seen_transposed_is_found_as_it_lies_in_memory() -> None:
    growing = seen_as(((2, 3), (1, 2), 0))
    assert looks(growing, tensor_called(growing, "w")) == (0, (3, 2), (2, 1), 0)
    assert tensor_called(growing, 0) == Ref(0)


def test_what_is_only_seen_repeated_is_found_without_repetition() -> None:
    growing = seen_as(((4, 1, 6), (0, 6, 1), 0))
    assert looks(growing, tensor_called(growing, "w")) == (0, (1, 1, 6), (0, 6, 1), 0)


# Beside torch ------------------------------------------------------------------------------------------

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4).map(tuple)


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this shape: its dimensions in any order in memory, cut out of something, or repeated."""
    order = draw(st.permutations(range(len(shape))))
    repeated = [draw(st.integers(0, 4)) == 0 for _ in shape]
    spare = [draw(st.integers(0, 1)) for _ in shape]
    sizes = [
        1 if again else shape[dim] + more for dim, again, more in zip(order, repeated, spare, strict=True)
    ]
    tensor = torch.arange(float(math.prod(sizes))).reshape(sizes)
    tensor = tensor.expand(
        [shape[dim] if again else size for dim, again, size in zip(order, repeated, sizes, strict=True)]
    )
    for position, dim in enumerate(order):
        tensor = tensor.narrow(position, 0, shape[dim])
    return tensor.permute([order.index(dim) for dim in range(len(shape))])


@given(st.data())
def test_a_pointwise_kernel_lays_its_result_out_as_torch_does(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    small = tuple(1 if data.draw(st.integers(0, 3)) == 0 else size for size in shape)
    a, b = data.draw(strided(shape)), data.draw(strided(small[data.draw(st.integers(0, len(shape))) :]))
    made = a + b
    operands = [(a.shape, a.stride()), (b.shape, b.stride())]
    assert strides.same(made.shape, strides.pointwise(made.shape, operands), made.stride())
    assert strides.same(a.shape, strides.pointwise(a.shape, operands[:1]), a.exp().stride())
    assert strides.same(a.shape, strides.like(a.shape, a.stride()), torch.empty_like(a).stride())
    assert strides.broadcast(a.shape, b.shape) == made.shape


@given(st.data())
def test_a_view_is_possible_where_torch_says_so(data: st.DataObject) -> None:
    tensor = data.draw(SHAPES.flatmap(strided))
    sizes: list[int] = []
    left = tensor.numel()
    while left > 1 or (len(sizes) < 4 and data.draw(st.booleans())):
        sizes.append(data.draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0])))
        left //= sizes[-1]
        if len(sizes) == 5:
            sizes[-1] *= left
            break
    found = strides.viewed(tensor.shape, tensor.stride(), sizes)
    try:
        view = tensor.view(sizes)
    except RuntimeError:
        assert found is None
        return
    assert found is not None
    assert torch.equal(tensor.as_strided(sizes, found, tensor.storage_offset()), view)
    assert found == view.stride()  # of dimensions of one element too


@given(st.data())
def test_density_and_overlap_are_what_counting_elements_says(data: st.DataObject) -> None:
    tensor = data.draw(SHAPES.flatmap(strided))
    places = torch.arange(float(tensor.untyped_storage().nbytes() // 4))
    seen = places.as_strided(tensor.shape, tensor.stride()).flatten().tolist()
    dense_here = sorted(seen) == list(range(len(seen)))
    assert strides.is_dense(tensor.shape, tensor.stride()) == dense_here
    if len(set(seen)) < len(seen):
        assert strides.overlaps(tensor.shape, tensor.stride())
    elif not strides.overlaps(tensor.shape, tensor.stride()):
        assert len(set(seen)) == len(seen)


def test_images_with_channels_inside_are_dense() -> None:
    made = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert strides.channels_last((2, 3, 4, 5)) == made.stride()
    assert strides.is_dense((2, 3, 4, 5), made.stride())


@given(st.data())
def test_what_was_stretched_is_summed_to_its_old_shape(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    small = tuple(1 if data.draw(st.booleans()) else size for size in shape)
    small = small[data.draw(st.integers(0, len(shape))) :]
    growing = Growing(empty("sums"))
    made = unbroadcast(growing, growing.resident("x", shape), small)
    assert growing.shape(made) == small
    assert len(growing.ops) <= 1


def test_only_what_was_stretched_is_summed() -> None:
    growing = Growing(empty("sums"))
    unbroadcast(growing, growing.resident("x", (4, 2, 1, 3)), (1, 1, 3))
    (op,) = growing.ops
    assert (op.target, op.args[1:]) == ("aten.sum.dim_IntList", ((0, 1), True))


def test_what_is_left_of_a_shape_when_it_is_summed() -> None:
    assert reduced((2, 3, 4), (0, -1), False) == (3,)
    assert reduced((2, 3, 4), (0, -1), True) == (1, 3, 1)
    assert reduced((2, 3), (), False) == ()
    assert reduced((), (), True) == ()


# Refusals ----------------------------------------------------------------------------------------------


def _grown(act: Callable[[Growing, Ref, Ref], object]) -> Callable[[], object]:
    def run() -> object:
        growing = Growing(empty("wrong"))
        return act(growing, growing.resident("a", (2, 3)), growing.resident("b", (2, 4)))

    return run


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda g, a, b: add(g, a, b), r"add: .* a is \(2, 3\) and b is \(2, 4\)\. Give other shapes"),
        (lambda g, a, b: mm(g, a, b), r"mm: .* a is \(2, 3\) and b is \(2, 4\)"),
        (
            lambda g, a, b: bmm(
                g, g.unsqueezed(a, [0]), g.expanded(g.unsqueezed(g.transposed(a), [0]), (5, 3, 2))
            ),
            r"bmm: .* a is \(1, 2, 3\) and a is \(5, 3, 2\)",
        ),
        (lambda g, a, b: bmm(g, a, a), r"bmm: .* a is \(2, 3\) and a is \(2, 3\)"),
        (lambda g, a, b: g.reshaped(a, (4,)), r"reshape: .* a is \(2, 3\) and the new shape is \(4,\)"),
        (lambda g, a, b: apply(g, "aten.f.default", a, b), "f: these shapes do not go together"),
    ],
)
def test_shapes_that_do_not_go_together_are_named(
    act: Callable[[Growing, Ref, Ref], object], message: str
) -> None:
    with pytest.raises(ShapeMismatch, match=message):
        _grown(act)()


def test_a_name_is_given_once() -> None:
    growing = Growing(empty("names"))
    growing.resident("x", (2,))
    with pytest.raises(BadRequest, match="there is a value called 'x' already"):
        growing.resident("x", (2,))
    with pytest.raises(BadRequest, match="there is a value called 'x' already"):
        Growing(growing.finish()).resident("x", (2,))


def test_tensors_that_are_not_there_are_refused() -> None:
    growing = Growing(empty("names"))
    x = growing.resident("x", (2,))
    for _ in range(2):
        add(growing, x, 1)
    graph = Growing(growing.finish())
    with pytest.raises(BadRequest, match="there is no tensor 9: 'names' has 3 tensors"):
        tensor_called(graph, 9)
    with pytest.raises(BadRequest, match="no value is called 'z' in 'names'"):
        tensor_called(graph, "z")
    with pytest.raises(BadRequest, match="2 values are called 'add' in 'names'"):
        tensor_called(graph, "add")
    with pytest.raises(BadRequest, match="no tensor shows all of 'w'"):
        tensor_called(seen_as(((2,), (1,), 0)), "w")
