"""`lowtide plan` op by op: one budget, every budget, files, pictures and refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import lowtide
from lowtide.cli import main
from lowtide.cost.measure import measure
from lowtide.solvers import schedulers
from lowtide.text.progress import stages
from lowtide.trace.step import training_step

# Four layers of linear and tanh, as in test_plan.py. Bytes: weights 4 × 1024, batch 4096, what each
# layer hands on 4096, the loss and its gradient 512 each, as CUDA rounds.
USER_FILE = """
import torch
from torch import nn

def four(batch=64):
    print("building")
    with torch.device("meta"):
        parts = [part for _ in range(4) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())]
        return nn.Sequential(*parts), (torch.ones(batch, 16),), torch.sum
"""
TENSOR, WEIGHT, LOSS = 4096, 1024, 4
KEEP_ALL = 34816
LEAST = (
    KEEP_ALL - TENSOR - 2 * WEIGHT
)  # in the backward of the first tanh: three weights' gradients, no output
BUDGET = 33000  # one output must go


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's file in it, and nothing else."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"mine.py", "out.json", "out.svg", "out.png"}, "something was written unasked"


def plan(*arguments: str, device: str = "cuda") -> Result:
    given = ("plan", "mine.py:four", "--batch", "64", "--device", device, "--no-profile", *arguments)
    return CliRunner().invoke(main, given)


def document(*arguments: str) -> dict[str, Any]:
    result = plan("--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "building\n")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# Applied ---------------------------------------------------------------------------------------------


def test_a_saved_plan_keeps_the_budget_and_the_gradients(folder: Path) -> None:
    result = plan("--budget", "90%", "-o", "out.json", "--plot", "out.png", device="cpu")
    assert result.exit_code == 0
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    solution = lowtide.load_solution("out.json")
    assert isinstance(solution, lowtide.GraphSolution)
    assert solution.budget_bytes is not None
    assert solution.recomputed
    parts = [part for _ in range(4) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())]
    plain, batch = nn.Sequential(*parts), torch.randn(64, 16)
    model = lowtide.apply(copy.deepcopy(plain), solution)
    step = training_step(model, batch, torch.sum)
    step()
    model.zero_grad(set_to_none=True)
    held = solution.timeline.resident_bytes + measure(step, device="cpu").growth_bytes
    assert held <= solution.budget_bytes
    assert held == pytest.approx(solution.peak_bytes, abs=LOSS)  # which runs eagerly
    training_step(plain, batch, torch.sum)()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)


# One budget ------------------------------------------------------------------------------------------

SUMMARY = """\
mine.py:four, batch 64, on cuda:0
plain peak    34,816 B  as it is written
planned peak  30,720 B  at """
TOTALS = ["held", "when", "the", "forward", "is", "over", "6", "16,896", "12,800", "4,096", "2"]


def test_a_plan_tells_what_is_kept_and_what_is_recomputed_by_module() -> None:
    result = plan("--budget", str(BUDGET))
    assert result.exit_code == 0
    summary, table = result.stdout.split("\n\n")
    assert "\n".join(line.rstrip() for line in summary.splitlines()).startswith(SUMMARY)
    assert "extra time     unknown  2 ops run again" in summary
    assert "budget        33,000 B  2.2 KiB to spare" in summary
    rows = [line.split() for line in table.partition("note: ")[0].splitlines()]
    assert rows[0] == ["module", "calls", "plain", "B", "kept", "recomputed", "ops", "again"]
    assert rows[-1] == TOTALS
    recomputed = [int(row[-2].replace(",", "")) for row in rows[1:-1]]
    assert sum(recomputed) == TENSOR
    assert max(map(len, result.stdout.partition("note: ")[0].splitlines())) <= 100


def test_a_plan_as_json_is_one_document_whose_parts_add_up() -> None:
    found = document("--budget", "95%", "--optimizer", "sgd")
    assert (found["model"], found["batch"], found["optimizer"]) == ("mine.py:four", 64, "sgd")
    assert (found["method"], found["accumulate"]) == ("auto", 1)
    assert found["budget_bytes"] == int(0.95 * found["plain_peak_bytes"])
    assert found["predicted_peak_bytes"] <= found["budget_bytes"]
    assert found["saved_bytes"] == found["plain_peak_bytes"] - found["predicted_peak_bytes"]
    assert sum(part["ops_again"] for part in found["modules"]) == found["recomputed_ops"] == 2
    assert found["extra_seconds"] is found["extra_seconds_ratio"] is found["plain_seconds"] is None
    assert found["notes"][0].startswith("not profiled: ")


@pytest.mark.parametrize("method", schedulers())
def test_min_is_the_lowest_peak_whatever_the_method(method: str) -> None:
    found = document("--budget", "min", "--method", method)
    assert found["method"] == method
    assert found["budget_bytes"] is None
    assert found["predicted_peak_bytes"] == found["lower_bound_bytes"] == LEAST


def test_gradients_of_earlier_micro_batches_are_counted() -> None:
    found = document("--budget", "min", "--accumulate", "4")
    assert found["predicted_peak_bytes"] == LEAST + 4 * WEIGHT
    assert found["notes"][2] == "gradients are there when a forward begins: 4 backward calls make one update"


def test_the_picture_of_a_plan_shows_both_steps(folder: Path) -> None:
    assert plan("--budget", str(BUDGET), "--plot", "out.svg").exit_code == 0
    text = (folder / "out.svg").read_text()
    for words in (">planned by auto<", "peak 34.0 KiB", "peak 30.0 KiB", "budget 32.2 KiB"):
        assert words in text


# Every budget ----------------------------------------------------------------------------------------

FRONTIER = """\
mine.py:four, batch 64, on cuda:0

