"""The command line: answers, exit codes, a clean stdout, and every bad request with its message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lowtide
from lowtide.cli import main
from lowtide.cli.options import OPTIMIZERS
from lowtide.text.progress import progress_bar

SOURCE = Path(lowtide.__file__).parent.parent
USER_FILE = """
import torch
from torch import nn

def mlp(batch=16):
    print("building")
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    return model, (torch.ones(batch, 4),), torch.sum

def raising():
    raise ValueError("not today")

def pointless():
    return nn.Linear(3, 2)

class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        scores = self.inner(x)
        return scores.repeat_interleave(scores.exp().sum(1).long(), 0).sum()

def choosy():
    return Choosy(), (torch.ones(2, 3),)

def mismatched():
    return nn.Linear(3, 2), (torch.ones(2, 5),), torch.sum
"""
PEAK = 2184  # planner/test_fit.py adds it up


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's file in it, and nothing else."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"mine.py", "out.json", "out.svg", "out.png"}, "something was written unasked"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def fit(*arguments: str) -> Result:
    return run("fit", "--device", "cpu", *arguments, "--no-profile")  # whatever this machine has


def as_a_process(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowtide", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# Answers ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_fit_prints_the_peak_its_parts_and_its_op() -> None:
    result = fit("mine.py:mlp", "--batch", "16")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "mine.py:mlp, batch 16, on cpu"
    assert lines[1] == "predicted peak: 2.1 KiB, in the backward at 1: aten.threshold_backward"
    totals = [line.split()[1:] for line in lines if line.startswith("total")]
    assert totals == [["2,184", "100.0", "%"]] * 2
    assert any(line.startswith("note: workspaces are not included") for line in lines)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("budget", "code", "answer"),
    [
        (f"{PEAK}", 0, "fits: 0 B to spare (budget 2.1 KiB)"),
        (f"{PEAK - 1}", 1, "does not fit: 1 B too much (budget 2.1 KiB)"),
        ("24GiB", 0, "fits: 24.00 GiB to spare (budget 24.00 GiB)"),
        ("1 KB", 1, "does not fit: 1.2 KiB too much (budget 1000 B)"),
    ],
)
def test_a_budget_is_answered_with_its_margin_and_the_exit_code(budget: str, code: int, answer: str) -> None:
    result = fit("mine.py:mlp", "--budget", budget)
    assert result.exit_code == code
    assert answer in result.stdout.splitlines()


@pytest.mark.usefixtures("folder")
def test_json_is_one_document_with_everything_in_it() -> None:
    result = fit("mine.py:mlp", "--batch", "16", "--optimizer", "adam", "--budget", "2KiB", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert sum(document["categories"].values()) == document["peak_bytes"] == PEAK + 392
    assert sum(document["modules"].values()) == document["peak_bytes"]
    assert document["margin_bytes"] == 2048 - document["peak_bytes"]
    told = ("model", "batch", "sizes", "device", "optimizer", "budget_bytes", "fits", "profiled")
    assert {key: document[key] for key in told} == {
        "model": "mine.py:mlp",
        "batch": 16,
        "sizes": {"batch": 16},
        "device": "cpu",
        "optimizer": "adam",
        "budget_bytes": 2048,
        "fits": False,
        "profiled": False,
    }
    assert {"resident_bytes", "peak_op", "predicted_on", "notes"} < set(document)


@pytest.mark.usefixtures("folder")
def test_what_the_users_code_prints_goes_to_stderr() -> None:
    result = fit("mine.py:mlp", "--json")
    json.loads(result.stdout)
    assert result.stderr == "building\n"


@pytest.mark.usefixtures("folder")
def test_a_size_without_effect_is_noted_in_text_and_json() -> None:
    said = "mine.py:mlp takes no tokens, so what was asked for had no effect"
    assert f"note: {said}" in fit("mine.py:mlp", "--tokens", "9").stdout.splitlines()
    document = json.loads(fit("mine.py:mlp", "--tokens", "9", "--json").stdout)
    assert document["notes"][-1] == said
    assert (document["batch"], document["sizes"]) == (None, {})


def test_sizes_reach_the_zoo() -> None:
    sizes = ("--layers", "1", "--width", "8", "--heads", "2", "--vocab", "11", "--tokens", "4")
    document = json.loads(fit("gpt", *sizes, "--batch", "3", "--json").stdout)
    assert document["sizes"] == {"batch": 3, "tokens": 4, "layers": 1, "width": 8, "heads": 2, "vocab": 11}
    document = json.loads(fit("vgg11", "--image", "32", "--classes", "3", "--json").stdout)
    assert (document["batch"], document["sizes"]) == (1, {"batch": 1, "image": 32, "classes": 3})


def test_cuda_is_predicted_where_there_is_none() -> None:
    document = json.loads(fit("mlp", "--device", "cuda", "--json").stdout)
    assert document["device"] == "cuda:0"
    assert all(count % 512 == 0 for count in document["categories"].values())
    assert document["reserved_bytes"] >= document["peak_bytes"]
    assert document["context_bytes"] > 100 << 20


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_plot_and_output_write_a_picture_and_a_graph(folder: Path, kind: str) -> None:
    result = fit("mine.py:mlp", "--plot", f"out.{kind}", "-o", "out.json", "--budget", "3KiB")
    assert result.exit_code == 0
    start = (folder / f"out.{kind}").read_bytes()[:5]
    assert start == (b"\x89PNG\r" if kind == "png" else b"<?xml")
    graph, schedule = lowtide.load_graph("out.json")
    assert graph.name == "mine.py:mlp"
    assert schedule is not None
    assert lowtide.simulate(graph, schedule).peak_bytes == PEAK


def test_the_picture_says_what_was_asked(folder: Path) -> None:
    fit("mine.py:mlp", "--plot", "out.svg", "--batch", "16", "--optimizer", "sgd", "--budget", "3KiB")
    text = (folder / "out.svg").read_text()
    assert "mine.py:mlp, batch 16, sgd, on cpu" in text
    assert "budget 3.0 KiB" in text
    assert ">optimizer<" in text


def test_the_zoo_is_listed_with_usual_sizes() -> None:
    lines = run("zoo").stdout.splitlines()
    assert "vgg19         image 224, classes 1000" in lines
    assert "gpt           tokens 1024, layers 12, width 768, heads 12, vocab 50257" in lines
    document = json.loads(run("zoo", "--json").stdout)
    assert document["unet"] == {"image": 128, "classes": 2, "width": 64}
    assert list(document) == sorted(document)


def test_the_optimizers_offered_are_the_ones_there_are() -> None:
    from lowtide.trace.step import OPTIMIZERS as KNOWN

    assert tuple(KNOWN) == OPTIMIZERS


# As a process of its own -----------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["fit", "--help"], ["zoo", "-h"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from lowtide.cli import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'rich', 'matplotlib', 'transformers'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"
    assert "Usage: " in result.stdout or lowtide.__version__ in result.stdout


def test_a_profiled_answer_leaves_stdout_to_json_and_stderr_to_the_user(
    folder: Path, tmp_path_factory: Any
) -> None:
    home = tmp_path_factory.mktemp("home")  # where costs are kept
    result = as_a_process("fit", "mine.py:mlp", "--device=cpu", "--json", "--budget=1KiB", home=home)
    assert result.returncode == 1
    assert json.loads(result.stdout)["profiled"] is True
    assert result.stderr == "building\n"


def test_piped_output_is_plain_text_that_fits_a_page(folder: Path, tmp_path_factory: Any) -> None:
    home = tmp_path_factory.mktemp("home")
    result = as_a_process("fit", "mine.py:mlp", "--device=cpu", "--no-profile", home=home, COLUMNS="20")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert "predicted peak: 2.1 KiB, in the backward at 1: aten.threshold_backward\n" in result.stdout


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("vgg91", "error: there is no model called 'vgg91'. Did you mean vgg"),
        ("mine.py:mismatched", "error: the training step raised an error.\nTraceback (your frames only):\n"),
    ],
)
def test_a_bad_request_is_one_message_and_nothing_else(model: str, said: str, tmp_path_factory: Any) -> None:
    result = as_a_process("fit", model, "--json", home=tmp_path_factory.mktemp("home"))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(said)
    assert "site-packages" not in result.stderr


# Refusals --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vgg91"], "error: there is no model called 'vgg91'. Did you mean vgg19"),
        (["vgg19", "--tokens", "3"], "error: vgg19 has no tokens: the sizes that apply are batch, image"),
        (["mine.py:absent"], "error: 'mine.py' has no function 'absent'. It has mlp, raising"),
        (["absent.py:mlp"], "error: there is no file 'absent.py'"),
        (["mine.py:raising"], "error: mine.py:raising raised an error.\nTraceback (your frames only):"),
        (["mine.py:pointless"], "error: mine.py:pointless returned a Linear. Expected (model, example)"),
        (["mine.py:choosy"], "in forward: `return scores.repeat_interleave("),
        (["mine.py:mismatched"], "error: the training step raised an error."),
        (["vgg19", "--batch", "0"], "'--batch': it must be a whole number of at least 1, not '0'"),
        (["vgg19", "--batch", "-3"], "'--batch': it must be a whole number of at least 1, not '-3'"),
        (["vgg19", "--batch", "many"], "'--batch': it must be a whole number of at least 1, not 'many'"),
        (["vgg19", "--batch", "1e3"], "'--batch': it must be a whole number"),
        (["vgg19", "--batch", "²"], "'--batch': it must be a whole number"),
        (["vgg19", "--batch", "9" * 5000], "'--batch': it must be a whole number"),
        (["vgg19", "--image", "1.5"], "'--image': it must be a whole number"),
        (
            ["vgg19", "--budget", "lots"],
            "'--budget': cannot read 'lots' as a size. Write a size such as 24GiB",
        ),
        (["vgg19", "--budget", "0"], "'--budget': a size of '0' leaves room for nothing"),
        (["vgg19", "--device", "tpu"], "'--device': 'tpu' is not one of 'cpu', 'cuda'"),
        (["vgg19", "--optimizer", "lion"], "'--optimizer': 'lion' is not one of 'sgd', 'momentum'"),
        (["vgg19", "--plot", "out.pdf"], "'--plot': 'out.pdf' must end in .png or .svg"),
        (
            ["vgg19", "--plot", "absent/out.png"],
            "'--plot': there is no directory 'absent' to write 'out.png'",
        ),
        (["vgg19", "-o", "out.txt"], "'--output': 'out.txt' must end in .json"),
        (["vgg19", "-o", "absent/out.json"], "'--output': there is no directory 'absent'"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_a_bad_request_is_refused_in_words_with_exit_code_two(arguments: list[str], said: str) -> None:
    result = fit(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("model", ["vgg91", "mine.py:raising", "mine.py:mismatched"])
def test_nothing_is_written_when_anything_fails(folder: Path, model: str) -> None:
    result = fit(model, "--plot", "out.png", "-o", "out.json")
    assert result.exit_code == 2
    assert {path.name for path in folder.iterdir()} == {"mine.py"}


def test_what_cannot_be_written_is_refused_before_the_work(folder: Path) -> None:
    (folder / "out.png").mkdir()
    result = fit("no such model", "--plot", "out.png")
    assert result.exit_code == 2
    assert "'--plot': 'out.png' cannot be written" in result.stderr


@pytest.mark.usefixtures("folder")
def test_a_picture_without_matplotlib_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = fit("no such model", "--plot", "out.png")
    assert result.exit_code == 2
    assert "error: drawing a timeline needs matplotlib: pip install 'lowtide[plot]'" in result.stderr


def test_an_unknown_command_is_a_bad_request() -> None:
    result = run("fitt")
    assert result.exit_code == 2
    assert "No such command 'fitt'" in result.stderr


@pytest.mark.usefixtures("folder")
def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.trace.graph_builder.GraphBuilder.finish", lambda self: None)
    result = fit("mine.py:mlp")
    assert isinstance(result.exception, TypeError)


@pytest.mark.usefixtures("folder")
def test_an_interrupt_is_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowtide.zoo.sources.specs.load", interrupted)
    result = fit("mine.py:mlp")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


# Progress --------------------------------------------------------------------------------------------


def test_there_is_no_progress_bar_where_nobody_would_see_it() -> None:
    with progress_bar("profiling") as progress:
        assert progress is None


def test_a_progress_bar_appears_on_a_terminal_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal, to rich
    with progress_bar("profiling") as progress:
        assert progress is not None
        progress(1, 4)
    assert "profiling" not in capsys.readouterr().err
    monkeypatch.setattr("lowtide.text.progress._PATIENCE_SECONDS", -1.0)
    with progress_bar("profiling") as progress:
        assert progress is not None
        progress(3, 4)
    captured = capsys.readouterr()
    assert "profiling" in captured.err
    assert "3/4" in captured.err
    assert captured.out == ""
    progress(4, 4)  # by someone who has not heard that it is over
    assert capsys.readouterr().err == ""
