"""Comparing methods on a model: numbers added up by hand, each plan tried once, and measured against it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.planner.layers
from lowtide.cost.measure import measure
from lowtide.errors import BadRequest, CannotApply, DeviceMissing, UnknownMethod
from lowtide.execute.apply import apply
from lowtide.planner.compare import Comparison, Row, compare
from lowtide.planner.layers import Rehearsal
from lowtide.solvers import methods
from lowtide.solvers.chains.baselines import EveryK
from lowtide.solvers.method import Method
from lowtide.trace.step import training_step
from lowtide.trace.training import trace_training

# 64 rows of 16 floats through four layers of linear and tanh, and a sum. Bytes: weights 4 × 1024, batch
# 4096, what each layer hands on 4096, the loss and its gradient 512 each, as CUDA rounds.
#   keep all    in the backward of the last linear: four outputs, the gradients of its own output and
#               input, and of its weight
#   [1-2]       in the backward of the second tanh: outputs 1 and 2 again, the model's output, which the
#               step holds, the gradients before and after the tanh, and of two weights
THERE = 4 * 1024 + 4096 + 512 + 512
KEEP_ALL = THERE + 4 * 4096 + 2 * 4096 + 1024
FIRST_TWO = THERE + 3 * 4096 + 2 * 4096 + 2 * 1024


def four_layers() -> nn.Sequential:
    parts = [part for _ in range(4) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())]
    return nn.Sequential(*parts)


def rehearsal(built_on: str = "meta", **options: Any) -> Rehearsal:
    torch.manual_seed(0)
    with torch.device(built_on):
        model, batch = four_layers(), torch.randn(64, 16)
    where = "cuda" if built_on == "meta" else built_on
    given = {"device": where, "profile": False, "name": "four layers", **options}
    return Rehearsal(model, (batch,), torch.sum, **given)


def named(comparison: Comparison) -> dict[str, Row]:
    return {row.method: row for row in comparison.rows}


@pytest.fixture
def costs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where costs are kept


# By hand ---------------------------------------------------------------------------------------------


def test_rows_hold_what_adding_up_by_hand_gives() -> None:
    found = compare(rehearsal(), methods=["hong-quadratic"])
    assert (found.layers, found.lower_bound_bytes) == (4, FIRST_TWO)
    plain, best = found.rows
    assert plain == Row(
        method="keep-all",
        status="optimal",
        plan="keep all",
        chain_peak_bytes=KEEP_ALL,
        predicted_peak_bytes=KEEP_ALL,
        ratio=1.0,
        recomputed_ops=0,
        planning_seconds=plain.planning_seconds,
    )
    assert best == Row(
        method="hong-quadratic",
        status="optimal",
        plan="[1-2]",
        checkpoints=(2,),
        chain_peak_bytes=FIRST_TWO,
        predicted_peak_bytes=FIRST_TWO,
        ratio=FIRST_TWO / KEEP_ALL,
        recomputed_ops=4,  # two linears and two tanhs
        planning_seconds=best.planning_seconds,
    )


def test_methods_come_as_objects_with_options_too() -> None:
    found = compare(rehearsal(), methods=[EveryK(k=1), EveryK(k=2)])
    assert [row.plan for row in found.rows] == ["keep all", "[1-1][2-2][3-3]", "[1-2]"]


def test_a_comparison_is_one_json_document() -> None:
    found = compare(rehearsal(), methods=["hong-quadratic"], budget=2 * KEEP_ALL)
    document = json.loads(json.dumps(found.to_json()))
    assert document["model"] == "four layers"
    assert document["budget_bytes"] == 2 * KEEP_ALL
    assert document["timed"] is document["measured"] is False
    assert document["rows"][1] == {
        **asdict(found.rows[1]),
        "checkpoints": [],
    }  # everything fits, so it is kept


# Which methods ---------------------------------------------------------------------------------------


def test_by_default_every_method_is_asked_and_keep_all_is_first() -> None:
    found = compare(rehearsal())
    assert [row.method for row in found.rows] == list(methods())
    assert found.rows[0].method == "keep-all"
    assert not [row.problem for row in found.rows if row.problem]


def test_keep_all_is_first_and_once_whatever_is_asked() -> None:
    found = compare(rehearsal(), methods=["rotor", "keep-all", "chen-sqrt"])
    assert [row.method for row in found.rows] == ["keep-all", "rotor", "chen-sqrt"]


def test_exhaustive_is_not_asked_by_itself_where_it_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.planner.compare._FEW_LAYERS", 3)
    assert "exhaustive" not in named(compare(rehearsal()))
    assert "exhaustive" in named(compare(rehearsal(), methods=["exhaustive"]))


def test_with_a_budget_those_are_asked_that_take_one_and_all_stay_within() -> None:
    found = compare(rehearsal(), budget="95%")
    assert found.budget_bytes == int(0.95 * KEEP_ALL)
    assert [row.method for row in found.rows] == [name for name, m in methods().items() if m.takes_budget]
    plain, *others = found.rows
    assert plain.problem == "1.7 KiB over the budget, for reference"
    assert plain.predicted_peak_bytes == KEEP_ALL
    for row in others:
        assert row.problem is None
        assert row.predicted_peak_bytes is not None
        assert row.predicted_peak_bytes <= found.budget_bytes


# A row that says why ---------------------------------------------------------------------------------


def test_a_method_without_a_plan_says_why() -> None:
    found = named(compare(rehearsal(), methods=["rotor", "chen-sqrt"], budget=FIRST_TWO - 1))
    for method, said in {
        "rotor": "the least it reaches is 31.2 KiB (31979 bytes), needed by 2 … 3",
        "chen-sqrt": "chen-sqrt takes no budget",
    }.items():
        problem = found[method].problem
        assert problem is not None
        assert said in problem
        assert found[method] == Row(method, problem=problem)


def test_a_chain_too_long_for_a_method_is_a_problem_of_that_method() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(17)))
        batch = torch.ones(2, 4)
    found = compare(Rehearsal(model, (batch,), torch.sum, profile=False), methods=["exhaustive", "rotor"])
    assert "at most 16 layers" in (named(found)["exhaustive"].problem or "")
    assert named(found)["rotor"].problem is None


def test_a_plan_that_cannot_be_run_recomputes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(self: Rehearsal, solution: Any) -> Any:
        if solution.plan.segments:
            raise CannotApply("it cannot be run twice")
        return self.plain

    monkeypatch.setattr(Rehearsal, "under", unable)
    keep, rotor = compare(rehearsal(), methods=["rotor"]).rows
    assert (keep.problem, rotor.problem) == (None, None)
    assert rotor.plan == keep.plan
    assert rotor.predicted_peak_bytes == keep.predicted_peak_bytes


# Once ------------------------------------------------------------------------------------------------


def test_methods_that_agree_on_a_plan_share_one_trial_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    plainly = trace_training

    def counted(*args: Any, **kwargs: Any) -> Any:
        traced.append(args)
        return plainly(*args, **kwargs)

    monkeypatch.setattr(lowtide.planner.layers, "trace_training", counted)
    chosen = ["hong-linear", "hong-quadratic", "exhaustive", "chen-sqrt"]
    mine = rehearsal()
    found = compare(mine, methods=chosen)
    assert {row.plan for row in found.rows} == {"keep all", "[1-2]"}
    assert len(traced) == 1 + 2  # the plain step for the chain, then each plan
    compare(mine, methods=chosen, budget="95%")
    assert len(traced) == 3


def test_progress_ends_at_its_end() -> None:
    told: list[tuple[int, int]] = []
    compare(rehearsal(), methods=["rotor", "chen-sqrt"], progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 3), (2, 3), (3, 3)]


# Measured --------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """Large beside the 5 kB of random state that each segment keeps. BatchNorm has buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(8 if k else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
                for k in range(6)
            )
        )
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(images).mean((2, 3)))  # type: ignore[no-any-return]


