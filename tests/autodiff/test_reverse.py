"""Gradients by extension: the lecture's example by hand, then everything beside torch.autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from lowtide import capture
from lowtide.autodiff import expression as ex
from lowtide.autodiff.expression import graph_of, var
from lowtide.autodiff.parse import parse
from lowtide.autodiff.reverse import Extended, forward_part, gradient
from lowtide.errors import BadRequest, NotDifferentiable
from lowtide.execute.executor import Executor, evaluate
from lowtide.ir.builder import Growing
from lowtide.ir.graph import Graph, Phase, Ref, Role
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.lesson.networks import two_layer_mlp
from lowtide.solvers import solve
from lowtide.solvers.solution import GraphSolution
from lowtide.zoo import Sizes, workload
from tests.helpers.drawn import VARIABLES, drawn, in_python, laid_out_otherwise, numbers, texts
from tests.helpers.effort import examples

close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def backward(graph: Graph) -> list[str]:
    return [op.target.split(".")[1] for op in graph.ops if op.phase is Phase.BACKWARD]


def kept(graph: Graph) -> Graph:
    """The graph with all its values as outputs, so that they can be looked at afterwards."""
    return replace(graph, outputs=frozenset(range(len(graph.values))))


def dead_ops(graph: Graph) -> list[str]:
    """Ops of the backward that make nothing anybody reads or keeps."""
    return [
        op.label
        for op in graph.ops
        if op.phase is Phase.BACKWARD
        and not any(graph.readers.get(v) or v in graph.outputs for v in op.creates)
    ]


# By hand -----------------------------------------------------------------------------------------------


def test_the_example_of_the_lecture() -> None:
    graph = graph_of(*parse("y = ln(x1) + x1*x2 - sin(x2)"))
    more = gradient(graph, "y", ["x1", "x2"])
    given = {"x1": torch.tensor(2.0), "x2": torch.tensor(5.0)}
    trace = [tensor for op in graph.ops for tensor in op.outputs if tensor is not None]
    forward = evaluate(kept(more.graph), given, trace)
    assert [round(number.item(), 3) for number in forward] == [0.693, 10.0, -0.959, 10.693, 11.652]
    adjoints = evaluate(more.graph, given, [tensor for tensor in more.gradients if tensor is not None])
    assert [round(number.item(), 3) for number in adjoints] == [5.5, 1.716]
    assert backward(more.graph) == ["full", "neg", "cos", "mul", "mul", "mul", "add", "div", "add"]
    names = [value.name for value in more.graph.values[7:] if value.name.endswith(".grad")]
    assert names == ["y.grad", "v3.grad", "x2.grad", "x1.grad"]


def test_the_graph_is_extended_and_nothing_in_it_is_changed() -> None:
    graph = graph_of(*parse("y = exp(a*b+3)"))
    more = gradient(graph, "y", ["a"])
    assert more.graph.ops[: len(graph.ops)] == graph.ops
    assert more.graph.values[: len(graph.values)] == graph.values
    assert more.graph.tensors[: len(graph.tensors)] == graph.tensors
    assert {op.phase for op in more.graph.ops[len(graph.ops) :]} == {Phase.BACKWARD}
    (found,) = more.gradients
    assert more.graph.results == (("y", 4), ("a.grad", found))
    value = more.graph.values[-1]
    assert (value.name, value.role, value.bytes) == ("a.grad", Role.GRADIENT, 4)
    assert more.graph.outputs == {*graph.outputs, value.id}


def test_only_what_lies_between_is_differentiated() -> None:
    graph = graph_of(*parse("y = exp(a) * sin(b); z = cos(y) + tanh(a)"))
    assert backward(gradient(graph, "y", ["b"]).graph) == ["full", "mul", "cos", "mul"]
    middle = gradient(graph, "z", ["y"])
    assert backward(middle.graph) == ["full", "sin", "neg", "mul"]
    assert dead_ops(middle.graph) == []


def test_what_the_output_does_not_depend_on_has_no_gradient() -> None:
    graph = graph_of(*parse("y = exp(a); z = sin(b)"))
    more = gradient(graph, "y", ["b", "a"])
    assert more.gradients[0] is None
    assert more.gradients[1] is not None
    nothing = gradient(graph, "y", ["b"])
    assert (nothing.gradients, nothing.graph.ops) == ((None,), graph.ops)


def test_the_gradient_by_itself_is_one() -> None:
    graph = graph_of(*parse("y = exp(a)"))
    more = gradient(graph, "y", ["y"])
    assert [op.target for op in more.graph.ops[1:]] == ["aten.full.default"]
    assert more.graph.results[1][0] == "y.grad"


def test_equal_gradients_share_a_value() -> None:
    graph = graph_of(*parse("y = exp(a + b)"))
    more = gradient(graph, "y", ["a", "b"])
    assert more.gradients[0] == more.gradients[1]
    assert [name for name, _ in more.graph.results] == ["y", "a.grad", "b.grad"]
    assert more.graph.values[-1].name == "a.grad"


def test_a_gradient_that_is_one_number_everywhere_is_written_out() -> None:
    graph = graph_of(ex.sum(var("x", (2, 3))).named("y"))
    more = gradient(graph, "y", ["x"])
    assert backward(more.graph) == ["full", "clone"]
    assert more.graph.values[-1].bytes == 24


def test_ops_belong_to_the_module_they_differentiate() -> None:
    growing = Growing(graph_of(*parse("y = exp(a)")))
    graph = growing.finish()
    (op,) = graph.ops
    graph = replace(graph, ops=(replace(op, module="layers.2", call=3, section=1),))
    last = gradient(graph, "y", ["a"]).graph.ops[-1]
    assert (last.target, last.module, last.call, last.section) == ("aten.mul.Tensor", "layers.2", 3, 1)


def test_a_seed_weighs_the_elements_of_the_output() -> None:
    graph = graph_of((var("x", (3,)) ** 2).named("y"), var("s", (3,)))
    more = gradient(graph, "y", ["x"], seed="s")
    x, s = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, -1.0])
    (found,) = evaluate(more.graph, {"x": x, "s": s}, [dict(more.graph.results)["x.grad"]])
    assert found.tolist() == [2.0, 0.0, -6.0]
    assert "full" not in backward(more.graph)


def test_a_gradient_that_is_the_seed_keeps_its_name() -> None:
    graph = graph_of((var("x", (3,)) + 1).named("y"), var("s", (3,)))
    more = gradient(graph, "y", ["x"], seed="s")
    assert more.graph.ops == graph.ops
    assert dict(more.graph.results)["x.grad"] == dict(graph.results)["s"]
    assert more.graph.values[more.graph.tensors[dict(graph.results)["s"]].value].name == "s"


def test_gradients_of_gradients_are_numbered() -> None:
    first = gradient(graph_of(*parse("y = x**3")), "y", ["x"])
    second = gradient(first.graph, "x.grad", ["x"])
    third = gradient(second.graph, "x.grad.2", ["x"])
    names = [name for name, _ in third.graph.results]
    assert names == ["y", "x.grad", "x.grad.2", "x.grad.3"]
    found = evaluate(third.graph, {"x": torch.tensor(2.0)}, [tensor for _, tensor in third.graph.results])
    assert [number.item() for number in found] == [8.0, 12.0, 12.0, 6.0]
    assert [value.name for value in third.graph.values if value.role is Role.GRADIENT] == names[1:]


# Whole networks ----------------------------------------------------------------------------------------


class Convolutional(nn.Module):
    """Convolutions, batch normalisation, both kinds of pooling, a shortcut and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.avg_pool2d(x + self.body(x), 2)
        out: Tensor = self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return out


