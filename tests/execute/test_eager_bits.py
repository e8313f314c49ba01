"""Plans of ops that recompute as much as they can, against plain training, bit for bit."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.execute.ops_forward import plans_of
from lowtide.ir.assumptions import GradientLayouts
from lowtide.ir.recomputable import BETWEEN_GRAPHS
from lowtide.solvers.solution import GraphSolution
from tests.helpers.eager import assert_trains_like_plain, mean_square
from tests.helpers.effort import long_but


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Around(nn.Module):
    """A function of one tensor between two linear layers."""

    def __init__(self, function: Callable[[torch.Tensor], Any], *shape: int, like: torch.dtype | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape, dtype=like))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x * self.weight)


# Checks that have an effect ---------------------------------------------------------------------------


CHECKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "inv": lambda x: x @ torch.linalg.inv(x.mT @ x),
    "solve": lambda x: x @ torch.linalg.solve(x.mT @ x, x[:6]),
    "cholesky": lambda x: x @ torch.linalg.cholesky(x.mT @ x),
}


@pytest.mark.parametrize("name", long_but(CHECKED, "cholesky"))
def test_linear_algebra_that_checks_what_it_is_given(name: str) -> None:
    model = Around(CHECKED[name], 9, 6)
    assert_trains_like_plain(model, torch.randn(9, 6), profile=True)
    with pytest.raises(RuntimeError, match="linalg"):
        model(torch.zeros(9, 6))
    (solution,) = plans_of(model)
    assert isinstance(solution, GraphSolution)
    assert not any("with_effects" in note for note in solution.graph.notes)


# Random ops whose results nobody uses ---------------------------------------------------------------------


def unused_dropout(x: torch.Tensor) -> torch.Tensor:
    F.dropout(x, 0.5)
    return F.dropout(x, 0.5)


def unused_noise(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    torch.randn_like(x)
    torch.randperm(5)
    return F.dropout(x.sin(), 0.5)


def unused_in_place(x: torch.Tensor) -> torch.Tensor:
    torch.empty(4).bernoulli_(0.5)
    torch.empty(4).uniform_()
    return F.dropout(x.sin(), 0.5)


def unused_at_the_end(x: torch.Tensor) -> torch.Tensor:
    y = F.dropout(x.sin(), 0.5)
    F.dropout(y, 0.5)
    return y


@pytest.mark.parametrize("function", [unused_dropout, unused_noise, unused_in_place, unused_at_the_end])
def test_a_random_op_whose_result_nobody_uses_draws_all_the_same(function: Callable[..., Any]) -> None:
    assert_trains_like_plain(Around(function, 4, 6), torch.randn(4, 6))


def filled_by_half(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty_like(x).bernoulli_(0.5)


def filled_by_numbers(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()) * torch.empty_like(x).bernoulli_()


FILLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout in place": lambda x: F.dropout(x.sin(), 0.5, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x.sin(), 0.5, training=True),
    "by half": filled_by_half,
    "by numbers": filled_by_numbers,
}


@pytest.mark.parametrize("name", long_but(FILLED, "dropout in place", "by numbers"))
def test_masks_are_filled_in_the_order_in_which_they_lie(name: str) -> None:
    model, x = Around(FILLED[name], 2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    assert_trains_like_plain(model, x.contiguous(memory_format=torch.channels_last))


# Gradients that do not lie as the output does ---------------------------------------------------------------


class Turned(nn.Module):
    """Its output is not laid out row by row, as the gradient is that a loss hands it."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv, self.last = nn.Linear(3, 8), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 8, 3)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.conv(self.stem(x).mT).mT)
        if self.breaks:
            torch._dynamo.graph_break()
        return F.gelu(self.last(y.mT).mT)


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "two graphs"])
def test_gradients_are_taken_as_they_lie_and_not_copied(breaks: bool) -> None:
    model = Turned(breaks)
    assert_trains_like_plain(model, torch.randn(3, 10, 3), loss=lambda output: output.square().mean())
    (solution,) = plans_of(model)
    assert isinstance(solution, GraphSolution)
    layouts = [each for each in solution.graph.assumptions if isinstance(each, GradientLayouts)]
    assert GradientLayouts(int(breaks), (((3, 6, 8), (48, 8, 1)),)) in layouts
    between = [op.target for op in solution.graph.ops if op.section == BETWEEN_GRAPHS]
    assert not any("copy" in target for target in between)


