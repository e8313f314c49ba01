"""What is asked of Inductor: code that caches tell apart, refusals, and what slices leave to be scaled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.exc import InductorError

import lowtide
from lowtide.compat.inductor import _Told, missing_compiler
from lowtide.errors import CannotApply
from lowtide.fusion.fuse import of_ops
from lowtide.solvers.solution import GraphSolution

NO_COMPILER = missing_compiler("cpu")
needs_compiler = pytest.mark.skipif(NO_COMPILER is not None, reason=f"{NO_COMPILER} is not here")


class Own(CustomGraphPass):
    """A pass of the user's, which counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.runs += 1

    def uuid(self) -> str:
        return "own"


class Head(nn.Module):
    """A wide head and its loss, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1500, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.relu(self.body(x))).float(), labels)


def test_caches_tell_code_apart_by_what_it_may_write_over() -> None:
    assert _Told((), None).uuid() != _Told((1, 2), None).uuid() == _Told((1, 2), None).uuid()


def test_a_pass_of_the_users_runs_and_is_told_apart() -> None:
    own = Own()
    told = _Told((1,), own)
    told(fx.Graph())
    assert own.runs == 1
    assert told.uuid() not in (None, _Told((1,), None).uuid(), _Told((2,), own).uuid())


def test_with_a_pass_that_caches_cannot_know_nothing_is_cached() -> None:
    assert _Told((1,), lambda graph: None).uuid() is None


@needs_compiler
def test_code_that_cannot_be_generated_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise InductorError(RuntimeError("no such lowering"), None)

    model, batch = Head(), (torch.randn(4, 16), torch.arange(4))
    lowtide.optimize(model, batch, budget="min", kernels="inductor")
    monkeypatch.setattr(compile_fx, "compile_fx_inner", fail)
    with pytest.raises(CannotApply, match=r'no such lowering.*leave kernels="eager" for it'):
        model(*batch)


@needs_compiler
def test_a_head_in_half_precision_is_scaled_after_its_slices() -> None:
    model, batch = Head().bfloat16(), (torch.randn(64, 16).bfloat16(), torch.arange(64))
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    solution = lowtide.plan(model, batch, budget="min", kernels="inductor", tiles=True)
    assert isinstance(solution, GraphSolution)
    assert of_ops(solution.graph).tiled is not None
    assert "aten.mul.out" in {op.target for op in of_ops(solution.graph).ops}
    lowtide.apply(model, solution)
    for each in (model, plain):
        (3 * each(*batch)).backward()
    (3 * exact(batch[0].double(), batch[1])).backward()
    for name, _ in model.named_parameters():
        found, usual, wanted = (gradient(each, name) for each in (model, plain, exact))
        assert (found - wanted).norm() <= 1.5 * (usual - wanted).norm() + 1e-3 * wanted.norm()


def gradient(model: nn.Module, name: str) -> Tensor:
    found = model.get_parameter(name).grad
    assert found is not None
    return found.double()