def convolutions(**options: Any) -> Rehearsal:
    torch.manual_seed(0)
    return Rehearsal(Convolutions(), (torch.randn(16, 3, 32, 32),), torch.sum, **options)


@pytest.mark.usefixtures("costs_apart")
@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_measured_peaks_are_within_one_per_cent_of_the_predicted(optimizer: str | None) -> None:
    mine = convolutions(optimizer=optimizer)
    found = compare(mine, methods=["hong-linear", "every-k", "rotor"], measure=True, repeats=1)
    resident = mine.plain.timeline.resident_bytes
    assert found.timed
    assert found.measured
    for row in found.rows:
        assert row.predicted_peak_bytes is not None
        assert row.measured_peak_bytes is not None
        grown = row.predicted_peak_bytes - resident
        assert abs(row.measured_peak_bytes - row.predicted_peak_bytes) <= 0.01 * grown
        assert row.measured_seconds_ratio is not None
        assert row.measured_seconds_ratio > 0
        assert row.extra_seconds_ratio is not None
        assert (row.extra_seconds_ratio > 0) == (row.plan != "keep all")
    plain = found.rows[0]
    assert (plain.measured_ratio, plain.measured_seconds_ratio) == (1.0, 1.0)
    assert min(row.measured_ratio or 9 for row in found.rows) < 0.7


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_leaves_the_model_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = convolutions(profile=False, optimizer="momentum")
    solution = mine.solve(mine.chain(), "every-k")
    apply(mine.model, solution)
    training_step(mine.model, mine.example, mine.loss)()
    before, random = state_of(mine.model), torch.get_rng_state()
    gradients = [parameter.grad for parameter in mine.model.parameters()]
    hooks = [len(module._forward_hooks) for module in mine.model.modules()]
    if fails:
        monkeypatch.setattr("lowtide.planner.real_step.seconds_of", lambda step, device: [][0])
        with pytest.raises(IndexError):
            compare(mine, methods=["hong-linear"], measure=True, repeats=1)
    else:
        compare(mine, methods=["hong-linear"], measure=True, repeats=1)
    assert all(map(torch.equal, before, state_of(mine.model)))
    assert all(map(torch.equal, [random], [torch.get_rng_state()]))
    after = [parameter.grad for parameter in mine.model.parameters()]
    assert all(one is other for one, other in zip(gradients, after, strict=True))
    assert [len(module._forward_hooks) for module in mine.model.modules()] == hooks


