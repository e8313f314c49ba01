"""What all backends share: graphs cut in two, marks, and graphs that need no backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from lowtide.aot.capture import capture_forward
from lowtide.aot.draw import drawn
from lowtide.aot.graph_backend import CapturedGraph
from lowtide.aot.mark import Mark
from lowtide.aot.sections import compiling
from lowtide.ir.graph import Graph, Phase


class Plain(CapturedGraph):
    """Runs the halves as they are, and writes down which mark each backward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.backwards: list[Mark] = []

    def run_forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        self.forwards += 1
        return fx.Interpreter(self.halves.forward).boxed_run(args), Mark(None, self.forwards).write()

    def run_backward(self, mark: Mark, args: list[Any]) -> Any:
        self.backwards.append(mark)
        assert self.halves.backward is not None
        return fx.Interpreter(self.halves.backward).boxed_run(args)


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Plain]]:
    graphs: list[Plain] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(Plain())
        return graphs[-1].compile(module, inputs)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=False), graphs


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_backward_is_given_the_mark_of_its_forward(order: tuple[int, ...]) -> None:
    model = nn.Linear(3, 3)
    run, graphs = compiled(model)
    with compiling():
        losses = [run(torch.full((2, 3), float(k), requires_grad=True)).sum() for k in range(3)]
    for k in order:
        losses[k].backward()
    (graph,) = graphs
    assert graph.backwards == [Mark(None, 1 + k) for k in order]


def test_a_backward_is_compiled_as_it_is_and_its_constants_are_not_copied_in_the_middle_of_a_step() -> None:
    class Uncopied(torch.Tensor):
        def __deepcopy__(self, _: object) -> torch.Tensor:
            raise AssertionError("this would be taken for an op of the step")

    run, graphs = compiled(nn.Linear(3, 3))
    with compiling():
        loss = run(torch.ones(2, 3)).sum()
        (graph,) = graphs
        assert graph.halves.backward is not None
        graph.halves.backward.register_buffer("constant", torch.ones(1).as_subclass(Uncopied))
        loss.backward()
    assert len(graph.backwards) == 1


def test_the_halves_compute_what_the_model_does() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    run, graphs = compiled(model)
    with compiling():
        found = torch.autograd.grad(run(x).square().sum(), list(model.parameters()))
    assert all(map(torch.equal, found, expected))
    (graph,) = graphs
    assert "aten.native_batch_norm.default" in [str(node.target) for node in graph.halves.ops[0]]  # eager's
    assert len(graph.halves.made) == 1
    assert len(graph.halves.tangents) == 1
    assert len(graph.halves.gradients) == len(graph.halves.given)


def test_a_graph_that_needs_no_backward_leaves_no_mark() -> None:
    run, graphs = compiled(lambda x: (x + 1, x * 2))
    with compiling():
        results = run(torch.ones(2))
    (graph,) = graphs
    assert graph.halves.backward is None
    assert [result.tolist() for result in results] == [[2.0, 2.0], [2.0, 2.0]]
    assert graph.forwards == 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.last = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = self.linear(self.norm(x)).chunk(2, -1)
        result: torch.Tensor = self.last(nn.functional.dropout(query * key.sigmoid(), 0.2))
        return result


def ops(graph: Graph) -> list[tuple[Any, ...]]:
    """The ops of the captured graph: what they call, in which half, and which shapes they make."""
    return [
        (op.target, op.phase, [None if t is None else graph.tensors[t].shape for t in op.outputs])
        for op in graph.ops
        if op.section == 0 and op.phase in (Phase.FORWARD, Phase.BACKWARD)
    ]


def test_a_graph_drawn_from_its_nodes_has_the_ops_that_a_capture_sees_running() -> None:
    model, x = Block(), torch.randn(6, 8)
    run, graphs = compiled(model)
    with compiling():
        run(x)
    (graph,) = graphs
    assert ops(drawn(graph.halves, frozenset()).graph) == ops(capture_forward(model, (x,)))
