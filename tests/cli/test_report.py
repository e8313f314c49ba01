"""`lowtide report`: a page or an export from a model or a saved plan, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lowtide
from lowtide.cli import main
from lowtide.report import page as pages
from tests.helpers.reported import embedded_in, small

# Four layers of linear and tanh, as in test_plan.py.
USER_FILE = """
import torch
from torch import nn

def four(batch=64):
    print("building")
    parts = [part for _ in range(4) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())]
    return nn.Sequential(*parts), (torch.ones(batch, 16),), torch.sum
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's file in it; nothing but what is asked for may be left there."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left <= {"mine.py", "plan.json", "out.html", "out.pickle", "out.json", "locked"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def report(*arguments: str) -> Result:
    return run("report", "mine.py:four", "--device", "cpu", "--no-profile", *arguments)


def refused(*arguments: str) -> str:
    result = run("report", *arguments)
    assert result.exit_code == 2
    assert not list(Path().glob("out.*")), "something was written"
    return " ".join(result.stderr.split())


# Pages --------------------------------------------------------------------------------------------------


def test_a_model_is_planned_op_by_op_within_a_budget_measured_and_shown() -> None:
    result = report("--budget", "95%", "--points", "3", "--measure", "-o", "out.html")
    assert (result.exit_code, result.stdout) == (0, "wrote out.html\n")
    html = Path("out.html").read_text(encoding="utf-8")
    data = embedded_in(html)
    assert "mine.py:four, on cpu" in html
    assert f"lowtide {lowtide.__version__}, torch" in html
    plain, planned = data["curves"]
    assert planned["name"] == "planned by auto"
    assert planned["peak"] <= data["budget"] < plain["peak"]
    assert 2 <= len(data["frontier"]["points"]) <= 3
    assert data["arena"]["bytes"] >= data["arena"]["lowerBound"] > 0
    assert [found["name"] for found in data["measured"]] == ["plain", "planned by auto"]
    assert max(data["measured"][1]["bytes"]) == pytest.approx(planned["peak"], rel=0.02)


def test_a_plan_of_layers_is_shown_with_dry_runs_and_measured_steps() -> None:
    result = report("--method", "rotor", "--measure", "--optimizer", "sgd", "-o", "out.html")
    assert result.exit_code == 0, result.stderr
    html = Path("out.html").read_text(encoding="utf-8")
    data = embedded_in(html)
    assert data["frontier"] is None
    assert "a frontier is planned op by op" in html
    assert data["arena"]["bytes"] > 0  # the dry run has ops
    assert {data["phases"][phase] for phase in data["curves"][1]["ops"]["phase"]} >= {
        "recompute",
        "optimizer",
    }
    assert [found["name"] for found in data["measured"]] == ["plain", "planned by rotor"]
    for curve, found in zip(data["curves"], data["measured"], strict=True):
        assert found["predicted"] == curve["peak"]
        assert max(found["bytes"]) == pytest.approx(curve["peak"], rel=0.01)
    assert html.count("measured, ") == 2


def test_a_saved_plan_of_ops_is_shown_as_it_was_saved() -> None:
    lowtide.save_solution(small(), "plan.json")
    assert run("report", "--from", "plan.json", "-o", "out.html").exit_code == 0
    html = Path("out.html").read_text(encoding="utf-8")
    data = embedded_in(html)
    assert (data["curves"][1]["peak"], data["budget"]) == (1911, 2000)
    assert data["frontier"]["chosen"]["peak"] == 1911
    assert "from plan.json" in html


def test_a_saved_plan_of_layers_shows_its_chain_and_says_what_it_has_not() -> None:
    assert run("plan", "mine.py:four", "--device", "cpu", "--no-profile", "-o", "plan.json").exit_code == 0
    assert run("report", "--from", "plan.json", "-o", "out.html").exit_code == 0
    html = Path("out.html").read_text(encoding="utf-8")
    data = embedded_in(html)
    saved: Any = lowtide.load_solution("plan.json")
    assert data["curves"][1]["peak"] == saved.timeline.peak_bytes
    assert len(data["strip"]["name"]) == len(saved.chain)
    assert data["arena"] is data["frontier"] is None
    assert "holds layers, not ops" in html


def test_no_frontier_leaves_the_frontier_out() -> None:
    lowtide.save_solution(small(), "plan.json")
    assert run("report", "--from", "plan.json", "--no-frontier", "-o", "out.html").exit_code == 0
    html = Path("out.html").read_text(encoding="utf-8")
    assert embedded_in(html)["frontier"] is None
    assert "No frontier was asked for." in html


