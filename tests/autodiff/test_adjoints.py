"""Adjoints come back through whatever way ops looked at a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.autodiff.adjoints import Look, RowSlice, part_of
from lowtide.autodiff.reverse import gradient
from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Phase
from tests.helpers.drawn import drawn, laid_out_otherwise, numbers, with_seed

# By hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("look", "part"),
    [
        (Look((4, 3), (6, 1), 0), RowSlice(4, 6, 0, 3)),
        (Look((4, 3), (6, 1), 3), RowSlice(4, 6, 3, 6)),
        (Look((3, 4), (1, 6), 3), RowSlice(4, 6, 3, 6)),
        (Look((2, 6), (6, 1), 12), RowSlice(1, 24, 12, 24)),
        (Look((4,), (6,), 5), RowSlice(4, 6, 5, 6)),
        (Look((), (), 7), RowSlice(1, 24, 7, 8)),
        (Look((2, 2, 3), (12, 6, 1), 1), RowSlice(4, 6, 1, 4)),
        (Look((2, 3), (6, 1), 0), None),  # not of every row
        (Look((4, 3), (6, 1), 4), None),  # beyond the end of a row
        (Look((4, 3), (6, 2), 0), RowSlice(12, 2, 0, 1)),  # every other
        (Look((4, 2), (6, 2), 0), None),  # every other, and not to the end
    ],
)
def test_a_part_of_every_row_is_recognised(look: Look, part: RowSlice | None) -> None:
    assert part_of(look, 24) == part


def backward(graph: Graph) -> list[str]:
    return [op.target.split(".")[1] for op in graph.ops if op.phase is Phase.BACKWARD]


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "transposed": (lambda x: x.t() * 2, ["mul"]),
    "two looks": (lambda x: x.t().mm(x), ["mm", "mm", "add"]),
    "reshaped": (lambda x: x.view(2, 12) * 2, ["mul"]),
    "transposed and reshaped": (lambda x: x.view(2, 2, 6).transpose(0, 1) * 2, ["mul", "clone"]),
    "chunks": (lambda x: torch.tanh(x[:, :3]) * x[:, 3:], ["mul", "mul", "tanh_backward", "cat"]),
    "rows": (lambda x: x[:2] * x[2:], ["mul", "mul", "cat"]),
    "each row": (lambda x: x[0] * x[1] + x[2] * x[3], ["mul", "mul", "mul", "mul", "cat"]),
    "one row": (lambda x: x[1] * 2, ["mul", "slice_backward"]),
    "one column": (lambda x: x[:, 1] * 2, ["mul", "slice_backward"]),
    "one element": (lambda x: x[1, 1] * 2, ["mul", "slice_backward"]),
    "overlapping rows": (lambda x: x[:3] * x[1:], ["mul", "mul", "slice_backward", "slice_backward", "add"]),
    "a corner": (lambda x: x[1:3, 2:4] * 2, ["mul", "full", "as_strided_scatter"]),
    "every other": (lambda x: x[::2] * 2, ["mul", "slice_backward"]),
    "repeated": (lambda x: x.unsqueeze(0).expand(5, 4, 6) * 2, ["mul", "sum"]),
    "one of the repeated": (lambda x: x.unsqueeze(0).expand(5, 4, 6)[1:2] * 2, ["mul"]),
    "part and whole": (lambda x: x[:, :3].sum() * x, ["mul", "sum", "mul", "slice_backward", "add"]),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_adjoints_come_back_through_the_ways_to_look_at_a_value(name: str) -> None:
    function, ops = VIEWS[name]
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    graph = drawn(lambda a: function(a * 1), [x])  # so that the value that is looked at has a creator too
    seeded, seed = with_seed(graph, graph.output)
    more = gradient(seeded, graph.output, graph.inputs, seed=seed)
    weights = torch.randn(seeded.tensors[graph.output].shape)
    (mine,) = numbers(more.graph, [x], more.gradients, seed=weights)
    (right,) = torch.autograd.grad(function(x.requires_grad_()), x, weights)
    assert torch.equal(mine, right)
    assert laid_out_otherwise(more.graph, {"x0": x.detach(), "seed": weights}) == []
    assert sorted(backward(more.graph)) == sorted([*ops, "mul"])


def test_what_arrives_is_added_up_in_the_order_of_autograd() -> None:
    """Three looks at a value, one of them used first and last: its gradient is complete last."""

    def function(x: Tensor) -> Tensor:
        x = x * 1
        flat = x.view(-1)
        first, second, third, last = flat.sin(), x.cos(), x.view(2, -1).tanh(), flat.exp()
        return first.sum() + second.sum() + third.sum() + last.sum()

    torch.manual_seed(0)
    x = torch.randn(64, 64)
    graph = drawn(function, [x])
    more = gradient(graph.graph, graph.output, graph.inputs)
    (mine,) = numbers(more.graph, [x], more.gradients)
    (right,) = torch.autograd.grad(function(x.requires_grad_()), x)
    assert torch.equal(mine, right)


def test_gradients_by_a_part_are_parts_of_the_gradient() -> None:
    x = torch.randn(4, 6)
    graph = drawn(lambda a: (a[:, 1:3] * a[:, 1:3]).sum(), [x])
    part = next(tensor.id for tensor in graph.graph.tensors if tensor.shape == (4, 2) and tensor.value == 0)
    more = gradient(graph.graph, graph.output, [part])
    (mine,) = numbers(more.graph, [x], more.gradients)
    assert torch.equal(mine, 2 * x[:, 1:3])


@st.composite
def views(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...]]]:
    """Some of what turns a tensor of shape (4, 6) into a view of it."""
    shape = [4, 6]
    found: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(draw(st.integers(1, 4))):
        dim = draw(st.integers(0, len(shape) - 1))
        kind = draw(st.sampled_from(["transpose", "narrow", "unflatten", "flatten", "expand"]))
        if kind == "transpose":
            other = draw(st.integers(0, len(shape) - 1))
            shape[dim], shape[other] = shape[other], shape[dim]
            found.append((kind, (dim, other)))
        elif kind == "narrow":
            start = draw(st.integers(0, shape[dim] - 1))
            length = draw(st.integers(1, shape[dim] - start))
            shape[dim] = length
            found.append((kind, (dim, start, length)))
        elif kind == "unflatten" and shape[dim] % 2 == 0:
            shape[dim : dim + 1] = [2, shape[dim] // 2]
            found.append((kind, (dim,)))
        elif kind == "flatten":
            shape = [torch.Size(shape).numel()]
            found.append((kind, ()))
        elif kind == "expand" and len(shape) < 5:
            shape.insert(0, 3)
            found.append((kind, ()))
    return found


def seen(x: Tensor, found: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
    for kind, numbers_of_it in found:
        if kind == "unflatten":
            x = x.unflatten(numbers_of_it[0], (2, -1))
        elif kind == "flatten":
            x = x.reshape(-1)
        elif kind == "expand":
            x = x.expand(3, *x.shape)
        else:
            x = getattr(x, kind)(*numbers_of_it)
    return x


@given(st.lists(views(), min_size=1, max_size=3))
def test_any_views_of_a_value_give_autograds_gradient(found: list[list[tuple[str, tuple[int, ...]]]]) -> None:
    x = torch.arange(24, dtype=torch.float64).reshape(4, 6).cos()

    def function(a: Tensor) -> Tensor:
        a = a * 1.5
        return torch.stack([(seen(a, each).sin() * (n + 1)).sum() for n, each in enumerate(found)]).sum()

    graph = drawn(function, [x])
    more = gradient(graph.graph, graph.output, graph.inputs)
    (mine,) = numbers(more.graph, [x], more.gradients)
    (right,) = torch.autograd.grad(function(x.requires_grad_()), x)
    torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    assert laid_out_otherwise(more.graph, {"x0": x.detach()}) == []


# Refusals ----------------------------------------------------------------------------------------------


def test_looks_whose_elements_overlap_are_refused() -> None:
    graph = drawn(lambda a: a.as_strided((3, 2), (1, 1)).exp().sum(), [torch.randn(4)])
    with pytest.raises(
        BadRequest, match=r"'x0' .* with strides \(1, 1\) for shape \(3, 2\), so that its elements overlap"
    ):
        gradient(graph.graph, graph.output, graph.inputs)
