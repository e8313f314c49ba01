"""`lowtide check`: exit codes, what is told, files, refusals; and the switch for any command's progress."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from lowtide.cli import main
from lowtide.text.progress import progress_bar, stages, switch_progress, waiting
from tests.helpers.editable import editable

USER_FILE = """
import torch
from torch import nn

def four(batch=64, width=16):
    print("building")
    with torch.device("meta"):
        parts = [part for _ in range(4) for part in (nn.Linear(16, width, bias=False), nn.Linear(width, 16))]
        return nn.Sequential(*parts), (torch.ones(batch, 16),), torch.sum
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's file in it, and nothing else."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "peak.json"}, "written unasked"


def check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", "mine.py:four", "--device", "cuda", "--no-profile", *arguments])


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(check(*arguments, "--json").stdout)
    return found


def written() -> dict[str, Any]:
    assert check("--baseline", "peak.json", "--write-baseline").exit_code == 0
    found: dict[str, Any] = editable(Path("peak.json"))
    return found


def test_a_limit_is_kept_to_the_byte() -> None:
    peak = document("--max-peak", "1GiB")["peak_bytes"]
    within = check("--max-peak", f"{peak}")
    assert within.exit_code == 0
    assert "0 B to spare" in within.stdout
    above = check("--max-peak", f"{peak - 1}")
    assert above.exit_code == 1
    assert ": 1 B too much\n" in above.stdout
    assert "module" in above.stdout
    assert "activations" in above.stdout
    assert "building" in above.stderr


def test_a_baseline_is_written_once_and_held_against_from_then_on() -> None:
    found = written()
    assert (found["model"], found["sizes"]) == ("mine.py:four", {})
    assert sum(found["modules"].values()) == found["peak_bytes"]
    again = check("--baseline", "peak.json", "--tolerance", "0%")
    assert again.exit_code == 0
    assert "the predicted peak held" in again.stdout
    assert "difference" not in again.stdout


def shrink(found: dict[str, Any], by: int) -> None:
    """Make the file say that less was held, in one module and one category."""
    module = next(iter(found["modules"]))
    found["modules"][module] -= by
    found["categories"]["activations"] -= by
    Path("peak.json").write_text(json.dumps({**found, "peak_bytes": found["peak_bytes"] - by}))


def test_what_grew_is_told_by_module_and_the_answer_is_no() -> None:
    found = written()
    shrink(found, 4096)
    result = check("--baseline", "peak.json")
    assert result.exit_code == 1
    assert "the predicted peak grew" in result.stdout
    assert "+4,096" in result.stdout
    told = document("--baseline", "peak.json")
    assert told["passes"] is False
    assert (told["baseline"]["verdict"], told["baseline"]["growth_bytes"]) == ("grew", 4096)
    assert told["baseline"]["modules"] == [
        {
            "name": next(iter(found["modules"])),
            "before_bytes": next(iter(found["modules"].values())),
            "after_bytes": next(iter(found["modules"].values())) + 4096,
        }
    ]
    assert check("--baseline", "peak.json", "--tolerance", "4096B").exit_code == 0


def test_a_peak_that_fell_passes_with_a_hint() -> None:
    shrink(written(), -4096)
    result = check("--baseline", "peak.json")
    assert result.exit_code == 0
    assert "the predicted peak fell" in result.stdout
    assert "write a new one with --write-baseline" in result.stdout
    assert document("--baseline", "peak.json")["passes"] is True


def test_a_limit_and_a_baseline_can_be_checked_at_once() -> None:
    written()
    result = check("--baseline", "peak.json", "--max-peak", "1B")
    assert result.exit_code == 1
    assert "too much" in result.stdout
    assert "the predicted peak held" in result.stdout


def test_json_is_all_of_stdout() -> None:
    result = check("--baseline", "peak.json", "--write-baseline", "--json")
    told = json.loads(result.stdout)
    assert (told["written"], told["baseline"], told["passes"]) == ("peak.json", None, True)


# Refusals -------------------------------------------------------------------------------------------------


def test_a_baseline_that_is_not_there_is_a_bad_request() -> None:
    result = check("--baseline", "peak.json")
    assert result.exit_code == 2
    assert "there is no baseline 'peak.json' yet. Write it with --write-baseline" in result.stderr
    assert "building" not in result.stderr  # before any work


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--batch", "8"], "the baseline is of another step: sizes none instead of batch 8"),
        (["--optimizer", "adam"], "optimizer none instead of adam"),
        (["--device", "cpu"], "device cuda:0 instead of cpu"),
    ],
)
def test_another_step_is_a_bad_request(asked: list[str], told: str) -> None:
    written()
    result = check("--baseline", "peak.json", *asked)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([], "there is nothing to check against: give --max-peak or --baseline"),
        (
            ["--max-peak", "1GiB", "--write-baseline"],
            "--write-baseline writes the file that --baseline names",
        ),
        (["--baseline", "no/peak.json", "--write-baseline"], "there is no directory 'no'"),
        (["--max-peak", "1GiB", "--tolerance", "much"], "cannot read 'much' as a tolerance"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(asked: list[str], told: str) -> None:
    result = check(*asked)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "building" not in result.stderr


def test_a_foreign_file_is_a_bad_request() -> None:
    Path("peak.json").write_text('{"name": "package"}')
    result = check("--baseline", "peak.json")
    assert result.exit_code == 2
    assert "cannot read 'peak.json': it is not a lowtide baseline file" in result.stderr


# Progress -------------------------------------------------------------------------------------------------


def test_every_way_to_show_progress_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal, to rich
    with click.Context(click.Command("any")) as ctx:
        switch_progress(ctx, False)
        with progress_bar("profiling") as bar:
            assert bar is None
        with waiting("tracing"), stages() as stage:
            stage.begin("capturing")
        assert capsys.readouterr().err == ""
        switch_progress(ctx, True)
        with progress_bar("profiling") as bar:
            assert bar is not None
        with stages() as stage:
            stage.begin("capturing")
    assert "capturing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["check", "mine.py:four", "--max-peak", "1GiB"], "running the step on fake tensors"),
        (["fit", "mine.py:four"], "running the step on fake tensors"),
        (["compare", "mine.py:four", "--method", "chen-sqrt"], "running the step on fake tensors"),
        (["plan", "mine.py:four", "--method", "rotor"], "planning layer by layer"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_tells_what_it_does_unless_it_is_told_not_to(
    monkeypatch: pytest.MonkeyPatch, command: list[str], told: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    more = ["--device", "cuda", "--no-profile"]
    loud = CliRunner().invoke(main, [*command, *more])
    quiet = CliRunner().invoke(main, ["--no-progress", *command, *more])
    assert loud.exit_code == quiet.exit_code == 0
    assert told in loud.stderr
    assert quiet.stderr.strip() == "building"
    assert told not in loud.stdout
