"""Generated kernels under DistributedDataParallel: in one process, and on two ranks."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.compat.inductor import missing_compiler
from lowtide.distributed import Replicated, Sharded, optimize, plan
from lowtide.errors import BadRequest
from lowtide.solvers.solution import GraphSolution
from tests.helpers.heads import Head, batch

NO_COMPILER = missing_compiler("cpu")
needs_compiler = pytest.mark.skipif(NO_COMPILER is not None, reason=f"{NO_COMPILER} is not here")

_RANK = """
import copy, json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from lowtide.distributed import Replicated, optimize

class Scored(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [part for _ in range(3) for part in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
model = Scored(*layers)
plain = copy.deepcopy(model)
x = torch.randn(64, 32, generator=torch.Generator().manual_seed(rank))
optimize(model, (x,), engine=Replicated(), budget="min", profile=False, kernels="inductor")
off = 0.0
wrapped, beside = DistributedDataParallel(model), DistributedDataParallel(plain)
for _ in range(2):
    for each in (wrapped, beside):
        each.zero_grad(set_to_none=True)
        each(x).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    off = max(off, *(float((one.grad - other.grad).abs().max()) for one, other in pairs))
total = sum(float(each.grad.double().sum()) for each in model.parameters())
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump({"off": off, "sum": total}, file)
dist.destroy_process_group()
"""


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()
    gc.collect()


@needs_compiler
@pytest.mark.usefixtures("group")
def test_a_replicated_model_runs_by_generated_kernels() -> None:
    plain, model = Head(), Head()
    optimize(model, batch(), engine=Replicated(), budget="min", profile=False, kernels="inductor")
    (solution,) = lowtide.plans_of(model)
    assert isinstance(solution, GraphSolution)
    assert solution.graph.fused is not None
    plain(*batch()).backward()
    DistributedDataParallel(model)(*batch()).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@needs_compiler
@pytest.mark.long
def test_two_ranks_train_by_generated_kernels_as_without_a_plan(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(Path(lowtide.__file__).parent.parent), *sys.path])
    done = subprocess.run(
        [*command, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one["off"] < 1e-6 > other["off"]
    assert one["sum"] == other["sum"]


# Refusals ---------------------------------------------------------------------------------------------


def test_shards_are_planned_by_layers_which_have_eager_kernels() -> None:
    with pytest.raises(BadRequest, match="kernels='inductor' is for methods that plan op by op"):
        plan(Head(), batch(), engine=Sharded(lambda model: model), budget="90%", kernels="inductor")


def test_kernels_that_there_are_not_are_refused() -> None:
    with pytest.raises(BadRequest, match="kernels is 'fast'; it is one of eager, inductor"):
        plan(Head(), batch(), engine=Replicated(), kernels="fast")