budget B  peak B  of plain  extra time  of the step  ops again  status    method
       –  34,816   100.0 %           0       +0.0 %          0  optimal   keep-all
  30,906  30,720    88.2 %     unknown            –          2  feasible  auto
       –  28,672    82.4 %     unknown            –          6  feasible  auto

lower bound: 28.0 KiB, held by any schedule at 1: aten.tanh_backward
note: """


def test_a_frontier_is_a_table_from_keep_all_to_the_lowest() -> None:
    result = plan("--frontier")
    assert result.exit_code == 0
    text = "\n".join(line.rstrip() for line in result.stdout.splitlines())
    assert text.startswith(FRONTIER)
    assert text.count("keep-all") == 1


def test_a_frontier_as_json_goes_down_in_bytes_and_up_in_what_runs_again() -> None:
    found = document("--frontier", "--points", "6")
    points = found["points"]
    assert (found["method"], found["lower_bound_bytes"]) == ("auto", LEAST)
    assert (points[0]["predicted_peak_bytes"], points[0]["recomputed_ops"]) == (KEEP_ALL, 0)
    assert points[-1]["predicted_peak_bytes"] == LEAST
    peaks = [point["predicted_peak_bytes"] for point in points]
    assert peaks == sorted(set(peaks), reverse=True)
    again = [point["recomputed_ops"] for point in points]
    assert again == sorted(set(again))
    for point in points[1:-1]:
        assert point["predicted_peak_bytes"] <= point["budget_bytes"]


def test_two_points_are_the_ends() -> None:
    points = document("--frontier", "--points", "2", "--method", "evict")["points"]
    assert [point["predicted_peak_bytes"] for point in points] == [KEEP_ALL, LEAST]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_of_a_frontier_names_its_ends(folder: Path, kind: str) -> None:
    assert plan("--frontier", "--plot", f"out.{kind}").exit_code == 0
    content = (folder / f"out.{kind}").read_bytes()
    if kind == "png":
        assert content.startswith(b"\x89PNG")
        return
    text = content.decode()
    for words in ("keep-all 34.0 KiB", "lower bound 28.0 KiB", "mine.py:four, batch 64", ">auto<"):
        assert words in text


def test_a_step_from_which_nothing_can_be_saved_has_one_point() -> None:
    found = plan("--frontier", "--batch", "1")
    assert found.exit_code == 0
    assert "keep-all" in found.stdout


# Progress --------------------------------------------------------------------------------------------


def test_stages_are_shown_on_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with stages() as stage:
        stage.begin("capturing")
        stage.update(1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal, to rich
    with stages() as stage:
        stage.begin("capturing")
        stage.update(1, 2)
    shown = capsys.readouterr()
    assert "capturing" in shown.err
    assert shown.out == ""


# Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--budget", "20000"],
            "error: no plan of auto fits in 19.5 KiB: the least it reaches is 28.2 KiB (28871 bytes), needed",
        ),
        (
            ["--budget", "60%", "--granularity", "fine"],
            "error: granularity and modules say how to cut a model",
        ),
        (["--budget", "60%", "--module", "3"], "this method plans op by op and cuts nothing."),
        (["--frontier", "--module", "3"], "this method plans op by op and cuts nothing."),
        (
            ["--budget", "min", "--method", "rotor"],
            'error: the budget "min" is for methods that plan op by op',
        ),
        (["--accumulate", "2"], "error: accumulate is for methods that plan op by op (auto)"),
        (["--accumulate", "0", "--budget", "min"], "'--accumulate': it must be a whole number of at least 1"),
        (["--budget", "max"], "'--budget': cannot read 'max' as a size."),
        (
            ["--frontier", "--method", "rotor"],
            "error: rotor plans layers, and a frontier is planned op by op. These do: evict, exact, auto.",
        ),
        (
            ["--frontier", "--budget", "60%"],
            "--frontier plans for every budget; leave --budget or --frontier out.",
        ),
        (["--points", "5"], "--points says how many budgets a --frontier has; give both."),
        (
            ["--frontier", "--points", "1"],
            "a frontier has at least 2 points, the plain step and the lowest; not 1.",
        ),
    ],
)
def test_what_cannot_be_is_one_message_and_writes_nothing(
    folder: Path, arguments: list[str], said: str
) -> None:
    result = plan("--plot", "out.png", "--json", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert {path.name for path in folder.iterdir()} == {"mine.py"}


def test_a_frontier_is_not_saved_as_a_plan(folder: Path) -> None:
    result = plan("--frontier", "-o", "out.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--frontier makes many plans. Save one of them: --budget and -o." in result.stderr
    assert {path.name for path in folder.iterdir()} == {"mine.py"}
