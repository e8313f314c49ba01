"""Steps that are really run: what they hold is what was predicted, and the model is left without a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.planner import real_step
from lowtide.planner.layers import Rehearsal
from lowtide.planner.real_step import RealStep


@pytest.fixture(scope="module")
def rehearsal() -> Rehearsal:
    parts = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())]
    return Rehearsal(nn.Sequential(*parts), torch.ones(256, 64), torch.sum, "adamw", "cpu", profile=False)


def real(rehearsal: Rehearsal) -> RealStep:
    return RealStep(rehearsal.spec)


def test_a_real_step_holds_what_was_predicted_plain_and_under_a_plan(rehearsal: Rehearsal) -> None:
    solution = rehearsal.solve(rehearsal.chain(), "rotor")
    step = real(rehearsal)
    plain, planned = step.reading(rehearsal.plain), step.reading(rehearsal.plain, solution)
    assert plain is not None
    assert planned is not None
    assert plain.peak_bytes == pytest.approx(rehearsal.plain.peak_bytes, rel=0.01)
    assert planned.peak_bytes == pytest.approx(rehearsal.confirm(solution).peak_bytes, rel=0.01)
    assert planned.peak_bytes < plain.peak_bytes
    for reading in (plain, planned):
        assert reading.timeline[0] == reading.resident_bytes
        assert max(reading.timeline) == reading.peak_bytes
    assert all(parameter.grad is None for parameter in rehearsal.model.parameters())


def test_a_plan_that_the_model_has_is_there_again_afterwards(rehearsal: Rehearsal) -> None:
    model = rehearsal.model
    lowtide.apply(model, rehearsal.solve(rehearsal.chain(), "rotor"))
    plans = lowtide.plans_of(model)
    assert real(rehearsal).reading(rehearsal.plain) is not None
    assert lowtide.plans_of(model) == plans
    assert len(plans) == 1
    lowtide.remove(model)


def test_a_step_that_runs_out_of_memory_has_no_reading(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(real_step, "measure", fails)
    assert real(rehearsal).reading(rehearsal.plain) is None
    assert all(parameter.grad is None for parameter in rehearsal.model.parameters())
