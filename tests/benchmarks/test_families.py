"""The sweep over model families: what counts as the same training, and what its rows are counted as."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.families import families, processes, report
from benchmarks.families.batches import mean_square
from benchmarks.families.equality import TO_THE_BIT, Laboratory, compared, distances
from benchmarks.families.trial import LOWEST, PART
from torch import nn

# Equality ---------------------------------------------------------------------------------------------


def laboratory() -> Laboratory:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    batch = torch.randn(5, 3)

    def step() -> torch.Tensor:
        loss = mean_square(model(batch))
        loss.backward()
        return loss

    return Laboratory(model, step)


def test_a_step_is_the_same_as_itself_and_leaves_the_model_as_it_was() -> None:
    here = laboratory()
    first = here.outcome()
    assert compared(here.outcome(), first) == TO_THE_BIT
    assert all(parameter.grad is None for parameter in here.model.parameters())
    assert torch.equal(here.model.get_buffer("1.running_mean"), torch.zeros(4))


def test_what_differs_is_named() -> None:
    first = laboratory().outcome()
    far = {**first.gradients, "0.weight": torch.ones(4, 3)}
    assert compared(replace(first, gradients=far), first).startswith("wrong: the gradient of 0.weight is off")
    none = {**first.gradients, "0.weight": None}
    assert compared(replace(first, gradients=none), first) == "wrong: 0.weight gets no gradient"
    counted = {**first.buffers, "1.num_batches_tracked": torch.tensor(2)}
    assert "1.num_batches_tracked" in compared(replace(first, buffers=counted), first)
    assert compared(replace(first, draws=(0.0,)), first).startswith("wrong: the random numbers")
    last_bit = replace(first, loss=first.loss * (1 + 2e-7))
    assert compared(last_bit, first).startswith("to ")


def test_numbers_of_kernels_that_add_up_in_any_order_may_be_as_far_apart_as_plain_steps_are() -> None:
    first = laboratory().outcome()
    apart = replace(first, loss=first.loss * 1.03)
    spread = distances(replace(first, loss=first.loss * 1.01), first)
    assert spread["the loss"] == pytest.approx(0.01, rel=1e-4)
    assert not any(each for name, each in spread.items() if name != "the loss")
    assert compared(apart, first, spread=spread) == "to 3e-02: the loss"
    assert compared(replace(first, loss=first.loss * 1.05), first, spread=spread).startswith(
        "wrong: the loss"
    )
    other = {**first.gradients, "0.weight": torch.ones(4, 3)}
    assert compared(replace(first, gradients=other), first, spread=spread).startswith("wrong: the gradient")


# Processes --------------------------------------------------------------------------------------------


class Dead:
    exitcode = -11

    def is_alive(self) -> bool:
        return False

    def join(self, _: float) -> None:
        pass


class Silent(Dead):
    killed = False

    def is_alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True


def running(process: Dead, began: float) -> Any:
    heard: Any = SimpleNamespace(poll=lambda: False, close=lambda: None)
    return processes._Running("hf:any", process, heard, began, {"family": "hf:any", "stage": "dry run"})


def test_a_process_that_dies_or_hangs_has_a_row_that_says_so() -> None:
    limits = processes.Limits(seconds=1, gibibytes=1)
    assert processes._row_of(running(Dead(), time.monotonic()), limits) == {
        "family": "hf:any",
        "stage": "dry run",
        "crashed": "the process ended with -11",
    }
    assert processes._row_of(running(Silent(), time.monotonic()), limits) is None
    late = running(Silent(), time.monotonic() - 100)
    row = processes._row_of(late, limits)
    assert row is not None
    assert row["crashed"].startswith("no answer in 10 s")
    assert late.process.killed


# Which rows are made again ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commit", "mend", "failed", "again"),
    [
        ("a", False, True, False),
        ("b", False, False, True),
        ("b", True, False, False),
        ("b", True, True, True),
    ],
)
def test_a_row_of_another_commit_is_made_again(commit: str, mend: bool, failed: bool, again: bool) -> None:
    there = row(commit="a", **({"crashed": "it did"} if failed else {}))
    assert families._again(there, Namespace(commit=commit, mend=mend)) is again


def test_of_several_sweeps_the_last_row_of_a_family_is_taken(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps({"machine": {"date": 1}, "rows": {"a": {"commit": 1}, "b": {"commit": 1}}}))
    second.write_text(json.dumps({"machine": {"date": 2}, "rows": {"b": {"commit": 2}}}))
    assert families.together([first, second]) == {
        "machine": {"date": 2},
        "rows": {"a": {"commit": 1}, "b": {"commit": 2}},
    }


# Counts -----------------------------------------------------------------------------------------------


def row(**more: Any) -> dict[str, Any]:
    plan = {"how": "ops", "remark": "", "promised_bytes": 70 << 20, "measured_bytes": 70 << 20}
    plan |= {"plain_bytes": 100 << 20, "same": TO_THE_BIT}
    dry_run = {"predicted_bytes": 100 << 20, "measured_bytes": 100 << 20}
    return {
        "family": "hf:any",
        "stage": "ended",
        "deterministic": True,
        "dry_run": dry_run,
        PART: plan,
        LOWEST: plan,
        **more,
    }


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({}, set()),
        ({"dry_run": {"predicted_bytes": 97 << 20, "measured_bytes": 100 << 20}}, {"predicts"}),
        ({PART: {"error": "InfeasibleBudget", "message": "no", "on_purpose": True}}, set()),
        ({PART: {"error": "CannotCapture", "message": "no", "on_purpose": True}}, {"keeps"}),
        ({PART: {**row()[PART], "measured_bytes": 75 << 20}}, {"promised"}),
        ({PART: {**row()[PART], "same": "to 3e-07: the loss"}}, {"trained"}),
    ],
)
def test_a_family_counts_where_it_did_what_it_should(changed: Any, lost: set[str]) -> None:
    counts = report.counted([row(**changed)])
    for words, count in counts.items():
        good = any(
            sign in words for sign in ("families", "predicts", "keeps", "promised", "trained", "by op")
        )
        if not any(sign in words for sign in ("in part", "wrong", "crashes")):
            assert good
            assert count == (not any(sign in words for sign in lost)), words


def test_wrong_results_crashes_and_what_was_not_built_are_told() -> None:
    wrong = row(**{LOWEST: {**row()[PART], "same": "wrong: the loss is off by 1"}})
    bug = {"error": "KeyError", "message": "3", "on_purpose": False}
    rows = [
        wrong,
        row(crashed="no answer in 60 s"),
        row(**{PART: bug}),
        {"family": "hf:b", "not_built": "why"},
    ]
    counts = report.counted(rows)
    assert counts["families"] == 3
    assert counts["wrong results"] == 1
    assert counts["crashes and hangs"] == 2
    assert "70%: KeyError: N" in report.causes(rows)
    assert report.verdict(rows[-1]) == "not built: why"
