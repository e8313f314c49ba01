"""Op-level plans at work: the peak is what was promised, and nothing else has changed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.budgeting import StepBudget
from lowtide.errors import InfeasibleBudget
from lowtide.solution import GraphSolution
from lowtide.training import Arguments
from transformer_models import KINDS, small_transformer

Step = Callable[[], Any]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Net(nn.Module):
    """Convolutions, BatchNorm and dropout; the loss is inside if there are labels."""

    def __init__(self, width: int = 16, depth: int = 4, broken: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)
        self.broken = broken

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.stem(x)
        for position, block in enumerate(self.blocks):
            x = x + block(x)
            if self.broken and position == 1:
                torch._dynamo.graph_break()
        x = self.head(x.mean((2, 3)))
        return x if labels is None else F.cross_entropy(x, labels)


IMAGES, LABELS = torch.randn(8, 3, 24, 24), torch.randint(0, 10, (8,))


def small(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def loss_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return found


def trained(model: nn.Module, *args: Any, loss: Any = loss_of, **kwargs: Any) -> Step:
    """A step from empty gradients and a known random state, that holds on to the output."""

    def step() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(1)
        output = model(*args, **kwargs)
        loss(output).backward()
        return output

    return step


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Gradients and buffers are equal to the last bit."""
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, other.grad), name  # type: ignore[arg-type]
    for (name, mine_buffer), other_buffer in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine_buffer, other_buffer), name


def growth(step: Step) -> int:
    """What a step holds beyond what was there; the 4 bytes with which the backward begins are resident."""
    return lowtide.measure(step, device="cpu").growth_bytes - 4


def assert_kept(solution: GraphSolution, measured: int) -> None:
    predicted = solution.timeline.growth_bytes
    assert abs(measured - predicted) <= predicted // 100
    if solution.budget_bytes is not None:
        assert measured <= solution.budget_bytes - solution.timeline.resident_bytes


# Every model ------------------------------------------------------------------------------------------


def zoo_case(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    from lowtide.zoo import Sizes, workload

    sizes = {
        "alexnet": {"batch": 4, "image": 64},
        "inception_v3": {"batch": 2, "image": 96},
        "lstm": {"batch": 4, "tokens": 12, "width": 32},
        "gpt": {"batch": 2, "tokens": 32, "layers": 3, "width": 64, "heads": 4},
        "vit": {"batch": 2, "image": 32, "layers": 3, "width": 64, "heads": 4},
        "mlp": {"batch": 16},
        "preresnet": {"batch": 2, "image": 32},
        "densenet121": {"batch": 2, "image": 32},
    }.get(name, {"batch": 2, "image": 32})
    torch.manual_seed(0)
    work = workload(name, Sizes(**sizes))
    return work.model, work.args, dict(work.kwargs or {}), work.loss


ZOO = ["alexnet", "vgg11", "resnet18", "densenet121", "unet", "gpt", "vit", "lstm", "mlp"]


def solved_or_least(step: StepBudget, budget: str) -> GraphSolution:
    """A plan within the budget or, if that is too small, within the one that the refusal names."""
    try:
        return step.solve("auto", budget)
    except InfeasibleBudget as error:
        return step.solve("auto", error.least_bytes)


@pytest.mark.parametrize("name", [*ZOO, *(f"hf:{kind}" for kind in KINDS)])
def test_every_budget_is_kept_and_gradients_are_equal(name: str) -> None:
    loss: Any = None
    args: tuple[Any, ...] = ()
    if name.startswith("hf:"):
        model, kwargs = small_transformer(name[3:])
    else:
        model, args, kwargs, loss = zoo_case(name)
    plain = copy.deepcopy(model)
    state = copy.deepcopy(model.state_dict())
    step = StepBudget(model, Arguments(args, kwargs), loss)
    trained(plain, *args, loss=loss or loss_of, **kwargs)()
    times: list[float] = []
    for budget in ("90%", "75%", "60%", "45%", "min"):
        solution = solved_or_least(step, budget)
        lowtide.apply(model, solution)
        run = trained(model, *args, loss=loss or loss_of, **kwargs)
        run()
        model.load_state_dict(state)
        assert_kept(solution, growth(run))
        assert_same(model, plain)
        times.append(solution.extra_seconds)
    assert times == sorted(times)  # more budget never costs more time
