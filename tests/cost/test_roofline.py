"""Times that are estimated for a GPU that is not here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.cost import flops
from lowtide.cost.price import with_costs_by_rule
from lowtide.cost.roofline import LAUNCH_SECONDS, RATES, Pace, estimated_seconds, kind_of, moved_bytes
from lowtide.ir.graph import Graph, Op
from lowtide.solvers.solution import GraphSolution
from lowtide.zoo.gpt import GPT


def captured(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> Graph:
    with torch.device("meta"):
        example = torch.empty(*shape, dtype=dtype)
    return lowtide.capture(model.to("meta", dtype), example, torch.sum, device="cuda")


def only(graph: Graph, target: str) -> Op:
    (found,) = (op for op in graph.ops if op.target == target)
    return found


def test_a_large_matrix_product_computes_and_a_small_one_is_launched() -> None:
    large = captured(nn.Linear(4096, 4096, bias=False), 8192, 4096)
    product = next(op for op in large.ops if op.target == "aten.mm.default")
    assert kind_of(product, large) is Pace.MATRIX
    assert estimated_seconds(product, large) == pytest.approx(2 * 8192 * 4096 * 4096 / 50e12)
    small = captured(nn.Linear(64, 64, bias=False), 8, 64)
    product = next(op for op in small.ops if op.target == "aten.mm.default")
    assert estimated_seconds(product, small) == LAUNCH_SECONDS == 20e-6


def test_half_precision_is_another_kind() -> None:
    graph = captured(nn.Linear(4096, 4096, bias=False), 8192, 4096, dtype=torch.bfloat16)
    product = next(op for op in graph.ops if op.target == "aten.mm.default")
    assert kind_of(product, graph) is Pace.MATRIX_HALF
    assert estimated_seconds(product, graph) == pytest.approx(2 * 8192 * 4096 * 4096 / 790e12)


def test_what_computes_nothing_takes_as_long_as_its_bytes() -> None:
    graph = captured(nn.Sequential(nn.Linear(8, 4096, bias=False), nn.GELU()), 65536, 8)
    gelu = only(graph, "aten.gelu.default")
    assert kind_of(gelu, graph) is Pace.STRAIGHT
    assert moved_bytes(gelu, graph) == 2 * 65536 * 4096 * 4  # read once, written once
    assert estimated_seconds(gelu, graph) == pytest.approx(2 * 65536 * 4096 * 4 / 4.5e12)
    total = only(graph, "aten.sum.default")
    assert kind_of(total, graph) is Pace.ROUNDABOUT
    assert estimated_seconds(total, graph) == pytest.approx((65536 * 4096 * 4 + 4) / 1.2e12)


def test_a_convolution_with_many_channels_computes_and_one_with_few_moves() -> None:
    many = captured(nn.Conv2d(512, 512, 3, padding=1, bias=False), 64, 512, 28, 28)
    forward = only(many, "aten.convolution.default")
    assert kind_of(forward, many) is Pace.CONVOLUTION
    assert estimated_seconds(forward, many) == pytest.approx(2 * 64 * 28 * 28 * 512 * 512 * 9 / 150e12)
    few = captured(nn.Conv2d(4, 4, 1, bias=False), 64, 4, 224, 224)
    forward = only(few, "aten.convolution.default")
    assert estimated_seconds(forward, few) == pytest.approx((2 * 64 * 4 * 224 * 224 * 4 + 64) / 0.9e12)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(x * self.scale, x, x, is_causal=True)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, Pace.ATTENTION), (torch.bfloat16, Pace.ATTENTION_HALF)]
)
def test_attention_has_rates_of_its_own(dtype: torch.dtype, kind: Pace) -> None:
    graph = captured(Attention(), 8, 16, 2048, 64, dtype=dtype)
    forward = next(op for op in graph.ops if "attention" in op.target and "backward" not in op.target)
    assert kind_of(forward, graph) is kind
    flops = 2 * 2 * 8 * 16 * 2048 * 2048 * 64
    assert estimated_seconds(forward, graph) == pytest.approx(flops / RATES[kind].flops)


def test_attention_with_fewer_heads_for_keys_is_counted_with_all() -> None:
    # the counter of torch 2.11 refuses fewer
    query, few, many = (8, 16, 32, 64), (8, 4, 48, 64), (8, 16, 48, 64)
    assert flops._heads_repeated([query, few, few, 0.0], first=0) == [query, many, many, 0.0]
    assert flops._heads_repeated([query, query, few, few, query], first=1) == [
        query,
        query,
        many,
        many,
        query,
    ]
    graph = captured(Grouped(), 8, 16, 32, 64)
    counts = {op.target: flops.flops_of(graph, op) for op in graph.ops if "dot_product" in op.target}
    assert set(counts.values()) == {2 * 2 * 8 * 16 * 32 * 32 * 64, 5 * 2 * 8 * 16 * 32 * 32 * 64}


class Grouped(Attention):
    def forward(self, x: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(x * self.scale, x[:, :4], x[:, :4], enable_gqa=True)


def test_every_op_of_a_step_has_a_time() -> None:
    with torch.device("meta"):
        model, words = GPT(2, 64, 4, 100, 32, dropout=0.1), torch.empty(4, 32, dtype=torch.int64)
    graph = lowtide.capture(model, words, torch.sum, device="cuda")
    assert all(op.seconds == 0 for op in graph.ops)
    timed = with_costs_by_rule(graph)
    assert all(LAUNCH_SECONDS <= op.seconds < math.inf for op in timed.ops)
    assert [op.seconds for op in timed.ops] == [estimated_seconds(op, timed) for op in timed.ops]
    assert timed.profiled_on == "rules for CUDA"


@pytest.mark.skipif(torch.cuda.is_available(), reason="ops are run where there is a GPU")
def test_a_plan_for_a_gpu_that_is_not_here_knows_what_it_adds() -> None:
    with torch.device("meta"):
        model, words = GPT(4, 128, 4, 100, 64, dropout=0.1), torch.empty(64, 64, dtype=torch.int64)
    solution = lowtide.plan(model, words, loss=torch.sum, budget="60%", device="cuda", optimizer="adamw")
    assert isinstance(solution, GraphSolution)
    again = sum(times * solution.graph.ops[op].seconds for op, times in solution.recomputed.items())
    assert 0 < solution.extra_seconds == pytest.approx(again)
    assert solution.extra_seconds_ratio == pytest.approx(solution.extra_seconds / solution.seconds)
