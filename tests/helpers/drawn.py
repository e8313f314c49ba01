"""Graphs for tests of plain torch functions, and expressions at random, with what is needed to check them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.compat.tensors import tensors_in
from lowtide.execute.executor import evaluate
from lowtide.execute.out_variants import kernel, tensor_leaves
from lowtide.ir.builder import Growing
from lowtide.ir.graph import Arg, Graph, Origin, Phase, Ref, Role, StepName, Symbol
from lowtide.ir.validate import validate
from lowtide.trace.graph_builder import GraphBuilder

Function = Callable[..., Any]


@dataclass(frozen=True)
class Drawn:
    """A function as a graph: its arguments x0, x1, … are resident; `output` is its first result."""

    graph: Graph
    inputs: tuple[int, ...]
    output: int


class _Writer(TorchDispatchMode):
    def __init__(self, builder: GraphBuilder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.builder = builder
        self.phase = Phase.FORWARD
        self.alive: list[Tensor] = []  # storages are known by their addresses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive.extend(tensors_in(args, result))
        self.builder.add_op(func, args, kwargs or {}, result, phase=self.phase)
        return result


def drawn(function: Function, inputs: Sequence[Tensor]) -> Drawn:
    """The graph of what `function` does with these tensors."""
    builder = GraphBuilder("drawn", Origin.JOINT, "cpu", {})
    plain = [tensor.detach() for tensor in inputs]
    for position, tensor in enumerate(plain):
        builder.add_value(tensor, Role.BATCH, f"x{position}")
        builder.add_result(f"x{position}", tensor)
    with _Writer(builder) as writer:
        result = next(tensors_in(function(*plain)))
    builder.add_result("y", result)
    value = builder.value_of(result)
    assert value is not None
    assert writer.alive
    graph = validate(builder.finish([value]))
    results = dict(graph.results)
    inside = tuple(results[f"x{position}"] for position in range(len(inputs)))
    return Drawn(replace(graph, results=()), inside, results["y"])


def drawn_results(function: Function, inputs: Sequence[Tensor]) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of what `function` makes of tensors, and these by name. Its results are y0, y1, …."""
    builder = GraphBuilder("drawn", Origin.JOINT, "cpu", {})
    known = {f"x{position}": tensor.detach() for position, tensor in enumerate(inputs)}
    for name, tensor in known.items():
        builder.add_value(tensor, Role.BATCH, name)
    writer = _Writer(builder)  # it holds what is made, so that no storage takes the address of another
    with writer:
        results = list(tensors_in(function(*known.values())))
    for position, result in enumerate(results):
        builder.add_result(f"y{position}", result)
    values = [builder.value_of(result) for result in results]
    return validate(builder.finish([value for value in values if value is not None])), known


