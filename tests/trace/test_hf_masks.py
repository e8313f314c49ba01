"""Models of transformers take the paths of eager PyTorch while they are traced."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import lowtide
from lowtide.trace.hf_masks import unnoticed_by_transformers

SOURCE = """
from torch.compiler import is_compiling as is_torchdynamo_compiling

def is_tracing(tensor=None):
    return is_torchdynamo_compiling()

def scaled(x):
    return x.exp() if is_torchdynamo_compiling() or is_tracing() else x.cos()
"""


@pytest.fixture
def modelling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that looks like one of transformers' models, and is loaded."""
    module = ModuleType("transformers.models.seen.modeling_seen")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_model_that_takes_another_path_where_it_is_traced_is_captured_on_that_of_eager_pytorch(
    modelling: ModuleType,
) -> None:
    class Seen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = modelling.scaled(super().forward(x))
            return scaled.sum()

    graph = lowtide.capture(Seen(3, 3), torch.ones(2, 3))
    ops = {op.target for op in graph.ops}
    assert "aten.cos.default" in ops
    assert "aten.exp.default" not in ops


def test_models_are_asked_as_they_were_before_when_a_trace_is_over(modelling: ModuleType) -> None:
    before = dict(vars(modelling))
    with unnoticed_by_transformers():
        assert vars(modelling) != before
        assert modelling.is_tracing() is False
    assert vars(modelling) == before
