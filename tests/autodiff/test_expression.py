"""Expressions, in Python and as text, become graphs that compute what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

from lowtide.autodiff import expression as ex
from lowtide.autodiff.expression import Expression, graph_of, var
from lowtide.autodiff.parse import parse
from lowtide.errors import BadRequest, MalformedGraph, ShapeMismatch, UnknownFunction
from lowtide.execute.executor import evaluate
from lowtide.ir.graph import Graph, Origin, Phase, Role
from lowtide.lesson.networks import two_layer_mlp
from tests.helpers.drawn import VARIABLES, in_python, texts


def computed(graph: Graph, **given: Tensor) -> list[Tensor]:
    return evaluate(graph, given, [tensor for _, tensor in graph.results])


def steps(graph: Graph) -> list[tuple[str, str]]:
    """The ops and the names of what they make, in order."""
    return [(op.target.split(".")[1], graph.values[op.creates[0]].name) for op in graph.ops]


# By hand -----------------------------------------------------------------------------------------------


def test_an_expression_becomes_the_ops_that_a_capture_would_have() -> None:
    a, b = var("a"), var("b")
    graph = graph_of(ex.exp(a * b + 3))
    assert [(op.target, op.args[1:]) for op in graph.ops[1:]] == [
        ("aten.add.Tensor", (3,)),
        ("aten.exp.default", ()),
    ]
    assert steps(graph) == [("mul", "v1"), ("add", "v2"), ("exp", "v3")]
    assert [value.name for value in graph.values[:2]] == ["a", "b"]
    assert (graph.origin, graph.results, graph.outputs) == (Origin.EXPRESSION, (("v3", 4),), frozenset({4}))
    assert {op.phase for op in graph.ops} == {Phase.FORWARD}
    assert computed(graph, a=torch.tensor(2.0), b=torch.tensor(0.5)) == [torch.tensor(4.0).exp()]


def test_ops_come_in_the_order_of_a_trace_by_hand() -> None:
    graph = graph_of(*parse("y = ln(x1) + x1*x2 - sin(x2)"))
    assert steps(graph) == [("log", "v1"), ("mul", "v2"), ("sin", "v3"), ("add", "v4"), ("sub", "y")]


def test_what_is_used_twice_is_computed_once() -> None:
    x = var("x", (3,))
    h = ex.sigmoid(x)
    graph = graph_of(h * h + h)
    assert [kernel for kernel, _ in steps(graph)] == ["sigmoid", "mul", "add"]


def test_several_outputs_are_results_under_their_names() -> None:
    x = var("x", (3,))
    h = ex.relu(x).named("h")
    graph = graph_of(h, ex.sum(h).named("y"), x)
    assert [name for name, _ in graph.results] == ["h", "y", "x"]
    assert {graph.values[value].name for value in graph.outputs} == {"h", "y", "x"}


def test_a_variable_is_the_same_wherever_it_is_named() -> None:
    graph = graph_of(var("x", (2,)) * var("x", (2,)))
    assert [value.name for value in graph.values] == ["x", "v1"]


def test_another_name_for_the_same_computes_nothing() -> None:
    graph = graph_of(*parse("h = exp(x); a = h; b = x; y = a + h * b; c = a"))
    assert steps(graph) == [("exp", "h"), ("mul", "v1"), ("add", "y")]
    assert [name for name, _ in graph.results] == ["y", "c"]
    assert graph.values[graph.tensors[dict(graph.results)["c"]].value].name == "h"


def test_numbers_do_not_take_names_that_are_given() -> None:
    x = var("v1")
    graph = graph_of(ex.exp(ex.sin(x)).named("v2"))
    assert [value.name for value in graph.values] == ["v1", "v3", "v2"]


def test_transposing_and_reshaping_make_no_ops() -> None:
    x = var("x", (2, 3))
    graph = graph_of(ex.reshape(x.T, (3, 2, 1)).named("y"))
    assert graph.ops == ()
    assert graph.tensors[dict(graph.results)["y"]].shape == (3, 2, 1)
    (made,) = computed(graph, x=torch.arange(6.0).reshape(2, 3))
    assert torch.equal(made, torch.arange(6.0).reshape(2, 3).T.reshape(3, 2, 1))


def test_variables_have_roles_types_and_bytes() -> None:
    w = var("w", (2, 3), dtype="float64", role=Role.PARAMETER)
    graph = graph_of(w * 2)
    assert (graph.values[0].bytes, graph.values[0].role) == (48, Role.PARAMETER)
    assert graph.tensors[1].dtype == "float64"


def test_the_network_of_two_layers_is_the_one_of_the_lecture() -> None:
    graph, loss, parameters = two_layer_mlp(batch=4, width=6, classes=3)
    assert [name for _, name in steps(graph)] == ["fc1", "sigmoid", "fc2", "softmax", "log", "loss"]
    assert [graph.values[graph.tensors[each].value].name for each in parameters] == ["w1", "b1", "w2", "b2"]
    assert graph.tensors[loss].shape == ()
    assert graph.results == (("loss", loss),)
    assert [value.bytes for value in graph.values if value.role is Role.PARAMETER] == [144, 24, 72, 12]
    torch.manual_seed(0)
    shapes = {"input": (4, 6), "w1": (6, 6), "b1": (6,), "w2": (3, 6), "b2": (3,)}
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    label = torch.tensor([0, 2, 1, 1])
    hidden = torch.sigmoid(F.linear(given["input"], given["w1"], given["b1"]))
    right = F.cross_entropy(F.linear(hidden, given["w2"], given["b2"]), label)
    torch.testing.assert_close(computed(graph, label=label, **given)[0], right)


# Beside torch ------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[..., Expression], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "exp": (ex.exp, torch.exp, [(2, 3)]),
    "ln": (ex.ln, torch.log, [(2, 3)]),
    "log": (ex.log, torch.log, [(2, 3)]),
    "sin": (ex.sin, torch.sin, [(2, 3)]),
    "cos": (ex.cos, torch.cos, [(2, 3)]),
    "tanh": (ex.tanh, torch.tanh, [(2, 3)]),
    "sigmoid": (ex.sigmoid, torch.sigmoid, [(2, 3)]),
    "relu": (ex.relu, torch.relu, [(2, 3)]),
    "gelu": (ex.gelu, F.gelu, [(2, 3)]),
    "silu": (ex.silu, F.silu, [(2, 3)]),
    "sqrt": (ex.sqrt, torch.sqrt, [(2, 3)]),
    "abs": (lambda a: ex.abs(-a), lambda a: torch.abs(-a), [(2, 3)]),
    "neg": (lambda a: -a, lambda a: -a, [(2, 3)]),
    "add": (lambda a, b: a + b + 1, lambda a, b: a + b + 1, [(2, 3), (3,)]),
    "number plus": (lambda a: 2 + a, lambda a: 2 + a, [(3,)]),
    "sub": (lambda a, b: a - b - 1, lambda a, b: a - b - 1, [(2, 1), (3,)]),
    "number minus": (lambda a: 2 - a, lambda a: 2 - a, [(3,)]),
    "mul": (lambda a, b: 3 * a * b, lambda a, b: 3 * a * b, [(2, 3), ()]),
    "div": (lambda a, b: a / b / 2, lambda a, b: a / b / 2, [(2, 3), (3,)]),
    "number over": (lambda a: 2 / a + 1 / a, lambda a: 2 / a + 1 / a, [(3,)]),
    "pow": (lambda a, b: a**3 + a**b + 2**b, lambda a, b: a**3 + a**b + 2**b, [(3,), (3,)]),
    "sum": (lambda a: ex.sum(a), lambda a: a.sum(), [(2, 3)]),
    "sum of one": (lambda a: ex.sum(a, -1), lambda a: a.sum(-1), [(2, 3)]),
    "sum kept": (lambda a: ex.sum(a, keepdim=True), lambda a: a.sum((0, 1), True), [(2, 3)]),
    "mean": (lambda a: ex.mean(a, (0, 2), True), lambda a: a.mean((0, 2), True), [(2, 3, 4)]),
    "mm": (lambda a, b: a @ b, torch.matmul, [(2, 3), (3, 4)]),
    "matmul of transposed": (lambda a, b: a.T @ b.T, lambda a, b: a.T @ b.T, [(3, 2), (4, 3)]),
    "matmul of vectors": (ex.matmul, torch.matmul, [(3,), (3,)]),
    "matmul by a vector": (ex.matmul, torch.matmul, [(2, 3), (3,)]),
    "matmul of a vector": (ex.matmul, torch.matmul, [(3,), (2, 3, 4)]),
    "matmul of batches": (ex.matmul, torch.matmul, [(2, 5, 2, 3), (5, 3, 4)]),
    "matmul by one matrix": (ex.matmul, torch.matmul, [(5, 2, 3), (3, 4)]),
    "linear": (ex.linear, F.linear, [(5, 2, 3), (4, 3), (4,)]),
    "softmax": (lambda a: ex.softmax(a, 0), lambda a: torch.softmax(a, 0), [(2, 3)]),
    "log_softmax": (ex.log_softmax, lambda a: torch.log_softmax(a, -1), [(2, 3)]),
    "transpose": (lambda a: ex.transpose(a, 0, 2) * 2, lambda a: a.transpose(0, 2) * 2, [(2, 3, 4)]),
    "reshape": (lambda a: ex.reshape(a.T, (-1, 2)), lambda a: a.T.reshape(-1, 2), [(2, 3)]),
    "concat": (lambda a, b: ex.concat(a, b, dim=-1), lambda a, b: torch.cat([a, b], -1), [(2, 3), (2, 1)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_computes_what_torch_does(name: str) -> None:
    mine, theirs, shapes = FUNCTIONS[name]
    torch.manual_seed(1)
    real = {f"x{n}": torch.rand(shape) + 0.5 for n, shape in enumerate(shapes)}
    graph = graph_of(mine(*(var(key, tensor.shape) for key, tensor in real.items())))
    torch.testing.assert_close(computed(graph, **real)[0], theirs(*real.values()))


def test_losses_compute_what_torch_does() -> None:
    scores, label = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    text = "a = cross_entropy(x, label); b = nll_loss(log_softmax(x), label)"
    graph = graph_of(*parse(text, {"x": (4, 3), "label": (4,)}, dtypes={"label": "int64"}))
    assert computed(graph, x=scores, label=label) == [F.cross_entropy(scores, label)] * 2


@given(texts())
def test_text_means_what_it_means_in_python(text: str) -> None:
    graph = graph_of(*parse(text, {name: tuple(tensor.shape) for name, tensor in VARIABLES.items()}))
    torch.testing.assert_close(computed(graph, **VARIABLES)[0], in_python(text, VARIABLES))


# Text --------------------------------------------------------------------------------------------------


def test_definitions_may_come_in_any_order() -> None:
    (y,) = parse("y = sum(h)\nh = relu(x @ w)", {"x": (2, 3), "w": (3, 4)}, parameters=["w"])
    graph = graph_of(y)
    assert steps(graph) == [("mm", "v1"), ("relu", "h"), ("sum", "y")]
    assert {value.name: value.role for value in graph.values[:2]} == {"x": Role.BATCH, "w": Role.PARAMETER}


def test_definitions_that_nobody_reads_are_the_outputs() -> None:
    found = parse("a = x * 2; b = a + 1; c = exp(a); x + c")
    assert [each.name for each in found] == ["b", ""]


def test_types_of_variables_can_be_given() -> None:
    graph = graph_of(*parse("x * y", dtype="float64", dtypes={"y": "float32"}))
    assert [tensor.dtype for tensor in graph.tensors] == ["float64", "float32", "float64"]


def test_numbers_are_computed_while_reading() -> None:
    graph = graph_of(*parse("x * (2 ** 3 - 1) / -(1 / 2)"))
    assert [repr(op.args[1]) for op in graph.ops] == ["7", "-0.5"]


def test_options_of_functions_are_read() -> None:
    graph = graph_of(*parse("y = reshape(sum(x, dim=(0, -1), keepdim=True), (3, 1)).T", {"x": (2, 3, 4)}))
    assert graph.tensors[dict(graph.results)["y"]].shape == (1, 3)


# Refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y = z + 1; z = y * 2", r"depend on each other: y -> z -> y\. Break the cycle"),
        ("x = x + 1", "depend on each other: x -> x"),
        ("a = b; b = c; c = d * a; d = 1 * q", "depend on each other: a -> b -> c -> a"),
        ("y = 1; y = x", "'y' is defined twice"),
        ("a = b = x", "'a' is defined twice"),
        ("exp(a", r"'exp\(a' cannot be read as an expression: '\(' was never closed, at '\(a'"),
        ("a +", r"'a \+' cannot be read as an expression: invalid syntax, after 'a \+'"),
        ("", "there is nothing to compute"),
        ("3 + 4", r"'3 \+ 4' has no variable in it"),
        ("x ^ 2", r"'x \^ 2' is not part of an expression.* Powers are written \*\*"),
        ("x if y else z", "'x if y else z' is not part of an expression"),
        ("x.grad", "'x.grad' is not part of an expression"),
        ("'x'", "is not part of an expression"),
        ("True and x", "is not part of an expression"),
        ("import os", "'import os' is neither an expression nor a definition"),
        ("(lambda: x)()", "is not part of an expression"),
        ("x @ 2", "@ is for matrices, and a number is none"),
        ("x + (1, 2)", "computes with a list"),
        ("-(1, 2) + x", "computes with a list"),
        ("x + 1/0", "'1/0' cannot be computed: float division by zero"),
        ("x + 9**9**9", "cannot be computed"),
        ("x + (-8)**0.5", "is not a real number"),
        ("sum(x, 1, 2, 3)", r"'sum\(x, 1, 2, 3\)': sum\(\) takes from 1 to 3"),
        ("exp(x, dim=1)", "unexpected keyword argument 'dim'"),
        ("exp(3)", r"exp takes expressions, not 3\. Make it a var"),
        ("concat()", "concat needs at least one expression"),
        ("x" + "+x" * 5000, "nested too deeply"),
    ],
)
def test_text_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        graph_of(*parse(text))


def test_an_unknown_function_is_answered_with_near_names() -> None:
    with pytest.raises(
        UnknownFunction, match=r"no function called 'sigmoyd'\. Did you mean sigmoid\?"
    ) as caught:
        parse("sigmoyd(x)")
    assert (caught.value.name, caught.value.nearest) == ("sigmoyd", ("sigmoid",))
    with pytest.raises(UnknownFunction, match="no function called '__import__'"):
        parse("__import__('os')")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": {"z": (2,)}}, "'z' is described as a variable, but does not occur in 'y = exp"),
        ({"shapes": {"y": (2,)}}, "'y' is described as a variable, but is computed in"),
        ({"parameters": ["w"]}, "'w' is described as a variable, but does not occur"),
        ({"shapes": {"x": (2, 0)}}, "variable 'x': sizes are whole numbers above zero, not 0"),
    ],
)
def test_descriptions_of_what_is_no_variable_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse("y = exp(x)", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, w: x @ w, r"matmul: .* x is \(2, 3\) and w is \(4, 5\)"),
        (lambda x, w: x @ ex.sum(w), r"matmul: .* x is \(2, 3\) and v1 is \(\)"),
        (lambda x, w: ex.exp(x) + w, r"add: .* v1 is \(2, 3\) and w is \(4, 5\)"),
        (lambda x, w: ex.linear(x, w, x), r"linear: .* x is \(2, 3\) and w is \(4, 5\) and x is"),
        (lambda x, w: ex.concat(x, w), r"concat: .* x is \(2, 3\) and w is \(4, 5\)"),
        (lambda x, w: ex.reshape(x, (4, -1)), r"reshape: .* x is \(2, 3\) and the new shape is \(4, 1\)"),
        (lambda x, w: ex.reshape(x, (-2, -3)), r"reshape: .* the new shape is \(-2, -3\)"),
        (lambda x, w: ex.nll_loss(x, w), r"nll_loss: .* x is \(2, 3\) and w is \(4, 5\)"),
        (
            lambda x, w: ex.matmul(var("a", (2, 3, 4)), var("b", (3, 4, 5))),
            r"matmul: .* a is \(2, 3, 4\) and b is \(3, 4, 5\)",
        ),
    ],
)
def test_shapes_that_do_not_go_together_are_named(
    make: Callable[[Expression, Expression], Expression], message: str
) -> None:
    with pytest.raises(ShapeMismatch, match=message):
        graph_of(make(var("x", (2, 3)), var("w", (4, 5))))


def test_dimensions_that_are_not_there_are_refused() -> None:
    x = var("x", (2, 3))
    for make in (
        ex.softmax,
        ex.sum,
        lambda a, dim: ex.transpose(a, dim),
        lambda a, dim: ex.concat(a, dim=dim),
    ):
        with pytest.raises(
            BadRequest, match=r"'x' has shape \(2, 3\), so there is no dimension 2\. Name one of 0, 1"
        ):
            graph_of(make(x, 2))


def test_labels_are_whole_numbers() -> None:
    with pytest.raises(BadRequest, match="'t' holds labels, so its dtype must be int64, not float32"):
        graph_of(ex.cross_entropy(var("x", (4, 3)), var("t", (4,))))


def test_a_name_stands_for_one_thing() -> None:
    with pytest.raises(BadRequest, match="'x' stands for two different things"):
        graph_of(var("x") + var("x", (2,)))
    with pytest.raises(BadRequest, match="'x' stands for two different things"):
        graph_of(ex.exp(var("x")).named("x"))
    with pytest.raises(BadRequest, match="'h' stands for two different things"):
        graph_of(ex.exp(var("x")).named("h") + ex.sin(var("x")).named("h"))


def test_what_is_no_variable_is_refused() -> None:
    with pytest.raises(BadRequest, match="a variable needs a name"):
        var("")
    with pytest.raises(BadRequest, match="sizes are whole numbers above zero, not -1"):
        var("x", (2, -1))
    with pytest.raises(MalformedGraph, match="'real' is not a dtype"):
        var("x", dtype="real")
    with pytest.raises(BadRequest, match="add takes expressions and numbers, not str"):
        _ = var("x") + "y"  # type: ignore[operator]
    with pytest.raises(BadRequest, match="there is nothing to compute"):
        graph_of()
