"""The commands about plans: plan, compare and solvers. Answers, files, a clean stdout, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import lowtide
from lowtide.aot import codegen
from lowtide.chain.cuts import Granularity
from lowtide.cli import main
from lowtide.cli.options import GRANULARITIES
from lowtide.solvers import methods, schedulers

# Four layers of linear and tanh; planner/test_compare.py adds up these peaks.
USER_FILE = """
import torch
from torch import nn

def four(batch=64):
    print("building")
    with torch.device("meta"):
        parts = [part for _ in range(4) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())]
        return nn.Sequential(*parts), (torch.ones(batch, 16),), torch.sum
"""
KEEP_ALL, LEAST = 34816, 31744
PROMISED = 31979  # on CUDA a budget leaves a hundredth of what is not resident to the allocator


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's file in it, and nothing else."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"mine.py", "out.json", "out.svg", "out.png"}, "something was written unasked"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def plan(*arguments: str) -> Result:
    return run("plan", "mine.py:four", "--device", "cuda", "--no-profile", *arguments)


def compare(*arguments: str) -> Result:
    return run("compare", "mine.py:four", "--device", "cuda", "--no-profile", *arguments)


# plan ------------------------------------------------------------------------------------------------

PLANNED = """\
mine.py:four, batch 64, on cuda:0
plain peak    34,816 B
planned peak  31,744 B  in a dry run of the model under the plan
saved          3,072 B  8.8 %
extra time     unknown  4 ops run again
budget        32,000 B  256 B to spare
lower bound   31,744 B  no plan for these layers peaks lower
status         optimal  minimising time within the budget; proven always, among plans of one level
method                  hong-quadratic, in"""
LAYERS = """\
plan       layers  modules                        plain B  planned B
recompute     1–2  0 … 3                            8,192          0
keep          3–4  4 … 7                            4,096      8,192
in all          4  held when the backward begins   12,288      8,192
"""


def test_plan_prints_what_it_saves_what_it_costs_and_what_is_recomputed() -> None:
    result = plan("--batch", "64", "--method", "hong-quadratic", "--budget", "32000")
    assert result.exit_code == 0
    summary, layers = result.stdout.split("\n\n")
    assert "\n".join(line.rstrip() for line in summary.splitlines()).startswith(PLANNED)
    table, notes = layers.split("note: ", maxsplit=1)
    assert table == LAYERS
    assert notes.startswith("not profiled: ")
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_default_method_is_auto_within_a_budget_and_hong_linear_without() -> None:
    assert json.loads(plan("--json").stdout)["method"] == "hong-linear"
    assert json.loads(plan("--json", "--budget", "95%").stdout)["method"] == "auto"


def test_plan_as_json_is_one_document_and_the_users_prints_go_to_stderr() -> None:
    result = plan("--json", "--budget", "95%", "--optimizer", "sgd", "--method", "rotor")
    assert (result.exit_code, result.stderr) == (0, "building\n")
    document = json.loads(result.stdout)
    assert document["predicted_peak_bytes"] <= document["budget_bytes"]
    assert document["saved_bytes"] == document["plain_peak_bytes"] - document["predicted_peak_bytes"]
    assert document["budget_bytes"] == int(0.95 * document["plain_peak_bytes"])
    assert (document["optimizer"], document["layers"], document["plan"]) == ("sgd", 4, "[1-2]")
    assert [(part["first"], part["last"], part["again"]) for part in document["stretches"]] == [
        (1, 2, 1),
        (3, 4, 0),
    ]
    assert document["extra_seconds"] is document["extra_seconds_ratio"] is None  # not profiled
    assert len(document["notes"]) == 2


def test_a_saved_plan_can_be_loaded_and_applied(folder: Path) -> None:
    result = plan("-o", "out.json", "--plot", "out.png", "--method", "hong-linear")
    assert result.exit_code == 0
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    solution = lowtide.load_solution("out.json")
    assert isinstance(solution, lowtide.Solution)
    assert solution.confirmation is not None
    assert solution.confirmation.peak_bytes == LEAST
    scope: dict[str, object] = {}
    exec(USER_FILE, scope)
    model, example, loss = scope["four"]()  # type: ignore[operator]
    lowtide.apply(model, solution)
    assert lowtide.fit(model, example, loss, device="cuda", profile=False).peak_bytes == LEAST


def test_the_picture_of_a_plan_shows_both_steps_to_one_scale(folder: Path) -> None:
    plan("--plot", "out.svg", "--budget", "95%", "--method", "rotor")
    text = (folder / "out.svg").read_text()
    for words in (
        "mine.py:four, on cuda:0",
        ">plain<",
        ">planned by rotor<",
        "peak 34.0 KiB",
        "peak 31.0 KiB",
    ):
        assert words in text
    assert text.count("budget 32.3 KiB") == 2


def test_a_model_may_be_cut_around_named_modules() -> None:
    document = json.loads(plan("--json", "--module", "3").stdout)
    assert document["layers"] == 3


# compare ---------------------------------------------------------------------------------------------

COMPARED = """\
mine.py:four, batch 64, on cuda:0: 4 layers

