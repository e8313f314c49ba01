"""`lowtide worst`: the table, JSON, files of lengths, exit codes, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lowtide.cli import main

USER_FILE = """
import torch
from torch import nn

class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        x = self.layer(x)
        return (x @ x.transpose(1, 2)).tanh().sum()

def scores(tokens, batch=1):
    with torch.device("meta"):
        return Scores(), (torch.ones(batch, tokens, 4),)

def fixed():
    return nn.Linear(16, 1), (torch.ones(4, 16),), torch.sum
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def worst(*arguments: str, model: str = "mine.py:scores") -> Result:
    return CliRunner().invoke(main, ["worst", model, "--no-profile", "--device", "cpu", *arguments])


def peak_of(length: int, batch: int = 2) -> int:
    arguments = ["fit", "mine.py:scores", "--no-profile", "--device", "cpu", "--json"]
    result = CliRunner().invoke(main, [*arguments, "--tokens", str(length), "--batch", str(batch)])
    found: int = json.loads(result.output)["peak_bytes"]
    return found


def test_every_length_is_what_fit_says_of_it() -> None:
    result = worst("--lengths", "8,16,24,30,32", "--batch", "2", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    peaks = {row["length"]: row["predicted_peak_bytes"] for row in document["lengths"]}
    assert peaks == {length: peak_of(length) for length in (8, 16, 24, 30, 32)}
    assert document["worst"]["length"] == 32
    assert document["scaled"]
    assert document["sizes"] == {"batch": 2}


def test_what_does_not_fit_is_exit_code_one() -> None:
    result = worst("--lengths", "8,32", "--batch", "2", "--memory", str(peak_of(32) - 1))
    assert result.exit_code == 1
    assert "do not fit in" in result.output
    assert "length 32, 1 of 2 samples (50.0 %)" in result.output
    assert worst("--lengths", "8,32", "--batch", "2", "--memory", str(peak_of(32))).exit_code == 0


def test_shapes_say_how_many_samples_of_each_fit() -> None:
    result = worst("--lengths", "8,9,32", "--memory", "64KiB", "--shapes", "2")
    assert result.exit_code == 0, result.output
    assert "2 classes within 64.0 KiB" in result.output
    document = json.loads(worst("--lengths", "8,9,32", "--memory", "64KiB", "--shapes", "2", "--json").output)
    assert [row["length"] for row in document["classes"]["classes"]] == [9, 32]
    for row in document["classes"]["classes"]:
        plain = row["batches"]["plain"]["batch"]
        assert peak_of(row["length"], plain) <= 64 << 10 < peak_of(row["length"], plain + 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [("lengths.json", "[8, 8, 16]"), ("lengths.json", '{"8": 2, "16": 1}'), ("lengths.txt", "8\n16\n8\n")],
)
def test_lengths_are_read_from_files(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    result = worst("--lengths-file", name, "--json")
    assert result.exit_code == 0, result.output
    assert [(row["length"], row["samples"]) for row in json.loads(result.output)["lengths"]] == [
        (8, 2),
        (16, 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say which lengths come"),
        (("--lengths", "8", "--lengths-file", "mine.py"), "say which lengths come"),
        (("--lengths", "8,x"), "cannot read 'x' as a length"),
        (("--lengths", "8,-3"), "cannot read '-3' as a length"),
        (("--lengths", "0"), "a length of 0 leaves nothing to train on"),
        (("--lengths-file", "mine.py"), "cannot read 'import' as a length"),
        (("--lengths-file", "bad.json"), "it is no JSON"),
        (("--lengths-file", "word.json"), "it has neither a list of lengths nor an object"),
        (("--lengths", "8", "--tokens", "8"), "--tokens is what --lengths say"),
        (("--lengths", "8", "--card", "8GiB", "--memory", "8GiB"), "give one of them"),
        (("--lengths", "8", "--shapes", "2"), "give --memory or --card"),
    ],
)
def test_bad_requests_are_exit_code_two(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    (folder / "bad.json").write_text("[8,")
    (folder / "word.json").write_text('"8"')
    result = worst(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_model_without_tokens_is_refused() -> None:
    result = worst("--lengths", "8", model="mine.py:fixed")
    assert result.exit_code == 2
    assert "tokens" in result.output
