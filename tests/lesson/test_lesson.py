"""Lessons: what is told of a graph, in numbers that can be added up by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide.arena.tags import How
from lowtide.autodiff.expression import graph_of
from lowtide.autodiff.parse import parse
from lowtide.autodiff.reverse import gradient
from lowtide.errors import ArenaTooSmall, BadRequest, DeviceMissing
from lowtide.execute.trials import numbers_of, trials
from lowtide.ir.graph import Graph, Phase, Role
from lowtide.lesson.excerpts import Excerpt, differentiable, extended, first_layers
from lowtide.lesson.lesson import Lesson, Tag, lesson_of, with_numbers
from lowtide.lesson.networks import two_layer_mlp
from lowtide.lesson.phrasing import Phrasing, distinctly_named, shape_text, short
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, graphs, three_layers


def drawn(text: str, **shapes: tuple[int, ...]) -> Graph:
    """An expression with its gradients by all variables."""
    graph = graph_of(*parse(text, shapes), name=text)
    return extended(graph, [tensor for _, tensor in graph.results], differentiable(graph))


def lesson(text: str, **shapes: tuple[int, ...]) -> Lesson:
    return lesson_of(drawn(text, **shapes))


LECTURE = "ln(x1) + x1*x2 - sin(x2)"

# The referee: what is told is what the planner did ---------------------------------------------------


@settings(max_examples=examples(60))
@given(graphs())
def test_every_idea_takes_no_more_than_the_one_before_and_none_less_than_the_bound(graph: Graph) -> None:
    found = lesson_of(graph)
    naive, in_place, sharing, static = (total.bytes for total in found.totals)
    assert naive >= in_place >= sharing >= found.lower_bound_bytes
    assert static >= found.lower_bound_bytes
    made = [value for op in graph.ops for value in op.creates]
    assert naive == sum(graph.counted_bytes(value) for value in made)
    assert (found.fullest_op is None) == (found.layout.buffers == ())
    assert sum(tag.bytes for tag in found.tags) == sharing


@settings(max_examples=examples(60))
@given(graphs())
def test_scenes_are_the_walk_with_its_box_and_every_result_is_in_one_tag(graph: Graph) -> None:
    found = lesson_of(graph)
    scenes = list(found.scenes())
    assert [scene.turn for scene in scenes] == list(found.sharing.walk)
    for number, scene in enumerate(scenes):
        assert scene.box == found.sharing.box_after(number)
        for one in scene.turn.given:
            assert (one.how is How.NEW) == (one.value not in scene.before)
    in_tags = sorted(value for tag in found.tags for value in tag.values)
    assert in_tags == sorted(birth.value for birth in found.sharing.tags)


@settings(max_examples=examples(60))
@given(graphs())
def test_a_lesson_can_be_told_as_json_with_distinct_names(graph: Graph) -> None:
    found = lesson_of(graph)
    names = [value.name for value in found.graph.values]
    assert len(set(names)) == len(names)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert len(document["forward"]) + len(document["backward"]) == len(graph.ops) == len(document["walk"])


# exp(a*b+3), by hand ---------------------------------------------------------------------------------


def test_the_whole_forward_of_exp_is_in_one_tag_and_the_backward_needs_its_result_alone() -> None:
    found = lesson("exp(a*b+3)")
    assert [found.words.equation(op) for op in found.forward] == [
        "v1 = mul(a, b)",
        "v2 = add(v1, 3)",
        "v3 = exp(v2)",
    ]
    assert [(found.words.equation(op), found.names(found.needs(op))) for op in found.backward] == [
        ("v3.grad = full(1)", []),
        ("v2.grad = mul(v3.grad, v3)", ["v3"]),
        ("a.grad = mul(v2.grad, b)", ["b"]),
        ("b.grad = mul(v2.grad, a)", ["a"]),
    ]
    assert found.names(found.kept) == ["v3"]
    assert found.tags == (Tag(0, 4, (2, 3, 4)), Tag(1, 4, (5, 6, 8)), Tag(2, 4, (7,)))
    assert [(total.name, total.bytes) for total in found.totals] == [
        ("naive", 28),
        ("in place", 12),
        ("sharing", 12),
        ("static", 12),
    ]
    assert (found.lower_bound_bytes, found.layout.ratio) == (12, 1.0)
    assert found.fullest_op is not None
    assert found.words.equation(found.fullest_op) == "a.grad = mul(v2.grad, b)"


def test_its_walk_is_the_lectures() -> None:
    found = lesson("exp(a*b+3)")
    values = found.graph.values
    told = [
        (one.tag, one.how.value, values[scene.before[one.value]].name if one.value in scene.before else None)
        for scene in found.scenes()
        for one in scene.turn.given
    ]
    assert told == [
        (0, "new", None),
        (0, "in place", "v1"),
        (0, "in place", "v2"),
        (1, "new", None),
        (1, "in place", "v3.grad"),
        (2, "new", None),
        (1, "in place", "v2.grad"),
    ]


def test_what_cannot_be_in_place_has_a_reason_and_what_reads_nothing_is_not_asked() -> None:
    found = lesson("exp(a*b+3)")
    assert [(short(found.graph.ops[each.op]), each.reason) for each in found.obstacles] == [
        ("mul", "its input 'a' is resident"),
        ("mul", "'v2.grad' is still needed by mul"),
    ]


def test_sharing_saves_more_than_in_place_where_values_die_apart() -> None:
    found = lesson(LECTURE)
    assert [total.bytes for total in found.totals] == [56, 32, 20, 20]
    assert found.kept == frozenset()


def test_a_relu_needs_its_result_and_a_sum_nothing() -> None:
    found = lesson("sum(relu(x))", x=(3,))
    needs = {short(op): found.names(found.needs(op)) for op in found.backward}
    assert needs == {"full": [], "threshold_backward": ["v1"]}
    assert [short(op) for op in found.forward] == ["relu", "sum"]


def test_the_two_layer_network_keeps_results_of_its_activations() -> None:
    graph, loss, wanted = two_layer_mlp(batch=4, width=8, classes=2)
    found = lesson_of(gradient(graph, loss, wanted).graph)
    assert {"sigmoid", "softmax"} <= set(found.names(found.kept))
    assert not {"fc1", "fc2"} & set(found.names(found.kept))


def test_the_match_range_decides_which_tags_are_taken() -> None:
    """A number of 4 bytes is free when 24 are asked for: too small, if only a fourth of them will do."""
    graph = drawn("exp(a*b+3)", a=(2, 3), b=(2, 3))
    assert lesson_of(graph).sharing.total_bytes == 76
    assert lesson_of(graph, match_range=4).sharing.total_bytes == 80


# Words -----------------------------------------------------------------------------------------------


def test_tensors_are_told_by_name_and_by_how_they_are_looked_at() -> None:
    graph = graph_of(*parse("x @ w.T + reshape(b, (1, 3))", {"x": (2, 4), "w": (3, 4), "b": (3,)}))
    words = Phrasing(distinctly_named(graph))
    assert [words.call(op) for op in graph.ops] == ["mm(x, w.T)", "add(v1, b as 1 × 3)"]
    assert (shape_text((2, 3)), shape_text(())) == ("2 × 3", "number")


def test_a_matrix_that_is_only_looked_at_transposed_is_told_as_it_lies() -> None:
    graph = graph_of(*parse("linear(x, w, b)", {"x": (2, 3), "w": (3, 3), "b": (3,)}))
    words = Phrasing(graph)
    assert [words.call(op) for op in graph.ops] == ["addmm(b, x, w.T)"]
    graph = graph_of(*parse("x @ w.T", {"x": (2, 3), "w": (4, 3)}))
    looked = replace(
        graph,
        tensors=tuple(
            replace(t, stride=(1, 3), shape=(3, 4)) if t.shape == (4, 3) else t for t in graph.tensors
        ),
    )
    assert Phrasing(looked).shape(1) == (4, 3)
    assert Phrasing(looked).call(looked.ops[0]) == "mm(x, w.T)"


def modular() -> Graph:
    """Two calls of a module, a norm with two results, and their backward; all called by their kernels."""
    drawing = Drawing()
    x = drawing.value("x", 8, Role.BATCH)
    first = drawing.value("relu", 8)
    second = drawing.value("relu", 8)
    norm, mean = drawing.value("_norm", 8), drawing.value("_norm", 4)
    back = drawing.value("norm_backward", 8)
    drawing.op("aten.relu.default", [x], [first], module="act")
    drawing.op("aten.relu.default", [first], [second], module="act")
    drawing.op("aten._norm.default", [second], [norm, mean], module="block.norm")
    drawing.op("aten.norm_backward.default", [norm], [back], phase=Phase.BACKWARD, module="block.norm")
    return drawing.graph(outputs=[back])


def test_values_that_only_a_kernel_named_are_called_after_their_modules() -> None:
    graph = distinctly_named(modular())
    names = ["x", "act", "act_1", "block.norm", "block.norm:1", "block.norm.back"]
    assert [value.name for value in graph.values] == names
    assert Phrasing(graph).equation(graph.ops[2]) == "block.norm, … = norm(act_1)"


def test_what_is_given_keeps_its_name_and_what_is_made_gives_way() -> None:
    drawing = Drawing()
    made = [drawing.value(name, 4) for name in ("x", "x_1", "x")]
    given = drawing.value("x", 4, Role.BATCH)
    for value in made:
        drawing.op("aten.exp.default", [given], [value])
    names = [value.name for value in distinctly_named(drawing.graph(outputs=made)).values]
    assert names == ["x_1", "x_1_1", "x_2", "x"]


# The first layers ------------------------------------------------------------------------------------


def layered() -> Graph:
    """y = exp(x), z = exp(y), q = exp(z), w = q + y, loss = sum(w), with a backward.

    The first three are calls of modules: block.a, block.b and block.a again; the sum q + y is in block.
    """
    text = "y = exp(x); z = exp(y); q = exp(z); w = q + y; loss = sum(w)"
    graph = gradient(graph_of(*parse(text, {"x": (2,)})), "loss", ["x"]).graph
    modules = {0: ("block.a", 0), 1: ("block.b", 0), 2: ("block.a", 1), 3: ("block", 0)}
    placed = [
        replace(op, module=modules.get(op.id, ("", 0))[0], call=modules.get(op.id, ("", 0))[1])
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(placed))


def ends(excerpt: Excerpt) -> list[str]:
    graph = excerpt.graph
    return [graph.values[graph.tensors[end].value].name for end in excerpt.ends]


def test_the_first_layers_end_in_what_the_next_goes_on_with() -> None:
    excerpt = first_layers(layered(), 2)
    assert (excerpt.layers, excerpt.of) == (("block.a", "block.b"), 3)
    assert [op.target for op in excerpt.graph.ops] == ["aten.exp.default"] * 2
    assert ends(excerpt) == ["z"]  # y is wanted later as well, but has been used
    assert excerpt.graph.results == ()


def test_all_layers_end_in_the_loss() -> None:
    excerpt = first_layers(layered(), 3)
    assert (excerpt.layers, excerpt.of) == (("block.a", "block.b", "block.a (call 2)"), 3)
    assert (ends(excerpt), len(excerpt.graph.ops)) == (["loss"], 5)
    assert first_layers(layered(), 99).graph == excerpt.graph


def test_several_results_are_summed_before_they_are_differentiated() -> None:
    found = drawn("p = exp(a); q = a * b", a=(2,), b=(2,))
    words = Phrasing(distinctly_named(found))
    forward = [words.equation(op) for op in found.ops if op.phase is Phase.FORWARD]
    assert forward == [
        "p = exp(a)",
        "q = mul(a, b)",
        "sum = sum(p)",
        "sum_1 = sum(q)",
        "total = add(sum, sum_1)",
    ]
    assert [name for name, _ in found.results] == ["p", "q", "total", "a.grad", "b.grad"]


def test_parameters_are_differentiated_by_if_there_are_any_and_whole_numbers_never() -> None:
    graph, _, _ = two_layer_mlp(batch=2, width=4, classes=2)
    assert differentiable(graph) == ("w1", "b1", "w2", "b2")
    text, shapes = "cross_entropy(x, labels)", {"x": (2, 3), "labels": (2,)}
    assert differentiable(graph_of(*parse(text, shapes, dtypes={"labels": "int64"}))) == ("x",)


# Run -------------------------------------------------------------------------------------------------


def test_the_lectures_trace_and_adjoints_come_out() -> None:
    found = lesson(LECTURE)
    numbers = numbers_of(found.graph, {"x1": [2.0], "x2": [5.0]})
    by_name = {found.graph.values[value].name: elements for value, elements in numbers.items()}
    trace = [by_name[name][0] for name in ("v1", "v2", "v3", "v4", "v5", "x1.grad", "x2.grad")]
    expected = [0.693, 10, -0.959, 10.693, 11.652, 5.5, 1.716]
    assert trace == pytest.approx(expected, abs=5e-4)
    told = with_numbers(found, numbers).to_json()
    assert told["given"][0]["numbers"] == [2.0]


def test_one_number_fills_a_tensor_and_only_the_first_elements_are_told() -> None:
    found = lesson("exp(a*b)", a=(2, 5), b=(2, 5))
    numbers = numbers_of(found.graph, {"a": [0.0], "b": [float(number) for number in range(10)]})
    assert numbers[0] == (0.0,) * 6
    assert numbers[1] == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert numbers[3] == (1.0,) * 6


def test_what_is_not_finite_is_a_word_in_json() -> None:
    found = lesson("ln(a)")
    told = with_numbers(found, numbers_of(found.graph, {"a": [0.0]})).to_json()
    assert told["forward"][0]["results"][0]["numbers"] == ["-inf"]
    assert json.dumps(told, allow_nan=False)


def test_static_memory_allocates_once_and_naive_memory_for_every_value() -> None:
    graph = lesson("sum(relu(x @ w))", x=(32, 64), w=(64, 64)).graph
    naive, pool, static = trials(graph)
    made = sum(len(op.creates) for op in graph.ops)
    assert (naive.first.allocations, naive.later.allocations) == (made, made)
    assert pool.first.allocations < made
    assert (static.first.allocations, static.later.allocations) == (1, 0)
    assert naive.held_bytes >= sum(graph.values[value].bytes for op in graph.ops for value in op.creates)
    assert naive.held_bytes > static.held_bytes
    assert (static.later.wasted_bytes, static.later.fragmented_bytes) == (0, 0)


# Refusals --------------------------------------------------------------------------------------------


def test_a_small_arena_is_refused_by_the_op_that_needs_most() -> None:
    graph = drawn("exp(a*b+3)")
    assert lesson_of(graph, arena_bytes=12).layout.arena_bytes == 12
    with pytest.raises(
        ArenaTooSmall, match=r"arena of 11 bytes: it needs 12.*live at once at op 5 \(aten.mul\)"
    ):
        lesson_of(graph, arena_bytes=11)


def test_numbers_have_to_be_given_for_everything_and_fit() -> None:
    graph = lesson("a * b", a=(2,)).graph
    with pytest.raises(BadRequest, match="there is no number for 'b'"):
        numbers_of(graph, {"a": [1.0]})
    with pytest.raises(BadRequest, match="'a' has 2 elements, and 3 numbers were given"):
        numbers_of(graph, {"a": [1.0, 2.0, 3.0], "b": [1.0]})
    with pytest.raises(BadRequest, match=r"there is no 'c' to give a number for\. There are: 'a', 'b'"):
        numbers_of(graph, {"c": [1.0]})


def test_layers_without_modules_or_numbers_are_refused() -> None:
    with pytest.raises(BadRequest, match="'exp\\(a\\)' has no layers: none of its ops is in a module"):
        first_layers(drawn("exp(a)"), 1)
    with pytest.raises(BadRequest, match="'three layers' has no numbers to sum up there"):  # they are bytes
        first_layers(three_layers(), 2)


def test_a_graph_is_not_run_on_a_device_that_is_not_here() -> None:
    graph = replace(drawn("exp(a)"), device="cuda:99")
    with pytest.raises(DeviceMissing, match="cannot measure on 'cuda:99'"):
        trials(graph)