method          peak B  ratio  ops again  status   checkpoints
keep-all        34,816  1.000          0  optimal  keep all
hong-quadratic  31,744  0.912          4  optimal  2

lower bound: 31.0 KiB, for any plan of these layers
"""


def test_compare_prints_a_row_a_method() -> None:
    result = compare("--method", "hong-quadratic", "--batch", "64")
    assert result.exit_code == 0
    table, _ = result.stdout.split("note: ", maxsplit=1)
    assert "\n".join(line.rstrip() for line in table.splitlines()) == COMPARED.rstrip()


def test_compare_asks_every_method_and_fits_a_page() -> None:
    result = compare()
    shown = [line.split()[0] for line in result.stdout.splitlines()[3 : 3 + len(methods())]]
    assert shown == list(methods())
    assert max(map(len, result.stdout.splitlines()[:-2])) <= 100


def test_compare_as_json_has_a_row_a_method_and_says_why_there_is_no_plan() -> None:
    result = compare("--json", "--budget", "20000", "--method", "rotor", "--method", "feng-huang")
    assert (result.exit_code, result.stderr) == (0, "building\n")
    document = json.loads(result.stdout)
    assert (document["model"], document["budget_bytes"]) == ("mine.py:four", 20000)
    plain, rotor, feng_huang = document["rows"]
    assert plain["predicted_peak_bytes"] == KEEP_ALL
    assert (plain["status"], plain["checkpoints"], plain["ratio"]) == ("optimal", [], 1.0)
    assert plain["measured_peak_bytes"] is plain["extra_seconds_ratio"] is None
    assert f"the least it reaches is 31.2 KiB ({PROMISED} bytes), needed by 2 … 3" in rotor["problem"]
    assert "feng-huang takes no budget" in feng_huang["problem"]
    assert rotor["predicted_peak_bytes"] is None


def test_rows_without_a_plan_say_why_below_the_table() -> None:
    result = compare("--budget", "20000", "--method", "rotor")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert "rotor          –      –          –  no plan  –" in lines
    assert "keep-all: 14.5 KiB over the budget, for reference" in lines
    assert any(line.startswith("rotor: no plan of rotor fits in 19.5 KiB: the least") for line in lines)
    assert "budget: 19.5 KiB" in lines


def test_compare_measures_a_model_that_is_built_for_real() -> None:
    arguments = ("preresnet8", "--batch", "8", "--device", "cpu", "--no-profile", "--measure")
    result = run("compare", *arguments, "--method", "every-k", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["measured"] is True
    plain, planned = document["rows"]
    assert planned["measured_peak_bytes"] < plain["measured_peak_bytes"]
    assert plain["measured_seconds_ratio"] == 1.0


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_of_a_comparison_names_every_method_and_the_bounds(folder: Path, kind: str) -> None:
    result = compare("--plot", f"out.{kind}", "--budget", "95%")
    assert result.exit_code == 0
    content = (folder / f"out.{kind}").read_bytes()
    if kind == "png":
        assert content.startswith(b"\x89PNG")
        return
    text = content.decode()
    for words in (
        "hong-linear",
        "rotor",
        "keep-all",
        "lower bound 31.0 KiB",
        "budget 32.3 KiB",
        "ops run again",
    ):
        assert words in text


# solvers ---------------------------------------------------------------------------------------------


def test_solvers_lists_every_method_on_a_page() -> None:
    result = run("solvers")
    layers, ops = (section.splitlines() for section in result.stdout.split("\n\n"))
    for lines, title, listed in ((layers, "layer by layer", methods()), (ops, "op by op", schedulers())):
        assert lines[0].startswith(f"{title}  ")
        assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == list(listed)
        assert max(map(len, lines)) <= 100
    text = " ".join(result.stdout.split())
    for method in [*methods().values(), *schedulers().values()]:
        assert method.complexity in text
        assert method.reference in text


def test_solvers_as_json_has_everything_there_is_to_know() -> None:
    document = json.loads(run("solvers", "--json").stdout)
    assert [method["name"] for method in document] == [*methods(), *schedulers()]
    assert [method["plans"] for method in document] == ["layers"] * len(methods()) + ["ops"] * len(
        schedulers()
    )
    assert document[0] == {
        "name": "keep-all",
        "plans": "layers",
        "minimises": "time",
        "complexity": "O(1)",
        "takes_budget": True,
        "proves": "always: nothing is recomputed",
        "reference": "plain training",
    }
    assert {method["name"]: method["proves"] for method in document}["every-k"] is None


def in_a_process(*arguments: str) -> str:
    code = (
        "import sys; from lowtide.cli import main\n"
        f"main({list(arguments)!r}, standalone_mode=False)\n"
        "print(sorted({'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    source = Path(lowtide.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("command", ["plan", "compare", "solvers"])
def test_help_waits_for_nothing(command: str) -> None:
    assert in_a_process(command, "--help") == "[]"


def test_solvers_does_not_wait_for_torch() -> None:
    assert in_a_process("solvers") == "['numpy', 'rich']"


def test_the_granularities_offered_are_the_ones_there_are() -> None:
    assert tuple(Granularity) == GRANULARITIES


# Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "nearest"), [(plan, "rotor or auto"), (compare, "rotor")])
def test_an_unknown_method_is_told_those_that_the_command_takes(command: object, nearest: str) -> None:
    result: Result = command("--method", "roto", "--json")  # type: ignore[operator]
    assert (result.exit_code, result.stdout) == (2, "")
    said = f"error: there is no method called 'roto'. Did you mean {nearest}? There are: keep-all, "
    assert said in result.stderr


@pytest.mark.parametrize("command", [plan, compare])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--granularity", "coarse"], "'--granularity': 'coarse' is not one of 'fine', 'layer', 'block'"),
        (["--module", "nope"], "error: the step calls no module 'nope', or nothing is computed in it."),
        (["--budget", "lots"], "'--budget': cannot read 'lots' as a size. Write a size such as 24GiB"),
        (["--budget", "x%"], "'--budget': cannot read 'x%' as a part of the plain peak. Write 60% or 8GiB"),
        (["--budget", "0%"], "'--budget': cannot read '0%' as a part of the plain peak"),
        (["--plot", "out.pdf"], "'--plot': 'out.pdf' must end in .png or .svg"),
        (["--batch", "0"], "'--batch': it must be a whole number of at least 1"),
    ],
)
def test_a_bad_request_is_refused_in_words_with_exit_code_two(
    command: object, arguments: list[str], said: str
) -> None:
    result: Result = command(*arguments, "--json")  # type: ignore[operator]
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--budget", "20000", "--method", "rotor"],
            "error: no plan of rotor fits in 19.5 KiB: the least it reaches is 31.2 KiB (31979 bytes), "
            "needed by 2 … 3. Raise the budget to at least that, shrink the batch, or cut the model finer.",
        ),
        (["--budget", "95%", "--method", "chen-sqrt"], "error: chen-sqrt takes no budget: it minimises"),
        (["-o", "out.txt"], "'--output': 'out.txt' must end in .json"),
    ],
)
def test_a_plan_that_cannot_be_is_one_message_and_writes_nothing(
    folder: Path, arguments: list[str], said: str
) -> None:
    result = plan("--plot", "out.png", *(arguments if "-o" in arguments else [*arguments, "-o", "out.json"]))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert {path.name for path in folder.iterdir()} == {"mine.py"}


def test_what_plans_ops_is_not_compared_with_what_plans_layers() -> None:
    result = compare("--method", "auto", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: auto plans op by op, and plans of layers are compared. Plan with it:" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_measuring_where_there_is_no_device_is_refused() -> None:
    result = run("compare", "mlp", "--device", "cuda", "--measure")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: cannot measure on 'cuda': this machine has no such device." in result.stderr


# Verified -------------------------------------------------------------------------------------------------


def on_the_cpu(folder: Path, *arguments: str) -> Result:
    (folder / "mine.py").write_text(USER_FILE.replace('torch.device("meta")', 'torch.device("cpu")'))
    return run("plan", "mine.py:four", "--device", "cpu", "--no-profile", "--verify", *arguments)


def test_a_plan_is_verified_on_a_model_that_is_built_for_real(folder: Path) -> None:
    result = on_the_cpu(folder, "--method", "chen-sqrt", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    verified = document["verified"]
    assert verified["to_the_bit"] is verified["plain_fits"] is True
    assert verified["peak_bytes"] <= verified["allowed_bytes"]
    assert any(note.startswith("verified on a real step") for note in document["notes"])


def test_a_plan_that_is_tried_and_wrong_is_one_message_and_not_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quicker: Any = codegen._QUICKER
    monkeypatch.setitem(quicker, torch.ops.aten.tanh.default, torch.sin)
    result = on_the_cpu(folder, "--budget", "min", "-o", "out.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        "error: the plan of auto was tried on a real step, and was not put to use: the loss" in result.stderr
    )
    assert {path.name for path in folder.iterdir()} == {"mine.py"}


def test_a_frontier_is_not_verified() -> None:
    result = plan("--frontier", "--verify")
    assert result.exit_code == 2
    assert "Verify one of them: --budget and --verify." in result.stderr


# Steps that cannot be captured ----------------------------------------------------------------------------


BRANCHING = """
import torch
from torch import nn

