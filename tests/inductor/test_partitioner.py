"""A budget inside of a stock `torch.compile`: the same training, less memory, and caches that work."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.compat.inductor import missing_compiler
from lowtide.errors import BadRequest

NO_COMPILER = missing_compiler("cpu")
needs_compiler = pytest.mark.skipif(NO_COMPILER is not None, reason=f"{NO_COMPILER} is not here")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Layers(nn.Module):
    """A convolution with BatchNorm, dropout, two layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 10)
        self.dropout = nn.Dropout(0.3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(F.gelu(self.norm(self.conv(images)))).mean((2, 3))
        return F.cross_entropy(self.down(torch.tanh(self.up(x))), labels)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 3, 16, 16), torch.arange(8)


def compiled(model: nn.Module, partitioner: lowtide.Partitioner | None) -> Any:
    """The model as a stock torch.compile makes it, with random ops as in plain training."""
    options: dict[str, Any] = {"fallback_random": True}
    if partitioner is not None:
        options["custom_partitioner_fn"] = partitioner
    return torch.compile(model, options=options, dynamic=False)


def steps(model: nn.Module, step: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of two steps and the gradients of the second."""
    torch.manual_seed(7)
    losses = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = step(*batch())
        loss.backward()
        losses.append(loss.detach())
    return losses, [each.grad for each in model.parameters() if each.grad is not None]


# By hand ----------------------------------------------------------------------------------------------


@needs_compiler
@functorch.patch(enable_autograd_cache=False)  # type: ignore[untyped-decorator]  # planned here and now
def test_a_step_that_is_cut_by_a_plan_trains_as_a_stock_one() -> None:
    model = Layers()
    stock = copy.deepcopy(model)
    partitioner = lowtide.Partitioner("min")
    step = compiled(model, partitioner)
    losses, gradients = steps(model, step)
    expected, theirs = steps(stock, compiled(stock, None))
    for one, other in zip([*losses, *gradients], [*expected, *theirs], strict=True):
        torch.testing.assert_close(one, other)
    for (name, one), other in zip(model.named_buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    (solution,) = partitioner.solutions
    assert solution.graph.fused is not None
    assert solution.recomputed
    args = batch()
    model.zero_grad(set_to_none=True)
    reading = lowtide.measure(lambda: step(*args).backward(), device="cpu")
    with_channels_last = args[0].nbytes + model.conv.weight.nbytes  # copies that Inductor makes and keeps
    assert reading.growth_bytes <= solution.timeline.growth_bytes + with_channels_last


def test_the_uuid_tells_budgets_apart_and_is_the_same_elsewhere() -> None:
    asked: list[dict[str, Any]] = [
        {"budget": "8GiB"},
        {"budget": "9GiB"},
        {"budget": "8GiB", "elsewhere": "1GiB"},
        {},
    ]
    found = [lowtide.Partitioner(**each).uuid() for each in asked]
    assert len(set(found)) == 4
    assert lowtide.Partitioner(8 << 30).uuid() == found[0]
    code = "import lowtide; print(lowtide.Partitioner('8GiB').uuid())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == found[0]


_SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
import lowtide

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
x = torch.ones(32, 16)
if sys.argv[2] == "optimize":
    options = {"loss": torch.sum, "profile": False, "kernels": "inductor"}
    compiled = lowtide.optimize(model, (x,), budget=sys.argv[1], **options)
else:
    budget = lowtide.Partitioner(sys.argv[1], profile=False)
    compiled = torch.compile(model, options={"custom_partitioner_fn": budget}, dynamic=False)
compiled(x).sum().backward()
print(json.dumps(counters["inductor"] | counters["aot_autograd"]))
"""


@needs_compiler
@pytest.mark.parametrize("way", ["partitioner", "optimize"])
def test_a_second_process_compiles_nothing(tmp_path: Path, way: str) -> None:
    def counted(budget: str) -> dict[str, int]:
        found = subprocess.run(
            [sys.executable, "-c", _SCRIPT, budget, way],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        )
        read: dict[str, int] = json.loads(found.stdout.splitlines()[-1])
        return read

    first, second = counted("1GB"), counted("1GB")
    assert first["fxgraph_cache_miss"] == 2
    assert second.get("fxgraph_cache_miss", 0) == 0
    assert second["fxgraph_cache_hit"] == 2


# Refusals ---------------------------------------------------------------------------------------------


def test_a_budget_below_what_an_op_needs_reaches_the_user_with_the_least_that_is_possible() -> None:
    with pytest.raises(Exception, match=r"no plan of auto fits in .* KiB: the least it reaches is") as found:
        steps(Layers(), compiled(Layers(), lowtide.Partitioner("10kB", profile=False)))
    assert 'lowtide.optimize(..., kernels="inductor", tiles=True)' in str(found.value)


def test_sizes_that_are_symbols_are_refused() -> None:
    budget = lowtide.Partitioner("1GB", profile=False)
    options: dict[str, Any] = {"custom_partitioner_fn": budget}
    step = torch.compile(nn.Linear(4, 4), options=options, dynamic=True, fullgraph=True)
    with pytest.raises(Exception, match="Compile with dynamic=False"):
        step(torch.ones(3, 4)).sum().backward()


def test_a_part_of_the_plain_peak_is_refused() -> None:
    with pytest.raises(BadRequest, match="does not know the plain peak, of which 50% is to be a part"):
        lowtide.Partitioner("50%")
