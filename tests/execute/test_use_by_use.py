"""What several graphs use gets the gradient of plain training: its uses are added in the same order."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.ir.assumptions import UseByUse
from lowtide.solvers.solution import GraphSolution

INPUTS = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Looking(nn.Module):
    """A layer of a decoder: it uses what the encoder returns twice."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.query(x) @ self.key(memory).transpose(1, 2), -1)
        seen: torch.Tensor = weights @ self.value(memory)
        return x + seen


class LookingOften(Looking):
    """One that uses it four times."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return super().forward(x, memory) * memory.cos() + memory


class Decoding(nn.Module):
    """Graphs end where a layer may be left out, and a graph per layer uses the encoder's output."""

    def __init__(self, drop: float, kind: type[Looking] = Looking) -> None:
        super().__init__()
        self.drop = drop
        self.encoder, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoded(x)
        for layer in self.layers:
            if torch.rand([]) < self.drop:
                continue
            x = layer(x, memory)
        loss: torch.Tensor = self.last(x).square().mean()
        return loss

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.encoder(x))


class Masking(Decoding):
    """Dynamo has graphs compiled that it then gives up: how many numbers a mask chooses is known to none."""

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        memory: torch.Tensor = self.encoder(x)
        memory[:, torch.arange(32) % 3 == 0] = self.last.bias
        return memory


def made(drop: float, kind: type[Looking] = Looking) -> Decoding:
    torch.manual_seed(0)
    return Decoding(drop, kind)


def trained(model: nn.Module, seed: int) -> None:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(INPUTS).backward()


def planned(model: nn.Module) -> GraphSolution:
    solution = lowtide.plan(model, INPUTS, budget="75%", effort="quick")
    assert isinstance(solution, GraphSolution)
    lowtide.apply(model, solution)
    return solution


@pytest.mark.parametrize(("drop", "kind"), [(0.0, Looking), (0.4, Looking), (0.0, LookingOften)])
def test_what_all_layers_look_at_gets_the_gradient_of_plain_training_to_the_bit(
    drop: float, kind: type[Looking]
) -> None:
    model, plain = made(drop, kind), made(drop, kind)
    planned(model)
    for seed in range(4):
        trained(model, seed)
        trained(plain, seed)
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), name
            assert mine.grad is None or other.grad is None or torch.equal(mine.grad, other.grad), name


class Pair(nn.Module):
    """Hands out what the encoder returned as well, for the loss to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layer = nn.Linear(16, 16), Looking()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.tanh(self.encoder(x))
        torch._dynamo.graph_break()
        return self.layer(x, memory), memory


class Residual(nn.Module):
    """Uses a tensor in a graph, and once more where no graph can be: in a loop with a break in it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layer = nn.Linear(16, 16), Looking()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.encoder(x))
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x + self.layer(x, x)
        return x.square().mean()


def squares(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return output[0].square().mean() + output[1].square().mean()


def test_what_the_loss_looks_at_as_well_gets_the_gradient_of_plain_training() -> None:
    torch.manual_seed(0)
    model = Pair()
    plain = copy.deepcopy(model)
    lowtide.optimize(model, INPUTS, loss=squares, budget="95%", effort="quick")
    for each in (model, plain):
        squares(each(INPUTS)).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_a_graph_that_is_compiled_and_given_up_does_not_count() -> None:
    torch.manual_seed(0)
    model = Masking(0.0)
    plain = copy.deepcopy(model)
    planned(model)
    for each in (model, plain):
        trained(each, 0)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None, name
        assert other.grad is not None, name
        assert torch.equal(mine.grad, other.grad), name


def test_what_runs_between_graphs_is_a_use_like_others() -> None:
    torch.manual_seed(0)
    model = Residual()
    plain = copy.deepcopy(model)
    lowtide.optimize(model, INPUTS, budget="95%", effort="quick")
    for each in (model, plain):
        each(INPUTS).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_the_peak_is_what_was_promised() -> None:
    model = made(0.0)
    solution = planned(model)
    trained(model, 0)
    model.zero_grad(set_to_none=True)
    reading = lowtide.measure(lambda: model(INPUTS).backward(), device="cpu")
    resident = sum(solution.graph.values[value].bytes for value in solution.graph.resident)
    assert abs(resident + reading.growth_bytes - solution.peak_bytes) < 256


def test_only_what_a_later_graph_uses_too_enters_use_by_use() -> None:
    found = [each for each in planned(made(0.0)).graph.assumptions if isinstance(each, UseByUse)]
    assert len(found) == 2  # one for each layer but the last, and not for x, which goes into one graph alone