class Branching(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = x if x.sum() < -1e9 else layer(x)
        return x

def branching(batch=4096):
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    return Branching(*layers), (torch.zeros(batch, 8),), torch.sum
"""


def test_what_cannot_be_captured_is_planned_by_layers_and_a_note_says_why() -> None:
    Path("mine.py").write_text(BRANCHING)
    asked = ["plan", "mine.py:branching", "--budget", "70%", "--device", "cpu", "--no-profile", "--json"]
    result = run(*asked)
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["method"] == "rotor"
    assert document["predicted_peak_bytes"] <= document["budget_bytes"]
    assert "layer by layer" in document["notes"][0]
    assert "x.sum() < -1e9" in document["notes"][0]
    refused = run(*asked, "--method", "ops")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "x.sum() < -1e9" in refused.stderr


# Slices ----------------------------------------------------------------------------------------------

HEAD_FILE = """
import torch
from tests.helpers.heads import Head, batch

def head():
    with torch.device("meta"):
        return Head(), batch()
"""


def sliced(folder: Path, *arguments: str) -> Result:
    (folder / "mine.py").write_text(HEAD_FILE)
    command = ("plan", "mine.py:head", "--device", "cpu", "--no-profile", "--effort", "quick")
    return run(*command, "--tiles", *arguments)


def test_plan_with_tiles_tells_what_runs_in_slices(folder: Path) -> None:
    document = json.loads(sliced(folder, "--budget", "min", "--json", "-o", "out.json").stdout)
    (family,) = (family for family in document["tiles"] if family["regions"] == ["head"])
    assert (family["extent"], family["spared_bytes"], family["extra_seconds"]) == (128, 512000, None)
    assert document["predicted_peak_bytes"] < 512000
    solution = lowtide.load_solution("out.json")
    assert isinstance(solution, lowtide.GraphSolution)
    assert solution.graph.tiled is not None
    text = sliced(folder, "--budget", "min").stdout
    assert "in slices" in text
    assert "region" in text


def test_plan_without_tiles_has_none() -> None:
    assert json.loads(plan("--json", "--budget", "95%").stdout)["tiles"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "rotor", "--budget", "90%"), "tiles are for methods that plan op by op (auto)"),
        ((), "tiles are for methods that plan op by op (auto)"),  # without a budget layers are planned
        (("--frontier",), "Slice it for a budget: --budget and --tiles."),
    ],
)
def test_tiles_are_for_one_plan_op_by_op(arguments: tuple[str, ...], message: str) -> None:
    result = plan("--tiles", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


# Cards ------------------------------------------------------------------------------------------------


def test_a_plan_for_a_card_tells_what_is_taken_of_it() -> None:
    result = run(
        "plan", "mine.py:four", "--card", "1GiB", "--reserve", "64MiB", "--json"
    )  # on CUDA, unless told
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    taken = document["card"]
    assert (taken["memory_bytes"], taken["reserve_bytes"], taken["fits"]) == (1 << 30, 64 << 20, True)
    assert taken["taken_bytes"] == taken["reserved_bytes"] + taken["context_bytes"] + (64 << 20)
    assert document["budget_bytes"] == (1 << 30) - (64 << 20) - taken["context_bytes"]
    assert any(
        note.startswith("on a card of 1.00 GiB, 64.0 MiB of it held by others") for note in document["notes"]
    )


def test_fit_says_whether_a_card_holds_a_training() -> None:
    result = run("fit", "mine.py:four", "--card", "rtx 4090", "--optimizer", "adamw")
    assert result.exit_code == 0, result.stderr
    assert "taken from the card" in result.stdout
    assert "CUDA context and libraries" in result.stdout
    assert "to spare (a card of 23.61 GiB (rtx4090))" in result.stdout
    tight = run("fit", "mine.py:four", "--card", "694MiB")
    assert tight.exit_code == 1
    assert "out of memory in loading the model" in tight.stdout


@pytest.mark.parametrize("command", ["fit", "plan"])
def test_a_card_and_a_budget_do_not_go_together(command: str) -> None:
    result = run(command, "mine.py:four", "--card", "8GiB", "--budget", "8GiB")
    assert result.exit_code == 2
    assert "--budget is for a peak, --card for all that is taken; give one of them." in result.stderr
    unknown = run(command, "mine.py:four", "--card", "rtx4095")
    assert unknown.exit_code == 2
    assert "there is no card called 'rtx4095'. Did you mean rtx4090" in unknown.stderr
