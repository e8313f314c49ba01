"""`lowtide rehearse`: a script as Python runs it, what it would hold on a card, exit codes, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lowtide.cli import main
from lowtide.cost.cuda_rules import CONTEXT_BYTES

TRAIN = """
import sys
from pathlib import Path
import torch
from torch import nn
import beside

assert Path(sys.path[0]) == Path(__file__).resolve().parent
assert sys.modules["__main__"].__dict__ is globals()
print("begun", __name__, sys.argv[1:], beside.NAME)
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    if "--exit" in sys.argv:
        sys.exit(int(sys.argv[-1]))
    if "--message" in sys.argv:
        sys.exit("no such data")
    if "--raise" in sys.argv:
        raise ZeroDivisionError("by the script")
    if "--interrupt" in sys.argv:
        raise KeyboardInterrupt
    if "--large" in sys.argv:
        model(torch.randn(200_000, 64))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with scripts in it."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "beside.py").write_text("NAME = 'a neighbour'")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("beside", None)


def rehearse(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["rehearse", *arguments])


def test_a_script_runs_as_python_runs_it_and_is_told_of_afterwards() -> None:
    before = sys.argv, sys.path, sys.modules["__main__"]
    done = rehearse("train.py", "--lr", "3", "--card", "1GiB", "-x")
    assert done.exit_code == 0, done.output
    printed = done.stdout.splitlines()
    assert printed[0] == "begun __main__ ['--lr', '3', '-x'] a neighbour"
    assert printed[1] == (
        "train.py on a card of 1.00 GiB, 331.0 MiB beside the CUDA context, 4 optimizer steps, "
        "replayed on the CPU"
    )
    parts = [line[:18].split("  ")[0] for line in printed[3:7]]
    assert parts == ["part", "setting up", "first step", "training"]
    assert any(line.startswith("fits: ") and line.endswith("to spare") for line in printed)
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_what_does_not_fit_exits_with_1_and_names_the_line() -> None:
    done = rehearse("train.py", "--card", "770MiB", "--large")
    assert done.exit_code == 1
    assert "would run out of memory in step 2, forward, at aten.addmm" in done.stdout
    assert "train.py:25, in <module>: `model(torch.randn(200_000, 64))`" in done.stdout


def test_json_is_one_document_and_what_the_script_prints_goes_elsewhere() -> None:
    done = rehearse("train.py", "--card", "770MiB", "--large", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert done.stderr.startswith("begun __main__")
    assert found["fits"] is False
    assert found["context_bytes"] == CONTEXT_BYTES
    assert found["allowed_bytes"] == (770 << 20) - CONTEXT_BYTES
    assert [part["part"] for part in found["parts"]] == ["setting up", "first step", "training"]
    assert found["shortfall"]["asked_bytes"] == 200_000 * 64 * 4
    assert found["shortfall"]["doing"] == "forward"
    assert found["failure"] is None


@pytest.mark.parametrize(
    ("option", "code", "told"),
    [
        (("--exit", "3"), 2, "the script exited with 3"),
        (("--exit", "0"), 0, "fits"),
        (("--message",), 2, "the script exited with 1"),
        (("--raise",), 2, "the script raised ZeroDivisionError"),
        (("--interrupt",), 130, "interrupted: what was seen until then"),
    ],
)
def test_however_a_script_ends_what_was_seen_is_told(option: tuple[str, ...], code: int, told: str) -> None:
    done = rehearse("train.py", "--card", "1GiB", *option)
    assert (done.exit_code, told in done.stdout) == (code, True), done.output
    assert "first step" in done.stdout


def test_an_error_of_the_script_is_shown_as_the_scripts_own() -> None:
    shown = rehearse("train.py", "--card", "1GiB", "--raise").stderr
    assert shown.splitlines()[0] == "Traceback (most recent call last):"
    assert 'File "train.py", line 21, in <module>' in shown.splitlines()[1]
    assert shown.rstrip().endswith("ZeroDivisionError: by the script")
    assert "lowtide" not in shown


def test_a_message_to_exit_with_is_printed() -> None:
    assert rehearse("train.py", "--card", "1GiB", "--message").stderr == "no such data\n"


def test_options_that_both_have_are_the_scripts_after_two_hyphens() -> None:
    done = rehearse("--card", "1GiB", "--", "train.py", "--steps", "9", "--json")
    assert done.stdout.splitlines()[0] == "begun __main__ ['--steps', '9', '--json'] a neighbour"


def test_so_many_steps_are_enough() -> None:
    done = rehearse("train.py", "--card", "1GiB", "--steps", "2", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["optimizer_steps"]) == (0, 2)
    assert found["ended"] == "ended after the steps that were asked for"


def test_a_timeline_can_be_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    assert rehearse("train.py", "--card", "1GiB", "--plot", "timeline.svg").exit_code == 0
    drawn = (folder / "timeline.svg").read_text()
    assert all(words in drawn for words in ("train.py", "allowed 331.0 MiB", "workspace", "reserved"))


def test_segments_that_grow_are_replayed_where_pytorch_is_set_to_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert json.loads(rehearse("train.py", "--card", "1GiB", "--json").stdout)["expandable_segments"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.py", "--card", "1GiB"), "error: there is no script 'none.py'."),
        ((".", "--card", "1GiB"), "error: '.' is not a file."),
        (("broken.py", "--card", "1GiB"), "SyntaxError: "),
        (("train.py",), "Missing option '--card'"),
        (("train.py", "--card", "much"), "error: cannot read 'much' as a size"),
        (
            ("train.py", "--card", "600MiB"),
            "the CUDA context alone takes about 693.0 MiB",
        ),
        (("train.py", "--card", "1GiB", "--steps", "0"), "it must be a whole number of at least 1"),
        (("train.py", "--card", "1GiB", "--plot", "a.txt"), "must end in .png or .svg"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_anything_runs(
    folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    (folder / "broken.py").write_text("def f(:\n")
    done = rehearse(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "begun" not in done.output
