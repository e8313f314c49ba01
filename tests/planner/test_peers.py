"""Ways to train one step: all measured from one start, each with its reason where it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.measure import seconds_of
from lowtide.errors import BadRequest, CannotApply, DeviceMissing, InfeasibleBudget
from lowtide.planner import peer_steps, peer_ways
from lowtide.planner.peer_steps import EagerResult, PeerSteps, StepResult
from lowtide.planner.peer_ways import PeerKind, PeerRow, PeerTrial, distinct_peaks, problem_of
from lowtide.planner.peers import PeerComparison, compare_peers


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.dropout(self.second(nn.functional.gelu(self.first(x))))
        return found


def four(dropout: float = 0.0) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(4))), (torch.randn(64, 16),)


def compared(dropout: float = 0.0, **options: Any) -> PeerComparison:
    model, batch = four(dropout)
    given = {"loss": torch.sum, "compiled": False, "tiles": False, "effort": "quick", "repeats": 1}
    return compare_peers(model, batch, **{**given, **options})


def named(comparison: PeerComparison) -> dict[str, PeerRow]:
    return {row.label: row for row in comparison.rows}


def peak(row: PeerRow) -> int:
    assert row.reading is not None, row.problem
    return row.reading.peak_bytes


# Rows ------------------------------------------------------------------------------------------------


def test_every_way_is_measured_and_plans_keep_within_what_others_hold() -> None:
    found = named(compared(budgets=["90%"]))
    assert list(found) == [
        "eager",
        "checkpointing",
        "lowtide, all kept",
        "lowtide within checkpointing",
        "lowtide within 90%",
        "lowtide, lowest",
    ]
    eager, own, within = found["eager"], found["checkpointing"], found["lowtide within checkpointing"]
    assert peak(own) < peak(eager)
    assert within.budget_bytes == peak(own)
    assert peak(found["lowtide, lowest"]) <= peak(within) <= peak(own)
    assert found["lowtide within 90%"].budget_bytes == int(0.9 * peak(eager))
    for label, row in found.items():
        assert row.within_budget in (True, None)
        assert row.reading is not None
        assert row.reading.difference is None
        if label != "checkpointing":
            assert row.predicted_peak_bytes == peak(row), label


def test_what_is_timed_is_the_model_under_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[nn.Module] = []
    plans: list[int] = []

    def noted(model: nn.Module, solution: Any, **options: Any) -> nn.Module:
        planned.append(model)
        return lowtide.apply(model, solution, **options)

    def watched(run: Any, where: torch.device) -> float:
        plans.extend(len(lowtide.plans_of(model)) for model in planned[-1:])
        return seconds_of(run, where)

    monkeypatch.setattr(peer_ways, "apply", noted)
    monkeypatch.setattr(peer_steps, "seconds_of", watched)
    compared(repeats=2)
    rows, first, turns = 3, 1, 3
    assert plans == [1] * rows * (first + 2 * turns)


def test_the_peak_is_that_of_the_step_whatever_else_the_process_holds() -> None:
    alone = peak(named(compared())["eager"])
    beside = torch.ones(1 << 20)
    assert peak(named(compared())["eager"]) == alone
    del beside


def test_the_model_is_left_as_it_was_with_its_plan() -> None:
    model, batch = four()
    lowtide.optimize(model, batch, loss=torch.sum, budget="90%", effort="quick")
    (plan,) = lowtide.plans_of(model)
    model(*batch).sum().backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    stream = torch.get_rng_state()
    options: dict[str, Any] = {"compiled": False, "tiles": False, "effort": "quick", "repeats": 1}
    compare_peers(model, batch, loss=torch.sum, optimizer="adamw", **options)
    assert lowtide.plans_of(model) == (plan,)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is one for parameter, one in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), stream)


def test_the_optimizers_states_are_counted_once() -> None:
    plain, with_states = named(compared())["eager"], named(compared(optimizer="adamw"))["eager"]
    model, _ = four()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    counts = 4 * len(list(model.parameters()))  # a step count of 4 bytes each
    assert peak(with_states) >= peak(plain) + 2 * weights
    assert peak(with_states) <= peak(plain) + 4 * weights + counts
    assert with_states.predicted_peak_bytes == pytest.approx(peak(with_states), rel=0.01)


def test_draws_are_those_of_eager_training() -> None:
    for row in compared(dropout=0.5).rows:
        assert row.reading is not None
        assert row.reading.difference is None, row.label


def test_plans_with_tiles_stand_beside_those_without() -> None:
    found = named(compared(tiles=True))
    assert found["lowtide tiles, lowest"].reading is not None
    assert peak(found["lowtide tiles, lowest"]) < peak(found["lowtide, lowest"])


def test_a_comparison_is_one_json_document() -> None:
    found = compared()
    document = json.loads(json.dumps(found.to_json()))
    assert (document["model"], document["device"], document["interrupted"]) == ("Sequential", "cpu", False)
    first = document["rows"][0]
    assert (first["label"], first["kind"], first["problem"]) == ("eager", "eager", None)
    assert first["peak_bytes"] == peak(found.rows[0])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's own, of torch
def test_compiled_rows_are_measured_with_less_saved_where_less_is_allowed() -> None:
    found = named(compared(compiled=True))
    parts = [found[f"compile {part}"] for part in ("1", "0.5", "0.2", "0")]
    for row in (*parts, found["compile + checkpointing"]):
        assert row.reading is not None, row.problem
        assert row.reading.difference is None
        assert row.from_cache is False
    assert peak(parts[2]) <= peak(parts[1]) < peak(parts[0])
    generated = [row for label, row in found.items() if label.startswith("lowtide inductor")]
    assert len(generated) >= 3
    for row in generated:
        assert row.reading is not None, row.problem
        assert row.reading.difference is None
        assert row.within_budget in (True, None)


# What goes wrong -------------------------------------------------------------------------------------


def test_interrupted_it_keeps_the_rows_so_far() -> None:
    told: list[str] = []

    def enough(what: str) -> None:
        told.append(what)
        if what == "lowtide, all kept":
            raise KeyboardInterrupt

    found = compared(telling=enough)
    assert found.interrupted
    assert [row.label for row in found.rows] == told[:2] == ["eager", "checkpointing"]


def test_a_way_that_fails_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(model: nn.Module) -> str:
        raise CannotApply("no way\nat all")

    monkeypatch.setattr("lowtide.planner.peer_ways.switch_checkpointing_on", refused)
    found = named(compared())
    assert found["checkpointing"] == PeerRow("checkpointing", PeerKind.LIBRARY, "no way at all")
    assert found["lowtide, lowest"].reading is not None


def test_a_device_that_runs_out_of_memory_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(trial: PeerTrial) -> PeerRow:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to …")

    monkeypatch.setattr(PeerTrial, "_checkpointed", full)
    assert named(compared())["checkpointing"].problem == "the device ran out of memory"


def test_where_eager_training_has_no_room_others_are_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PeerSteps._result

    def full(steps: PeerSteps, step: Any, seed: int | None = None) -> StepResult:
        if step.spec.model is steps.spec.model:
            raise torch.OutOfMemoryError
        return real(steps, step, seed)

    monkeypatch.setattr(PeerSteps, "_result", full)
    reading = named(compared())["lowtide, lowest"].reading
    assert reading is not None
    assert (reading.eager_seconds, reading.difference) == (None, None)


def test_a_peer_that_trains_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(model: nn.Module) -> str:
        model[0].forward = lambda x: x  # type: ignore[index]
        return "spoilt"

    monkeypatch.setattr("lowtide.planner.peer_ways.switch_checkpointing_on", spoilt)
    reading = named(compared())["checkpointing"].reading
    assert reading is not None
    assert reading.difference is not None
    assert reading.difference.startswith("its loss is ")


@pytest.mark.parametrize(
    ("other", "alike", "difference"),
    [
        (StepResult(2.0001, 8.0), True, None),
        (StepResult(2.0003, 8.0), True, "its loss is 2.0003, eager's 2"),
        (StepResult(2.0, 8.01), True, "its norm of all gradients is 8.01, eager's 8"),
        (StepResult(2.2, 8.0), False, None),
        (StepResult(2.5, 8.0), False, "its loss is 2.5, eager's 2"),
        (StepResult(float("nan"), 8.0), True, "its loss is nan, eager's 2"),
    ],
)
def test_results_may_differ_by_rounding_and_by_draws_of_their_own(
    other: StepResult, alike: bool, difference: str | None
) -> None:
    eager = EagerResult(StepResult(2.0, 8.0), rounding=1e-7, spread=StepResult(0.1, 0.1))
    assert eager.difference(other, alike) == difference


def test_half_precision_rounds_more() -> None:
    eager = EagerResult(StepResult(2.0, 8.0), rounding=1 / 128, spread=StepResult(0.0, 0.0))
    assert eager.difference(StepResult(2.03, 8.4), True) is None
    assert eager.difference(StepResult(2.04, 8.4), True) is not None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError(
                "backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found in …"
            ),
            "there is no C++ compiler, which torch.compile needs on a CPU: install g++, or --no-compile",
        ),
        (
            RuntimeError("Cannot find a working triton installation. Either the package is not installed"),
            "there is no working Triton, which torch.compile needs: pip install triton, or --no-compile",
        ),
        (ValueError("one\n  two"), "ValueError: one two"),
        (BadRequest("one\ntwo"), "one two"),
        (InfeasibleBudget("auto", 1, 2048, "relu"), "no plan fits; the least is 2.0 KiB"),
    ],
)
def test_a_reason_is_one_line(error: Exception, told: str) -> None:
    assert problem_of(error) == told


def test_a_long_reason_is_cut() -> None:
    assert len(problem_of(ValueError("x" * 1000))) == 301


# Which budgets ---------------------------------------------------------------------------------------


def test_of_peaks_that_are_nearly_the_same_the_lowest_is_asked_for() -> None:
    peaks = {"a": 1000, "b": 1005, "c": 800, "d": 1100}
    assert distinct_peaks(peaks) == [("d", 1100), ("a", 1000), ("c", 800)]


# Refusals --------------------------------------------------------------------------------------------


def test_a_model_that_takes_no_memory_is_not_measured() -> None:
    with torch.device("meta"):
        model, batch = four()
    with pytest.raises(BadRequest, match="cannot measure on 'cpu': the model is on 'meta'"):
        compare_peers(model, batch, loss=torch.sum, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceMissing):
        compared(device="cuda")


def test_steps_are_timed_once_at_least() -> None:
    with pytest.raises(BadRequest, match="steps cannot be timed 0 times; give 1 or more"):
        compared(repeats=0)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model, batch = four()
    model.kept = torch.ones(1, requires_grad=True).exp()
    with pytest.raises(BadRequest, match="tried on a copy of the model, and it cannot be copied"):
        compare_peers(model, batch, loss=torch.sum)