def convolutional() -> tuple[nn.Module, Tensor, Callable[[Any], Tensor]]:
    return Convolutional(), torch.randn(2, 3, 16, 16), partial(F.cross_entropy, target=torch.tensor([1, 4]))


def from_zoo(name: str, **sizes: int) -> tuple[nn.Module, Tensor, Callable[[Any], Tensor]]:
    found = workload(name, Sizes(**sizes))
    assert found.loss is not None
    return found.model, found.args[0], found.loss


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, Callable[[Any], Tensor]]]] = {
    "mlp": partial(from_zoo, "mlp", batch=4, width=16),
    "cnn": convolutional,
    "lstm": partial(from_zoo, "lstm", batch=2, tokens=4, width=8, layers=2),
    "gpt": partial(from_zoo, "gpt", batch=2, tokens=8, layers=2, width=16, heads=2, vocab=23),
}


@cache
def network(name: str) -> tuple[nn.Module, Tensor, Callable[[Any], Tensor], Graph]:
    torch.manual_seed(0)
    model, x, loss = NETWORKS[name]()
    return model, x, loss, capture(model, (x,), loss)


def given_to(graph: Graph, name: str) -> dict[str, Tensor]:
    """The resident values of a graph of a network: parameters, buffers and batch."""
    model, x, loss, _ = network(name)
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    target = loss.keywords["target"]  # type: ignore[attr-defined]
    names = [graph.values[value].name for value in graph.resident]
    batch = {each: target if each == "target" else x for each in names if each not in known}
    return {each: {**known, **batch}[each].detach().clone() for each in names}


