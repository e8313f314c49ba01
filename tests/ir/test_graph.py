"""The graph's own rules: what a well-formed graph offers, and how each rule refuses when broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from lowtide.errors import MalformedGraph
from lowtide.ir.graph import Graph, Ref, Symbol, argument_tensors, refs
from lowtide.ir.validate import extent_bytes, item_bytes, validate
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, chain, graphs, statistics


def with_op(graph: Graph, number: int, **changes: Any) -> Graph:
    changed = replace(graph.ops[number], **changes)
    return replace(graph, ops=(*graph.ops[:number], changed, *graph.ops[number + 1 :]))


def with_value(graph: Graph, number: int, **changes: Any) -> Graph:
    changed = replace(graph.values[number], **changes)
    return replace(graph, values=(*graph.values[:number], changed, *graph.values[number + 1 :]))


def with_tensor(graph: Graph, number: int, **changes: Any) -> Graph:
    changed = replace(graph.tensors[number], **changes)
    return replace(graph, tensors=(*graph.tensors[:number], changed, *graph.tensors[number + 1 :]))


# By hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "graph",
    [chain(), statistics(), statistics(random=True), Drawing().graph()],
    ids=["chain", "statistics", "random", "empty"],
)
def test_a_handmade_graph_is_well_formed_and_comes_back_as_it_is(graph: Graph) -> None:
    assert validate(graph) is graph


def test_equal_graphs_are_found_as_one_and_graphs_that_only_look_alike_are_not() -> None:
    graph, other = chain(), with_op(chain(), 0, seconds=1.0)
    assert hash(graph) == hash(other)
    known = {graph: "plain"}
    assert known[chain()] == "plain"
    assert other not in known


def test_the_chain_knows_who_creates_and_who_touches_what() -> None:
    graph = chain()
    assert graph.creator == {2: 0, 3: 2, 4: 3, 5: 4, 6: 5}
    assert graph.readers == {0: (0, 5), 1: (0, 5), 2: (1, 2, 4), 3: (3,), 4: (4,), 5: (5,)}
    assert graph.resident == (0, 1)


def test_a_value_that_is_only_changed_has_a_reader_and_one_never_touched_has_none() -> None:
    graph = statistics()
    assert graph.readers == {0: (0,), 1: (0,), 2: (1,)}
    assert 3 not in graph.readers


def test_values_on_another_device_count_for_nothing() -> None:
    graph = with_value(chain(), 2, device="cuda:0")
    assert [graph.counted_bytes(value) for value in range(7)] == [400, 100, 0, 4, 1000, 1000, 400]


@pytest.mark.parametrize(
    ("target", "module", "label"),
    [
        ("aten.convolution.default", "features.0", "features.0: aten.convolution"),
        ("aten.add.Tensor", "", "aten.add"),
        ("call", "", "call"),
    ],
)
def test_an_op_is_labelled_as_a_user_would_name_it(target: str, module: str, label: str) -> None:
    assert replace(chain().ops[0], target=target, module=module).label == label


def test_tensors_are_found_in_nested_and_keyword_arguments_in_order() -> None:
    nested = (Ref(3), (Ref(1), 5, ("x", Ref(3), None)), Symbol("dtype", "float32"), 2.5)
    op = replace(chain().ops[0], args=nested, kwargs=(("other", Ref(0)), ("dim", (0, Ref(2)))))
    assert list(refs(nested)) == [3, 1, 3]
    assert list(argument_tensors(op)) == [3, 1, 3, 0, 2]


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        ("bool", 1),
        ("uint8", 1),
        ("int8", 1),
        ("int16", 2),
        ("int32", 4),
        ("int64", 8),
        ("uint64", 8),
        ("float16", 2),
        ("bfloat16", 2),
        ("float32", 4),
        ("float64", 8),
        ("float8_e4m3fn", 1),
        ("float8_e5m2", 1),
        ("float4_e2m1fn_x2", 1),
        ("quint4x2", 1),
        ("complex32", 4),
        ("complex64", 8),
        ("complex128", 16),
    ],
)
def test_an_element_has_these_bytes(dtype: str, count: int) -> None:
    assert item_bytes(dtype) == count


@pytest.mark.parametrize(
    ("shape", "stride", "offset", "dtype", "count"),
    [
        ((), (), 0, "float32", 4),
        ((), (), 3, "float32", 16),
        ((10,), (1,), 0, "float32", 40),
        ((3, 4), (4, 1), 0, "int64", 96),
        ((3, 4), (1, 3), 0, "uint8", 12),
        ((3, 4), (0, 1), 2, "uint8", 6),  # expanded: all rows are the same four bytes
        ((2, 2), (10, 1), 5, "float16", 34),
        ((0, 4), (4, 1), 99, "float32", 0),  # empty: reaches nowhere
    ],
)
def test_a_tensor_reaches_this_far_into_its_value(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: str, count: int
) -> None:
    graph = with_tensor(chain(), 3, shape=shape, stride=stride, offset=offset, dtype=dtype)
    assert extent_bytes(graph.tensors[3]) == count
    fitting = with_value(graph, 3, bytes=count)
    assert validate(fitting)
    if count:
        with pytest.raises(MalformedGraph, match=f"reaches {count} bytes"):
            validate(with_value(fitting, 3, bytes=count - 1))


# Properties -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(100))
@given(graphs())
def test_every_value_is_either_resident_or_created_by_the_op_that_says_so(graph: Graph) -> None:
    assert validate(graph) is graph
    assert {*graph.resident} | graph.creator.keys() == set(range(len(graph.values)))
    assert not {*graph.resident} & graph.creator.keys()
    for value, maker in graph.creator.items():
        assert value in graph.ops[maker].creates
    for op in graph.ops:
        for value in (*op.reads, *op.mutates):
            assert op.id in graph.readers[value]
    assert all(list(ops) == sorted(set(ops)) for ops in graph.readers.values())


# Refusals -------------------------------------------------------------------------------------------


def swapped(graph: Graph, first: int, second: int) -> Graph:
    """The graph with two ops' places exchanged, ids in order."""
    ops = list(graph.ops)
    ops[first], ops[second] = ops[second], ops[first]
    return replace(graph, ops=tuple(replace(op, id=position) for position, op in enumerate(ops)))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (with_op(chain(), 2, id=7), "op 2 carries the id 7; ids are positions"),
        (with_value(chain(), 2, id=7), "value 2 carries the id 7; ids are positions"),
        (with_tensor(chain(), 2, id=7), "tensor 2 carries the id 7; ids are positions"),
        (with_value(chain(), 2, bytes=-1), "value 2 ('hidden') has -1 bytes"),
        (with_tensor(chain(), 2, value=7), "tensor 2 looks at value 7, which is not in the graph"),
        (with_tensor(chain(), 2, value=-1), "tensor 2 looks at value -1, which is not in the graph"),
        (with_tensor(chain(), 2, shape=(5, 5)), "tensor 2 has an impossible shape, stride or offset"),
        (with_tensor(chain(), 2, shape=(-5,)), "tensor 2 has an impossible shape, stride or offset"),
        (with_tensor(chain(), 2, stride=(-1,)), "tensor 2 has an impossible shape, stride or offset"),
        (with_tensor(chain(), 2, offset=-1), "tensor 2 has an impossible shape, stride or offset"),
        (
            with_tensor(chain(), 2, offset=1),
            "tensor 2 reaches 1001 bytes into value 2 ('hidden'), which has 1000",
        ),
        (with_tensor(chain(), 2, dtype="string"), "'string' is not a dtype"),
        (with_tensor(chain(), 2, dtype="float" + "9" * 5000), f"'float{'9' * 5000}' is not a dtype"),
        (with_op(chain(), 2, args=(Ref(7),)), "op 2 (aten.sum) names tensor 7, which is not in the graph"),
        (with_op(chain(), 2, args=(Ref(-1),)), "op 2 (aten.sum) names tensor -1, which is not in the graph"),
        (
            with_op(chain(), 2, kwargs=(("x", (1, Ref(7))),)),
            "op 2 (aten.sum) names tensor 7, which is not in the graph",
        ),
        (
            with_op(chain(), 1, outputs=(None, 7)),
            "op 1 (relu: aten.relu_) names tensor 7, which is not in the graph",
        ),
        (with_op(chain(), 2, reads=(7,)), "op 2 (aten.sum) names value 7, which is not in the graph"),
        (with_op(chain(), 2, creates=(7,)), "op 2 (aten.sum) names value 7, which is not in the graph"),
        (with_op(chain(), 2, mutates=(-1,)), "op 2 (aten.sum) names value -1, which is not in the graph"),
        (
            with_op(chain(), 2, reads=(2, 1, 0)),
            "op 2 (aten.sum) reads value 0, which none of its arguments look at",
        ),
        (
            with_op(chain(), 2, outputs=(None,)),
            "op 2 (aten.sum) creates value 3, which is not among its outputs",
        ),
        (
            with_op(chain(), 2, mutates=(0,)),
            "op 2 (aten.sum) mutates value 0, which is not among its arguments",
        ),
        (
            with_op(chain(), 0, workspace_bytes=-1),
            "op 0 (conv: aten.convolution) costs -1 bytes of workspace and 0.0 seconds",
        ),
        (
            with_op(chain(), 0, seconds=-1.0),
            "op 0 (conv: aten.convolution) costs 300 bytes of workspace and -1.0 seconds",
        ),
        (
            with_op(chain(), 0, seconds=float("nan")),
            "op 0 (conv: aten.convolution) costs 300 bytes of workspace and nan seconds",
        ),
        (
            with_op(chain(), 0, seconds=float("inf")),
            "op 0 (conv: aten.convolution) costs 300 bytes of workspace and inf seconds",
        ),
        (
            swapped(chain(), 0, 2),
            "op 0 (aten.sum) reads value 2 before op 2 (conv: aten.convolution) creates it",
        ),
        (
            with_op(swapped(chain(), 0, 1), 0, reads=()),
            "op 0 (relu: aten.relu_) reads value 2 before op 1 (conv: aten.convolution) creates it",
        ),
        (
            with_op(chain(), 3, creates=(3,), outputs=(3,), reads=(), args=()),
            "op 3 (aten.expand) creates value 3, which already exists",
        ),
        (
            with_op(chain(), 2, creates=(3, 3)),
            "op 2 (aten.sum) creates value 3, which already exists",
        ),
        (
            replace(chain(), outputs=frozenset({7})),
            "the graph's outputs name value 7, which is not in the graph",
        ),
        (
            replace(chain(), outputs=frozenset({-1})),
            "the graph's outputs name value -1, which is not in the graph",
        ),
    ],
)
def test_a_broken_rule_is_named_with_the_op_that_breaks_it(graph: Graph, message: str) -> None:
    with pytest.raises(MalformedGraph) as refusal:
        validate(graph)
    assert str(refusal.value) == message


def test_an_op_cannot_read_what_it_only_creates() -> None:
    graph = chain()
    first = graph.ops[0]
    made = first.outputs[0]
    assert made is not None
    circular = replace(first, args=(*first.args, Ref(made)), reads=(*first.reads, *first.creates))
    with pytest.raises(
        MalformedGraph, match=rf"op 0 .* reads value {first.creates[0]} before op 0 .* creates it"
    ):
        validate(replace(graph, ops=(circular, *graph.ops[1:])))