def drawn_training(function: Function, parameters: Sequence[Tensor]) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of a loss that `function` makes of p0, p1, … and of its gradients, and what that is given."""
    builder = GraphBuilder("drawn", Origin.JOINT, "cpu", {})
    known = {f"p{position}": tensor.detach() for position, tensor in enumerate(parameters)}
    seed = torch.tensor(2.0, dtype=parameters[0].dtype)
    owned = [tensor.clone().requires_grad_() for tensor in known.values()]
    for name, tensor in zip(known, owned, strict=True):
        builder.add_value(tensor, Role.PARAMETER, name)
    builder.add_value(seed, Role.GRADIENT, StepName.LOSS_GRADIENT)
    writer = _Writer(builder)  # it holds what is made, so that no storage takes the address of another
    with writer:
        loss = function(*owned)
        writer.phase = Phase.BACKWARD
        gradients = torch.autograd.grad(loss, owned, seed, allow_unused=True)
    made = {"loss": loss.detach()}
    made |= {f"{name}.grad": each for name, each in zip(known, gradients, strict=True) if each is not None}
    for name, tensor in made.items():
        builder.add_result(name, tensor)
    values = [builder.value_of(tensor) for tensor in made.values()]
    graph = validate(builder.finish([value for value in values if value is not None]))
    return graph, {**known, StepName.LOSS_GRADIENT: seed}


def with_seed(found: Drawn | Graph, tensor: int, name: str = "seed") -> tuple[Graph, int]:
    """The graph with a resident tensor of the shape of another."""
    growing = Growing(found.graph if isinstance(found, Drawn) else found)
    seed = growing.resident(name, growing.shape(Ref(tensor)), growing.dtype(Ref(tensor)))
    return growing.finish(), seed.tensor


def numbers(
    graph: Graph, given: Sequence[Tensor], wanted: Sequence[int | None], **more: Tensor
) -> list[Tensor]:
    """Tensors of a graph of x0, x1, … and others by name; zero for None."""
    everything = {f"x{position}": tensor.detach() for position, tensor in enumerate(given)}
    known = {graph.values[value].name for value in graph.resident}
    known_given = {name: tensor for name, tensor in {**everything, **more}.items() if name in known}
    found = iter(evaluate(graph, known_given, [tensor for tensor in wanted if tensor is not None]))
    return [torch.zeros(()) if tensor is None else next(found) for tensor in wanted]


def laid_out_otherwise(graph: Graph, given: dict[str, Tensor]) -> list[str]:
    """The results that kernels make of another shape, layout or type than the graph says."""
    storages = {value: given[graph.values[value].name].untyped_storage() for value in graph.resident}

    def real(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            seen = graph.tensors[arg.tensor]
            blank = torch.empty(0, dtype=getattr(torch, seen.dtype))
            return blank.set_(storages[seen.value], seen.offset, seen.shape, seen.stride)
        if isinstance(arg, tuple):
            return [real(item) for item in arg]
        if isinstance(arg, Symbol):
            return arg.text if arg.kind == "device" else getattr(torch, arg.text)
        return arg

    wrong = []
    for op in graph.ops:
        result = kernel(op.target)(*map(real, op.args), **{name: real(arg) for name, arg in op.kwargs})
        for number, made in zip(op.outputs, tensor_leaves(result), strict=True):
            if number is None or made is None:
                continue
            seen = graph.tensors[number]
            storages[seen.value] = made.untyped_storage()
            looks = (tuple(made.shape), _steps(made.shape, made.stride()), str(made.dtype))
            if looks != (seen.shape, _steps(seen.shape, seen.stride), f"torch.{seen.dtype}"):
                wrong.append(f"{op.target} makes {looks}, not {seen}")
    return wrong


def _steps(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides that matter: a single element has no next one."""
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]


# Expressions as text ----------------------------------------------------------------------------------

VARIABLES = {"a": torch.tensor(0.75), "b": torch.tensor([0.5, -1.25]), "c": torch.tensor([[2.0], [-3.0]])}
_FUNCTIONS = ("sum", "sin", "cos", "tanh", "sigmoid")


def texts() -> st.SearchStrategy[str]:
    """Smooth expressions in which `VARIABLES` occur, that mean the same to Python."""

    def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        calls = st.tuples(st.sampled_from(_FUNCTIONS[1:]), inner).map(lambda t: f"{t[0]}(a - {t[1]})")
        sums = st.tuples(st.sampled_from("+-*"), inner, inner).map(lambda t: f"({t[1]} {t[0]} {t[2]})")
        powers = inner.map(lambda text: f"(-{text} ** 2)")
        quotients = st.tuples(inner, inner).map(lambda t: f"({t[0]} / (2 + sin(b * {t[1]})))")
        return st.one_of(calls, sums, powers, quotients)

    inner = st.recursive(st.sampled_from(["a", "b", "c", "1.5", "3"]), larger, max_leaves=8)
    return inner.map(lambda text: f"sum(sin(a + b) * c + tanh(a * {text}))")


def in_python(text: str, values: dict[str, Tensor]) -> Tensor:
    """What the text means to Python. It is one of `texts`, so nothing else can be in it."""
    functions = {name: getattr(torch, name) for name in _FUNCTIONS}
    found: Tensor = eval(text, {"__builtins__": {}}, {**values, **functions})
    return found
