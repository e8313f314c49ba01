"""`lowtide compare --peers`: answers, a picture, Ctrl-C, and what does not go together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lowtide.cli import main
from lowtide.planner.peer_ways import PeerRow, PeerTrial, TrainingWay

USER_FILE = """
import torch
from torch import nn

def four(batch=64):
    print("building")
    parts = [part for _ in range(4) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())]
    return nn.Sequential(*parts), (torch.ones(batch, 16),), torch.sum
"""
LABELS = ["eager", "checkpointing", "lowtide, all kept", "lowtide, lowest"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} <= {"mine.py", "out.png", "out.svg"}


def peers(*arguments: str) -> Result:
    given = ["--device", "cpu", "--no-compile", "--no-tiles", "--effort", "quick", *arguments]
    return CliRunner().invoke(main, ["compare", "mine.py:four", "--peers", *given])


def test_it_prints_a_row_a_way_and_draws_them() -> None:
    result = peers("--plot", "out.svg")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "mine.py:four, on cpu"
    assert lines[2].split() == ["way", "to", "train", "peak", "B", "predicted", "a", "step", "of", "eager"]
    assert lines[3].startswith("eager  ")
    assert "lowtide, lowest  " in result.stdout
    assert "building" not in result.stdout
    assert "<svg" in Path("out.svg").read_text(encoding="utf-8")


def test_as_json_it_is_one_document_with_a_row_a_way() -> None:
    result = peers("--json", "--budgets", "90%, 1GiB", "--batch", "32")
    document = json.loads(result.stdout)
    assert (document["model"], document["batch"], document["device"]) == ("mine.py:four", 32, "cpu")
    labels = [row["label"] for row in document["rows"]]
    assert [label for label in LABELS if label not in labels] == []
    assert {"lowtide within 90%", "lowtide within 1GiB"} <= set(labels)
    for row in document["rows"]:
        assert row["peak_bytes"] > 0
        assert row["difference"] is None


def test_ctrl_c_leaves_the_rows_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PeerTrial.row

    def row(trial: PeerTrial, way: TrainingWay) -> PeerRow:
        if way.label == "lowtide, all kept":
            raise KeyboardInterrupt
        return real(trial, way)

    monkeypatch.setattr(PeerTrial, "row", row)
    result = peers("--json")
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert document["interrupted"] is True
    assert [row["label"] for row in document["rows"]] == LABELS[:2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--peers", "--method", "rotor"], "--method compares methods, and --peers ways to train"),
        (["--peers", "--budget", "60%"], "--budget compares methods, and --peers ways to train"),
        (["--peers", "--measure"], "--measure compares methods, and --peers ways to train"),
        (["--budgets", "60%"], "--budgets is for --peers; leave it out"),
        (["--no-compile"], "--no-compile is for --peers; leave it out"),
        (["--peers", "--budgets", "60%,much"], "cannot read 'much' as a size"),
        (["--peers", "--plot", "out.pdf"], "'out.pdf' must end in .png or .svg"),
    ],
)
def test_what_does_not_go_together_is_refused_before_any_work(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(main, ["compare", "mine.py:four", *arguments])
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
    assert "building" not in result.output