def test_a_report_on_a_plan_with_tiles_shows_them() -> None:
    Path("mine.py").write_text(
        "from tests.helpers.heads import Head, batch\n\ndef head():\n    return Head(), batch()\n"
    )
    asked = ("mine.py:head", "--device", "cpu", "--no-profile", "--budget", "min", "--no-frontier")
    assert run("report", *asked, "--tiles", "-o", "out.html").exit_code == 0
    sliced = embedded_in(Path("out.html").read_text(encoding="utf-8"))
    assert "head" in [sliced["words"][name] for name in sliced["curves"][1]["slices"]["name"]]
    assert sliced["curves"][0]["slices"] == {}
    assert run("report", *asked, "-o", "out.html").exit_code == 0
    whole = embedded_in(Path("out.html").read_text(encoding="utf-8"))
    assert whole["curves"][1]["slices"] == {}
    assert sliced["curves"][1]["peak"] < whole["curves"][1]["peak"] / 2


def test_tiles_are_no_question_to_a_saved_plan() -> None:
    lowtide.save_solution(small(), "plan.json")
    result = run("report", "--from", "plan.json", "--tiles", "-o", "out.html")
    assert result.exit_code == 2
    assert "leave --tiles out" in " ".join(result.stderr.replace("│", " ").split())


# Exports ------------------------------------------------------------------------------------------------


def test_a_snapshot_of_the_plan_is_written_without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    lowtide.save_solution(small(), "plan.json")
    result = run("report", "--from", "plan.json", "--format", "snapshot", "-o", "out.pickle")
    assert result.exit_code == 0, result.stderr
    found = pickle.loads(Path("out.pickle").read_bytes())
    assert len(found["segments"]) == 3
    assert found["device_traces"][0]


def test_a_trace_has_both_steps() -> None:
    lowtide.save_solution(small(), "plan.json")
    assert run("report", "-o", "out.json", "--from", "plan.json", "--format", "perfetto").exit_code == 0
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"]
    assert names == ["plain: three layers", "planned by by hand: three layers"]


# Refusals -----------------------------------------------------------------------------------------------


def test_a_report_is_on_a_model_or_on_a_file() -> None:
    assert "a MODEL to plan, or --from a saved plan; not both" in refused("-o", "out.html")
    assert "not both" in refused("vit", "--from", "plan.json", "-o", "out.html")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--batch", "2"), ("--budget", "50%"), ("--accumulate", "2"), ("--granularity", "layer")],
)
def test_a_saved_plan_is_not_planned_again(option: str, value: str) -> None:
    message = refused("--from", "plan.json", option, value, "-o", "out.html")
    assert f"leave {option} out, or give a MODEL" in message


def test_a_saved_plan_is_not_measured() -> None:
    assert "leave --measure out" in refused("--from", "plan.json", "--measure", "-o", "out.html")


def test_the_file_ends_as_its_format_does_and_can_be_written(folder: Path) -> None:
    assert "must end in .html" in refused("vit", "-o", "out.pdf")
    assert "must end in .pickle" in refused("vit", "-o", "out.html", "--format", "snapshot")
    assert "there is no directory" in refused("vit", "-o", "nowhere/out.html")
    assert "Missing option '-o'" in refused("vit")
    (folder / "locked").mkdir()
    assert "must end in .html" in refused("vit", "-o", "locked")


def test_a_damaged_plan_is_refused_and_an_old_page_stays(folder: Path) -> None:
    (folder / "plan.json").write_text('{"lowtide": "plan", "schema": 1, "sched')
    assert "damaged or cut off" in refused("--from", "plan.json", "-o", "out.html")
    assert "No such file" in refused("--from", "none.json", "-o", "out.html")
    (folder / "out.html").write_text("old")
    assert run("report", "--from", "plan.json", "-o", "out.html").exit_code == 2
    assert (folder / "out.html").read_text() == "old"


COARSE = ["mine.py:four", "--method", "auto", "--budget", "1KiB", "--granularity", "fine", "-o", "out.html"]


def test_what_makes_no_sense_together_is_refused() -> None:
    assert "at least 2" in refused("vit", "--points", "1", "-o", "out.html")
    assert "none with --no-frontier" in refused("vit", "--points", "4", "--no-frontier", "-o", "out.html")
    assert "leave --accumulate out" in refused("vit", "--measure", "--accumulate", "2", "-o", "out.html")
    assert "cuts nothing" in refused(*COARSE)
    assert "no method called 'rotr'" in refused("vit", "--method", "rotr", "-o", "out.html")


def test_measuring_needs_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    message = refused("mine.py:four", "--device", "cuda", "--measure", "-o", "out.html")
    assert "cannot measure on 'cuda': this machine has no such device" in message


def test_without_plotly_a_page_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    assert "pip install 'lowtide[page]'" in refused("no such model", "-o", "out.html")


def test_help_waits_for_no_heavy_library() -> None:
    code = (
        "import sys; from lowtide.cli import main; main(['report', '--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'plotly'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