# Ops that Dynamo would take apart ---------------------------------------------------------------------------


FUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "addcmul": lambda x: x.sin().addcmul_(x, x, value=0.1),
    "addcdiv": lambda x: x.sin().addcdiv_(x, x.exp(), value=0.1),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_product_that_is_added_in_place_is_rounded_as_ever(name: str) -> None:
    assert_trains_like_plain(Around(FUSED[name], 32, 16), torch.randn(32, 16))


# Weights that autocast casts once -----------------------------------------------------------------------


class Reused(nn.Module):
    """A layer, a cell and a bare weight under autocast, each of them used several times."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.layer, self.cell = nn.Linear(16, 16), nn.LSTMCell(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(self, self.way)(x)
        return found

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layer(self.layer(x).relu())
        return x.float()

    def tied_and_in_full(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = F.linear(self.layer(x).relu(), self.layer.weight).float() * self.layer.bias
            return x.exp() @ self.layer.weight.tanh()

    def a_cell(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            state = self.cell(x, self.cell(x))
            x, _ = self.cell(x, state)
        return x.float()

    def in_blocks_of_their_own(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.layer(self.layer(x)).float()
        return x

    def cast_in_words(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = x.bfloat16() @ self.layer.weight.to(torch.bfloat16)
            return (x.relu() @ self.layer.weight.to(torch.bfloat16)).float()


WAYS = ("twice", "tied_and_in_full", "a_cell", "in_blocks_of_their_own", "cast_in_words")


@pytest.mark.parametrize("way", long_but(WAYS, "twice", "a_cell"))
def test_a_weight_that_is_used_again_under_autocast(way: str) -> None:
    assert_trains_like_plain(Reused(way), torch.randn(32, 16))


def test_a_weight_that_is_used_again_under_autocast_around_the_model() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        assert_trains_like_plain(model, torch.randn(32, 16), steps=1)


class Moved(nn.Module):
    """Moves a batch to places that it works out. Autocast works within the kernel that makes them, forward;
    and of `places_in_full` their backward is a product that it would cast."""

    def __init__(self, axes: int, align_corners: bool, places_in_full: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, axes * (axes + 1)), nn.Parameter(torch.tensor(1.5))
        self.axes, self.align_corners, self.places_in_full = axes, align_corners, places_in_full

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns = self.layer(x.flatten(2).mean(2)).view(-1, self.axes, self.axes + 1)
        turns = turns * 0.1 + torch.eye(self.axes, self.axes + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.places_in_full):
            places = F.affine_grid(turns, [*x.shape], align_corners=self.align_corners)
        return F.grid_sample(x * self.scale, places, align_corners=self.align_corners)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Moved(2, True), (3, 4, 5, 6)),
        (Moved(2, False).requires_grad_(False), (3, 4, 5, 1)),  # its gradient has no fake
        (Moved(3, False), (3, 4, 5, 6, 7)),
        (Moved(2, False, places_in_full=True), (3, 4, 5, 6)),
    ],
    ids=["pictures with corners", "one column", "volumes", "in full precision"],
)
def test_autocast_is_around_the_forward_alone_and_within_its_kernels(
    model: Moved, shape: tuple[int, ...]
) -> None:
    model.scale.requires_grad_()
    plain, x = copy.deepcopy(model), torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16):
        lowtide.optimize(model, (x,), loss=mean_square, budget="min", profile=False)
        losses = [mean_square(each(x)) for each in (model, plain)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            assert torch.equal(mine.grad, other.grad)


class Parted(nn.Module):
    """A weight that two graphs use."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)
        self.other = self.layer if again else nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).tanh()
        torch._dynamo.graph_break()
        x = self.other(x).tanh()
        return x


@pytest.mark.parametrize("again", [True, False])
def test_it_is_said_where_autocast_casts_a_weight_for_each_graph(again: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lowtide.optimize(Parted(again), torch.randn(32, 16), budget="min", loss=mean_square, profile=False)
    said = [
        str(each.message)
        for each in told
        if "autocast casts a weight once for each graph" in str(each.message)
    ]
    assert len(said) == again
    assert all("layer.weight, layer.bias is rounded otherwise" in each for each in said)


def test_it_is_not_said_without_autocast_around_the_graphs() -> None:
    solution = lowtide.plan(Parted(True), torch.randn(32, 16), budget="min", loss=mean_square, profile=False)
    assert not solution.remark