def extended(name: str) -> tuple[Graph, Extended]:
    model, _, _, graph = network(name)
    front = forward_part(graph)
    ((loss, _),) = front.results
    return front, gradient(front, loss, [each for each, _ in model.named_parameters()])


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_a_network_are_autograds_to_the_last_bit(name: str) -> None:
    model, x, loss, _ = network(name)
    _, more = extended(name)
    found = evaluate(
        more.graph, given_to(more.graph, name), [each for each in more.gradients if each is not None]
    )
    fresh = copy.deepcopy(model)
    loss(fresh(x)).backward()
    for mine, (path, parameter) in zip(found, fresh.named_parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(mine, parameter.grad), path


@pytest.mark.parametrize("name", NETWORKS)
def test_the_backward_of_a_network_is_as_long_as_the_captured_one(name: str) -> None:
    *_, captured = network(name)
    front, more = extended(name)
    mine, theirs = backward(more.graph), backward(captured)
    slicing = {"slice_backward", "select_backward"}
    assert sorted(op for op in mine if op not in {"full", *slicing}) == sorted(
        op for op in theirs if op not in slicing
    )
    assert len(mine) == len(theirs) + 1  # the seed, which a capture is given
    assert more.graph.ops[: len(front.ops)] == front.ops
    assert dead_ops(more.graph) == []
    mine_bytes, bytes_of_capture = (
        simulate(each, straight(each)).peak_bytes for each in (more.graph, captured)
    )
    assert abs(mine_bytes - bytes_of_capture) <= 4


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_new_tensors_of_a_network_look_as_torch_makes_them(name: str) -> None:
    _, more = extended(name)
    assert laid_out_otherwise(more.graph, given_to(more.graph, name)) == []


def test_the_forward_part_of_a_capture_is_the_forward_alone() -> None:
    *_, graph = network("cnn")
    front = forward_part(graph)
    assert [op.target for op in front.ops] == [op.target for op in graph.ops if op.phase is Phase.FORWARD]
    assert {op.phase for op in front.ops} == {Phase.FORWARD}
    assert "gradient of the loss" not in {value.name for value in front.values}
    assert [name for name, _ in front.results] == [name for name, _ in graph.results if "grad" not in name]
    parameters = [value.name for value in graph.values if value.role in (Role.PARAMETER, Role.BUFFER)]
    assert [value.name for value in front.values if value.role in (Role.PARAMETER, Role.BUFFER)] == parameters
    assert forward_part(front) == front


def test_parameters_that_the_forward_does_not_use_stay() -> None:
    growing = Growing(gradient(graph_of(*parse("y = exp(x)")), "y", ["x"]).graph)
    growing.resident("spare", (3,), role=Role.PARAMETER)
    growing.resident("tangent", ())
    front = forward_part(growing.finish())
    assert [value.name for value in front.values] == ["x", "y", "spare"]
    assert [tensor.shape for tensor in front.tensors] == [(), (), (3,)]
    assert front.results == (("y", 1),)


def test_the_network_of_two_layers_has_autograds_gradients() -> None:
    graph, loss, parameters = two_layer_mlp(batch=4, width=6, classes=3)
    more = gradient(graph, loss, parameters)
    torch.manual_seed(0)
    shapes = {"input": (4, 6), "w1": (6, 6), "b1": (6,), "w2": (3, 6), "b2": (3,)}
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    label = torch.tensor([0, 2, 1, 1])
    mine = evaluate(
        more.graph, {**given, "label": label}, [each for each in more.gradients if each is not None]
    )
    leaves = [given[name].requires_grad_() for name in ("w1", "b1", "w2", "b2")]
    hidden = torch.sigmoid(F.linear(given["input"], leaves[0], leaves[1]))
    odds = torch.softmax(F.linear(hidden, leaves[2], leaves[3]), -1)
    right = torch.autograd.grad(F.nll_loss(odds.log(), label), leaves)
    assert all(torch.equal(*pair) for pair in zip(mine, right, strict=True))


# Higher order ------------------------------------------------------------------------------------------


def hessian(graph: Graph, output: str, wrt: str, given: dict[str, Tensor]) -> Tensor:
    """Row by row: the gradient of every element of the gradient."""
    first = gradient(graph, output, [wrt])
    (found,) = first.gradients
    assert found is not None
    growing = Growing(first.graph)
    flat = growing.reshaped(Ref(found), (given[wrt].numel(),))
    rows = [growing.selected(flat, 0, row).tensor for row in range(given[wrt].numel())]
    grown = growing.finish()
    made: list[Tensor] = []
    for row in rows:
        more = gradient(grown, row, [wrt])
        (tensor,) = more.gradients
        made.append(
            torch.zeros_like(given[wrt]) if tensor is None else evaluate(more.graph, given, [tensor])[0]
        )
    return torch.stack([each.flatten() for each in made])


def _plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.exp(torch.sum(torch.sin(x * w) + x**3 / (w + x * x)) * 0.1)


def _layered(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.tanh(x.reshape(2, 3) @ w.reshape(3, 2))
    return F.cross_entropy(torch.sigmoid(hidden) @ w.reshape(2, 3), torch.arange(2) * 2)


def _attentive(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x.reshape(2, 3) @ (w.reshape(3, 2) * factor) for factor in (1, 2, 3))
    return (torch.softmax(q @ k.t(), -1) @ F.gelu(v)).square().mean()


@pytest.mark.parametrize("function", [_plain, _layered, _attentive])
@pytest.mark.parametrize("by", [0, 1])
def test_a_hessian_is_autograds(function: Callable[[Tensor, Tensor], Tensor], by: int) -> None:
    torch.manual_seed(1)
    inputs = [torch.rand(6, dtype=torch.float64) + 0.5 for _ in range(2)]
    graph = drawn(function, inputs)
    named = replace(graph.graph, results=(("y", graph.output),))
    mine = hessian(named, "y", f"x{by}", {"x0": inputs[0], "x1": inputs[1]})
    whole = torch.autograd.functional.hessian(function, tuple(inputs))
    torch.testing.assert_close(mine, whole[by][by], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mine, mine.T, rtol=1e-10, atol=1e-12)


def test_the_hessian_of_the_lectures_example() -> None:
    graph = graph_of(*parse("y = ln(x1) + x1*x2 - sin(x2)"))
    first = gradient(graph, "y", ["x1", "x2"])
    rows = [gradient(first.graph, name, ["x1", "x2"]) for name in ("x1.grad", "x2.grad")]
    given = {"x1": torch.tensor(2.0), "x2": torch.tensor(5.0)}
    found = [
        round(evaluate(row.graph, given, [tensor])[0].item(), 6)
        for row in rows
        for tensor in row.gradients
        if tensor is not None
    ]
    assert found == [-0.25, 1.0, 1.0, round(torch.sin(torch.tensor(5.0)).item(), 6)]


def test_the_hessian_of_a_piecewise_linear_function_has_no_entries() -> None:
    first = gradient(graph_of(*parse("y = relu(a) * 3")), "y", ["a"])
    assert gradient(first.graph, "a.grad", ["a"]).gradients == (None,)


@settings(max_examples=examples(30))
@given(texts())
def test_gradients_of_any_expression_and_their_gradients_are_autograds(text: str) -> None:
    values = {name: tensor.double().requires_grad_() for name, tensor in VARIABLES.items()}
    held = {name: tensor.detach() for name, tensor in values.items()}
    (y,) = parse(text, {name: tuple(tensor.shape) for name, tensor in values.items()}, dtype="float64")
    more = gradient(graph_of(y.named("y")), "y", list(values))
    right = torch.autograd.grad(in_python(text, values), list(values.values()), create_graph=True)
    for mine, theirs in zip(more.gradients, right, strict=True):
        assert mine is not None
        close(evaluate(more.graph, held, [mine])[0], theirs.detach())
    assert dead_ops(more.graph) == []
    again = gradient(more.graph, "a.grad", list(values))
    for tensor, wanted in zip(
        again.gradients, torch.autograd.grad(right[0], list(values.values())), strict=True
    ):
        assert tensor is not None
        close(evaluate(again.graph, held, [tensor])[0], wanted)


# Refusals ----------------------------------------------------------------------------------------------


def test_an_output_of_many_numbers_needs_a_seed() -> None:
    graph = graph_of(ex.exp(var("x", (3,))).named("y"), var("s", (2,)))
    with pytest.raises(
        BadRequest, match=r"'y' has shape \(3,\), and only a single number has .* give a seed"
    ):
        gradient(graph, "y", ["x"])
    with pytest.raises(
        BadRequest, match=r"the seed is float32 of shape \(2,\), but 'y' is float32 of shape \(3,\)"
    ):
        gradient(graph, "y", ["x"], seed="s")


def test_what_is_not_there_cannot_be_differentiated() -> None:
    graph = graph_of(*parse("y = exp(x)"))
    with pytest.raises(BadRequest, match="no value is called 'z'"):
        gradient(graph, "y", ["z"])
    with pytest.raises(BadRequest, match="there is no tensor 17"):
        gradient(graph, 17, ["x"])


def test_whole_numbers_have_no_gradient() -> None:
    graph = graph_of(*parse("y = cross_entropy(x, t)", {"x": (4, 3), "t": (4,)}, dtypes={"t": "int64"}))
    with pytest.raises(BadRequest, match="'t' is of dtype int64, so there are no gradients by it or of it"):
        gradient(graph, "y", ["t"])


def test_the_op_that_makes_whole_numbers_is_named() -> None:
    x = torch.randn(4, 3)
    largest = drawn(lambda a: (a * 2).argmax(1), [x])
    with pytest.raises(NotDifferentiable, match=r"op 1 \(aten\.argmax\): it makes numbers of dtype int64"):
        gradient(largest.graph, largest.output, largest.inputs)
    accuracy = drawn(lambda a: ((a * 2).argmax(1) == 1).to(torch.float32).mean(), [x])
    with pytest.raises(
        NotDifferentiable, match=r"op 1 \(aten\.argmax\): it makes numbers of dtype int64"
    ) as caught:
        gradient(accuracy.graph, accuracy.output, accuracy.inputs)
    assert caught.value.op == 1


def test_ops_without_derivatives_are_named() -> None:
    x = torch.rand(4)
    ordered = drawn(lambda a: a.sort()[0].sum(), [x])
    with pytest.raises(
        NotDifferentiable, match=r"op 0 \(aten\.sort\): there is no rule for aten\.sort\.default"
    ):
        gradient(ordered.graph, ordered.output, ordered.inputs)
    drawing = drawn(lambda a: torch.bernoulli(a).sum(), [x])
    with pytest.raises(NotDifferentiable, match=r"op 0 \(aten\.bernoulli\): it draws random numbers"):
        gradient(drawing.graph, drawing.output, drawing.inputs)
    spread = drawn(
        lambda a: F.layer_norm(a, (4,)).sum() + torch.native_layer_norm(a, (4,), None, None, 1e-5)[1], [x]
    )
    with pytest.raises(NotDifferentiable, match="its derivative for result 1 is not known"):
        gradient(spread.graph, spread.output, spread.inputs)


def test_numbers_that_only_give_their_shape_are_passed_over() -> None:
    graph = drawn(lambda a: (a * torch.ones_like(a * 3)).sum(), [torch.randn(4)])
    more = gradient(graph.graph, graph.output, graph.inputs)
    (mine,) = numbers(more.graph, [torch.randn(4)], more.gradients)
    assert mine.tolist() == [1.0] * 4


def test_a_value_may_be_overwritten_before_it_is_used() -> None:
    def earlier(a: Tensor, b: Tensor) -> Tensor:
        b.add_(1)
        return (a * b).sum()

    graph = drawn(earlier, [torch.ones(3), torch.ones(3)])
    more = gradient(graph.graph, graph.output, graph.inputs[:1])
    (mine,) = numbers(more.graph, [torch.ones(3), torch.ones(3)], more.gradients)
    assert mine.tolist() == [2.0] * 3
    with pytest.raises(NotDifferentiable, match=r"op 0 \(aten\.add_\): it overwrites 'x1'"):
        gradient(graph.graph, graph.output, graph.inputs)


def test_values_that_are_overwritten_are_noticed() -> None:
    x = torch.randn(4)
    changed = drawn(lambda a: (a * 1).relu_().sum(), [x])
    message = r"op 1 \(aten\.relu_\): it overwrites 'mul'\. Capture the step"
    with pytest.raises(NotDifferentiable, match=message):
        gradient(changed.graph, changed.output, changed.inputs)

    def later(a: Tensor, b: Tensor) -> Tensor:
        made = (a * b).sum()
        b.zero_()
        return made

    late = drawn(later, [x, x + 1])
    message = r"op 0 \(aten\.mul\): its backward needs 'x1', which op 2 \(aten\.zero_\) overwrites"
    with pytest.raises(NotDifferentiable, match=message):
        gradient(late.graph, late.output, late.inputs[:1])
    assert gradient(late.graph, late.output, late.inputs[1:]).gradients != (None,)


def test_an_extended_graph_can_be_planned_and_run_as_planned() -> None:
    a = var("a", (64,))
    y = ex.sum(ex.sin(ex.exp(ex.sin(ex.exp(a)))))
    extended = gradient(graph_of(y), "v5", ["a"])
    lowest, plain = solve(extended.graph, "auto", "min"), straight(extended.graph)
    assert isinstance(lowest, GraphSolution)
    assert lowest.peak_bytes < simulate(extended.graph, plain).peak_bytes
    x = torch.linspace(-1.0, 1.0, 64)
    runs = [Executor(extended.graph, {"a": x}, schedule=order) for order in (plain, lowest.schedule)]
    for run in runs:
        run.run()
    assert torch.equal(runs[0].results["a.grad"], runs[1].results["a.grad"])
