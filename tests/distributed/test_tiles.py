"""Slices under DistributedDataParallel, in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.distributed import Replicated, Sharded, optimize, plan
from lowtide.errors import BadRequest
from lowtide.solvers.solution import GraphSolution
from lowtide.solvers.tiled_summary import families
from tests.helpers.heads import LOGITS_BYTES, Head, batch


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()
    gc.collect()


def test_a_replicated_model_runs_in_slices() -> None:
    plain, model = Head(), Head()
    optimize(model, batch(), engine=Replicated(), budget="min", tiles=True, profile=False)
    (solution,) = lowtide.plans_of(model)
    assert isinstance(solution, GraphSolution)
    assert families(solution.graph)[0].spared_bytes == LOGITS_BYTES
    plain(*batch()).backward()
    DistributedDataParallel(model)(*batch()).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_without_tiles_it_does_not() -> None:
    solution = plan(Head(), batch(), engine=Replicated(), budget="min", profile=False)
    assert isinstance(solution, GraphSolution)
    assert solution.graph.tiled is None


def test_shards_are_planned_by_layers_and_have_no_slices() -> None:
    with pytest.raises(BadRequest, match="tiles are for methods that plan op by op"):
        plan(Head(), batch(), engine=Sharded(lambda model: model), budget="90%", tiles=True)
