"""`lowtide batch`: the table, JSON, measuring, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import lowtide
from lowtide.cli import main

USER_FILE = """
import torch
from torch import nn

def four(batch):
    with torch.device("meta"):
        parts = [part for _ in range(4) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())]
        return nn.Sequential(*parts), (torch.ones(batch, 16),), torch.sum

def real(batch):
    torch.manual_seed(0)
    parts = [part for _ in range(4) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())]
    return nn.Sequential(*parts), (torch.ones(batch, 16),), torch.sum

def fixed():
    return nn.Linear(16, 1), (torch.ones(4, 16),), torch.sum
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's file in it; nothing else may appear."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py"}, "something was written unasked"


def batch(model: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["batch", model, "--no-profile", *arguments])


TABLE = """\
mine.py:four, on cpu: the largest batch in 16.0 KiB

step     batch  peak B  of memory  samples/s  extra time
plain       {plain}  {peak}     {part} %    unknown     unknown
planned     {planned}"""


def test_slices_can_be_asked_for() -> None:
    asked = ("mine.py:four", "--memory", "16KiB", "--device", "cpu")
    found = [json.loads(batch(*asked, *more, "--json").stdout) for more in ((), ("--tiles",))]
    assert [told["tiles"] for told in found] == [False, True]
    assert found[1]["planned"]["batch"] >= found[0]["planned"]["batch"]


def test_both_answers_are_told_and_how_they_were_found() -> None:
    result = batch("mine.py:four", "--memory", "16KiB", "--device", "cpu")
    assert result.exit_code == 0
    told = json.loads(batch("mine.py:four", "--memory", "16KiB", "--device", "cpu", "--json").stdout)
    plain, planned = told["plain"]["batch"], told["planned"]["batch"]
    assert 8 < plain < planned
    peak = told["plain"]["predicted_peak_bytes"]
    start = TABLE.format(plain=plain, planned=planned, peak=f"{peak:,}", part=f"{peak / 163.84:.1f}")
    assert result.stdout.startswith(start)
    checked = f"checked by a capture at batch {plain} and {planned}"
    assert f"captured at batch 4 and 8, scaled from there, and {checked}\n" in result.stdout
    assert "note: not profiled: what kernels take while they run is not in these peaks" in result.stdout
    assert told["captured"] == [4, 8, plain, planned]
    assert told["memory_bytes"] == 16384
    assert told["planned"]["promised_bytes"] <= 16384


@pytest.mark.long
def test_what_was_found_is_trained_on_and_measured() -> None:
    result = batch("mine.py:real", "--memory", "32KiB", "--device", "cpu", "--measure", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    for row in (told["plain"], told["planned"]):
        # every tensor of the process counts, and other tests may have left some
        assert row["measured_peak_bytes"] >= row["predicted_peak_bytes"]
        assert row["measured_samples_per_second"] == row["batch"] / row["measured_seconds"]


def test_what_is_being_done_is_told_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal, to rich
    result = batch("mine.py:four", "--memory", "16KiB", "--device", "cpu")
    assert "planning op by op" in result.stderr
    assert "capturing the step at batch" in result.stderr
    quiet = ["--no-progress", "batch", "mine.py:four", "--no-profile", "--memory", "16KiB", "--device", "cpu"]
    assert CliRunner().invoke(main, quiet).stderr == ""


@pytest.mark.parametrize("command", ["batch", "check"])
def test_help_waits_for_nothing(command: str) -> None:
    code = (
        f"import sys; from lowtide.cli import main; main(['{command}', '--help'], standalone_mode=False); "
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_multiples_can_be_asked_for() -> None:
    told = json.loads(
        batch("mine.py:four", "--memory", "16KiB", "--device", "cuda", "--multiple-of", "4", "--json").stdout
    )
    assert told["plain"]["batch"] % 4 == told["planned"]["batch"] % 4 == 0
    assert told["multiple_of"] == 4


@pytest.mark.parametrize(
    ("model", "asked", "told"),
    [
        ("mine.py:four", ["--memory", "1KB"], "That is for a batch of 1, the smallest"),
        ("mine.py:four", ["--memory", "16KiB", "--batch", "8"], "--batch is what is looked for"),
        ("mine.py:four", ["--reserve", "1GiB"], "--reserve says what others hold of a --card; give both."),
        ("mine.py:four", ["--memory", "16KiB", "--card", "8GiB"], "--memory is for a peak, --card for all"),
        ("mine.py:four", ["--card", "rtx4095"], "there is no card called 'rtx4095'. Did you mean rtx4090"),
        ("mine.py:four", ["--card", "8GiB"], "the step runs on cpu. Say that it runs on CUDA"),
        ("mine.py:four", ["--memory", "16KiB", "--time-limit", "0.5"], "a time limit of 0.5 cannot be kept"),
        (
            "mine.py:four",
            ["--memory", "16KiB", "--time-limit", "1.2"],
            "there are no times to hold a time limit",
        ),
        ("mine.py:four", ["--memory", "16KiB", "--method", "rotor"], "rotor plans layers"),
        ("mine.py:fixed", ["--memory", "16KiB"], "mine.py:fixed takes no batch"),
    ],
)
def test_what_cannot_be_is_refused(model: str, asked: list[str], told: str) -> None:
    result = batch(model, "--device", "cpu", *asked)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_measuring_on_a_device_that_is_not_here_is_refused_before_any_work() -> None:
    result = batch("none.py:none", "--memory", "16KiB", "--device", "cuda", "--measure")
    assert result.exit_code == 2
    assert "cannot measure on 'cuda': this machine has no such device" in result.stderr
