"""Recurrent layers of a step for CUDA are cuDNN's, whether there is a GPU or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compat.cudnn_rnn import DROPOUT_STATE_BYTES
from lowtide.errors import InfeasibleBudget
from lowtide.ir.graph import Phase, Role
from lowtide.solvers.solution import Solution
from lowtide.trace.dry_run import Trace, dry_run
from tests.helpers.eager import mean_square

LAYERS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Sequences(nn.Module):
    """Two recurrent layers between two linear ones."""

    def __init__(self, kind: str, dropout: float, **how: Any) -> None:
        super().__init__()
        make = LAYERS[kind]
        self.before = nn.Linear(8, 16)
        self.one, self.two = (make(16, 16, 2, batch_first=True, dropout=dropout, **how) for _ in range(2))
        self.after = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.after(self.two(self.one(self.before(x))[0])[0])
        return found


def traced(model: nn.Module, device: str = "cuda", half: bool = False) -> Trace:
    x = torch.randn(4, 10, 8)

    def step() -> None:
        with torch.autocast("cuda", torch.float16, enabled=half):
            loss = mean_square(model(x))
        loss.backward()

    return dry_run(step, model=model, device=device)


def states(trace: Trace) -> list[int]:
    """The values as large as cuDNN's dropout state."""
    values = trace.graph.values
    return [value.id for value in values if value.bytes == DROPOUT_STATE_BYTES]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_one_kernel_of_cudnn_and_its_backward(kind: str) -> None:
    trace = traced(Sequences(kind, 0.0))
    forward = [op for op in trace.graph.ops if op.target == "aten._cudnn_rnn.default"]
    backward = [op for op in trace.graph.ops if op.target == "aten._cudnn_rnn_backward.default"]
    assert [op.module for op in forward] == ["one", "two"]
    assert [op.phase for op in backward] == [Phase.BACKWARD] * 2
    assert not states(trace)
    assert sum(value.role is Role.GRADIENT for value in trace.graph.values) > 4


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_that_drop_out_share_one_state_that_stays(kind: str) -> None:
    trace = traced(Sequences(kind, 0.2))
    (state,) = states(trace)
    assert state in trace.graph.outputs
    assert not states(traced(Sequences(kind, 0.2).eval()))


def test_without_cudnn_or_on_a_cpu_nothing_of_cudnn_is_called() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        plain = traced(Sequences("lstm", 0.2))
    for trace in (plain, traced(Sequences("lstm", 0.2), device="cpu")):
        assert not any("cudnn_rnn" in op.target for op in trace.graph.ops)
        assert not states(trace)


def test_autocast_casts_what_a_layer_is_given() -> None:
    graph = traced(Sequences("lstm", 0.0), half=True).graph
    ops = [op for op in graph.ops if op.target == "aten._cudnn_rnn.default"]
    assert [graph.tensors[op.outputs[0]].dtype for op in ops if op.outputs[0] is not None] == ["float16"] * 2


def test_a_plan_for_a_gpu_that_is_not_there_is_one_of_layers_and_names_the_least() -> None:
    model, x = Sequences("gru", 0.2), torch.randn(4, 10, 8)
    with pytest.warns(UserWarning, match="recurrent layer of cuDNN, which cannot be captured"):
        least = lowtide.plan(model, (x,), budget="min", loss=mean_square, device="cuda", profile=False)
    assert isinstance(least, Solution)
    with pytest.raises(InfeasibleBudget, match="the least it reaches is") as refusal:
        lowtide.plan(model, (x,), budget="10%", loss=mean_square, device="cuda", profile=False)
    bytes_ = refusal.value.least_bytes
    with pytest.warns(UserWarning, match="layer by layer"):
        lowtide.plan(model, (x,), budget=bytes_, loss=mean_square, device="cuda", profile=False)