def test_times_are_medians_of_steps_taken_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 2.0, 9.0, 3.0, 2.0, 8.0])
    monkeypatch.setattr("lowtide.planner.real_step.seconds_of", lambda step, device: next(seconds))
    found = compare(rehearsal("cpu"), methods=["hong-linear"], measure=True, repeats=3)
    # plain 1, 9, 2 and planned 2, 3, 8
    assert [row.measured_seconds_ratio for row in found.rows] == [1.0, 3.0 / 2.0]


def test_each_plan_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    compare(
        rehearsal("cpu"),
        methods=["hong-linear", "hong-quadratic", "chen-sqrt"],
        measure=True,
        repeats=2,
        progress=lambda done, of: told.append((done, of)),
    )
    assert told[3:-1] == [(1, 6), (2, 6), (4, 6), (6, 6)]  # two plans: a peak each, then two rounds


def test_a_plan_that_does_not_fit_the_device_is_a_problem_of_its_methods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plainly = measure
    calls: list[object] = []

    def full_at_first(step: Any, **options: Any) -> Any:
        calls.append(step)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no")
        return plainly(step, **options)

    monkeypatch.setattr("lowtide.planner.real_step.measure", full_at_first)
    plain, planned = compare(rehearsal("cpu"), methods=["hong-linear"], measure=True, repeats=1).rows
    assert plain.problem == "the device ran out of memory when it was measured"
    assert plain.predicted_peak_bytes is not None
    assert plain.measured_peak_bytes is plain.measured_ratio is None
    assert planned.problem is None
    assert planned.measured_peak_bytes is not None
    assert planned.measured_ratio is None  # to nothing


# Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [["hong-liner"], ["rotor", "hong-liner"]])
def test_an_unknown_method_is_refused_before_anything_is_traced(wrong: Sequence[str | Method]) -> None:
    mine = rehearsal()
    with pytest.raises(UnknownMethod, match=r"no method called 'hong-liner'\. Did you mean hong-linear"):
        compare(mine, methods=wrong)
    assert "plain" not in mine.__dict__


def test_timing_no_step_is_refused() -> None:
    with pytest.raises(BadRequest, match="steps cannot be timed 0 times; give 1 or more"):
        compare(rehearsal(), measure=True, repeats=0)


def test_a_model_that_is_not_there_cannot_be_measured() -> None:
    with pytest.raises(BadRequest, match=r"cannot measure on 'cpu': the model is on 'meta'\. Build both"):
        compare(rehearsal("meta", device="cpu"), measure=True)
    mine = Rehearsal(four_layers(), (torch.ones(2, 16, device="meta"),), torch.sum, profile=False)
    with pytest.raises(BadRequest, match="cannot measure on 'cpu': the batch is on 'meta'"):
        compare(mine, measure=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there_cannot_be_measured_on() -> None:
    with pytest.raises(DeviceMissing, match="cannot measure on 'cuda'"):
        compare(rehearsal("cpu", device="cuda"), measure=True)


def test_a_module_that_is_not_called_is_refused() -> None:
    with pytest.raises(BadRequest, match="the step calls no module 'nope'"):
        compare(rehearsal(), modules=["nope"])
