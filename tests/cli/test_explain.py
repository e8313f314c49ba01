"""`lowtide explain`: the text, the document, the picture, and refusals."""

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
from lowtide.cli.subjects import is_expression
from lowtide.report.text.tables import made_to_fit
from lowtide.text.table import Table

USER_FILE = """
import torch
from torch import nn

def four(batch=8):
    print("building")
    with torch.device("meta"):
        parts = [part for _ in range(4) for part in (nn.Linear(16, 16, bias=False), nn.Tanh())]
        return nn.Sequential(*parts), (torch.ones(batch, 16),), torch.sum

def any_number(layers=2):
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]), (torch.ones(8, 4),), torch.sum
"""
LECTURE = ("ln(x1) + x1*x2 - sin(x2)", "--at", "x1=2", "--at", "x2=5")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's file in it, and nothing else."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"mine.py", "out.svg", "out.png", "out.pdf"}, "something was written unasked"


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def document(*arguments: str) -> dict[str, Any]:
    result = explain(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# By hand ---------------------------------------------------------------------------------------------

TOLD = """\
exp(a*b+3)

Given
value  shape   bytes
a      number      4  batch
b      number      4  batch

The graph
#  op               shape   bytes
1  v1 = mul(a, b)   number      4
2  v2 = add(v1, 3)  number      4
3  v3 = exp(v2)     number      4  kept for the backward

Extended by the backward
#  op                          shape   bytes  needs of the forward
4  v3.grad = full(1)           number      4  nothing
5  v2.grad = mul(v3.grad, v3)  number      4  v3 (result of exp)
6  a.grad = mul(v2.grad, b)    number      4  b (given)
7  b.grad = mul(v2.grad, a)    number      4  a (given)
kept for the backward: 1 of 3 values, 4 B; not needed by it: v1, v2

The walk: counters, tags, and the box of free tags
turn  op                          tag  how                  counters after              box
   1  v1 = mul(a, b)                0  new                  v1 1                        {}
   2  v2 = add(v1, 3)               0  in place of v1       v1 0, v2 1                  {}
   3  v3 = exp(v2)                  0  in place of v2       v2 0, v3 2                  {}
   4  v3.grad = full(1)             1  new                  v3.grad 1                   {}
   5  v2.grad = mul(v3.grad, v3)    1  in place of v3.grad  v3.grad 0, v3 1, v2.grad 2  {}
   6  a.grad = mul(v2.grad, b)      2  new                  v2.grad 1, a.grad 1         {}
   7  b.grad = mul(v2.grad, a)      1  in place of v2.grad  v2.grad 0, b.grad 1         {}

Who shares with whom
tag   B  values in it, one after the other
  0   4  v1 → v2 → v3
  1   4  v3.grad → v2.grad → b.grad
  2   4  a.grad
     12  in all

Which ops cannot be done in place, and why
#  op            because
1  v1 = mul      its input 'a' is resident
6  a.grad = mul  'v2.grad' is still needed by mul

What it takes
memory        B   less
naive        28  1.00×  every value has memory of its own
in place     12  2.33×  a result is written over an input nobody needs again
sharing      12  2.33×  and free tags are taken again
static       12  2.33×  and tags may be cut: an offset in one arena for each value
lower bound  12  2.33×  live at once at a.grad = mul(v2.grad, b)
of the lower bound: sharing 1.000×, static 1.000×, and no arena is smaller
"""


def test_an_expression_is_told_from_the_graph_to_the_last_byte() -> None:
    result = explain("exp(a*b+3)")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "\n".join(line.rstrip() for line in result.stdout.splitlines()) + "\n" == TOLD


def test_the_lectures_trace_and_adjoints_stand_beside_the_ops() -> None:
    lines = [line.split() for line in explain(*LECTURE).stdout.splitlines()]
    came = {
        line[1]: line[line.index("number") + 2] for line in lines if "number" in line and line[0].isdigit()
    }
    assert [came[name] for name in ("v1", "v2", "v3", "v4", "v5")] == [
        "0.693",
        "10",
        "-0.959",
        "10.693",
        "11.652",
    ]
    assert (came["x1.grad"], came["x2.grad"]) == ("5.5", "1.716")


def test_small_and_large_numbers_keep_their_first_digits() -> None:
    lines = explain("a + 0", "--at", "a=0.0123456", "--no-backward").stdout
    assert "0.012 " in lines
    assert "0.000123 " in explain("a + 0", "--at", "a=0.000123456", "--no-backward").stdout
    assert "1.23e+07 " in explain("a + 0", "--at", "a=12345678", "--no-backward").stdout


def test_the_document_has_every_turn_however_few_are_printed() -> None:
    found = document(*LECTURE, "--steps", "1")
    assert [turn["turn"] for turn in found["walk"]] == list(range(1, 15))
    assert found["walk"][3]["given"] == [
        {"value": "v4", "tag": 0, "how": "in place", "tag_bytes": 4, "over": "v1"}
    ]
    assert (found["walk"][3]["counters"], found["walk"][3]["box"]) == ({"v1": 0, "v2": 0, "v4": 1}, [1])
    assert found["totals"] == {"naive": 56, "in_place": 32, "sharing": 20, "static": 20}
    assert (found["lower_bound_bytes"], found["static_ratio"], found["notes"]) == (20, 1.0, [])
    assert found["given"][0] == {"name": "x1", "role": "batch", "shape": [], "bytes": 4, "numbers": [2.0]}


def test_shapes_make_a_sum_necessary_and_a_note_says_so() -> None:
    result = explain("exp(a*b+3)", "--shape", "a=2,3", "--shape", "b=2,3")
    assert "total = sum(v3)" in result.stdout
    assert "note: the gradients are those of 'total', the sum of all results" in result.stdout
    labelled = ("cross_entropy(x, labels)", "--shape", "x=4,3", "--shape", "labels=4:int64")
    assert [given["bytes"] for given in document(*labelled)["given"]] == [48, 32]


def test_one_differentiates_by_what_one_asks_for_or_not_at_all() -> None:
    names = [op["results"][0]["name"] for op in document("exp(a*b+3)", "--wrt", "b")["backward"]]
    assert names == ["v3.grad", "v2.grad", "b.grad"]
    forward = document("exp(a*b+3)", "--no-backward")
    assert (forward["backward"], forward["totals"]["static"]) == ([], 4)
    assert "Extended" not in explain("exp(a*b+3)", "--no-backward").stdout


def test_long_tables_lose_their_middle() -> None:
    walk = explain(*LECTURE, "--steps", "2").stdout.split("The walk")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in walk[2:]] == ["1", "2", "…", "13", "14"]
    assert "… 10 more …" in walk[4]
    deep = ("exp(" * 30 + "a" + ")" * 30, "--no-backward")
    assert "… 6 more …" in explain(*deep).stdout
    assert "more …" not in explain(*deep, "--steps", "all").stdout


def test_what_is_run_is_told_for_each_kind_of_memory() -> None:
    found = document("exp(a*b+3)", "--run")
    assert [trial["memory"] for trial in found["trials"]] == ["naive", "pool", "static"]
    assert [trial["first"]["allocations"] for trial in found["trials"]][::2] == [7, 1]
    lines = explain("exp(a*b+3)", "--run").stdout.split("The same, run\n")[1].splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["memory", "naive", "pool", "static"]
    assert lines[-1] == "in an arena that is run, each value begins at a multiple of 64 bytes"


def test_a_picture_is_drawn_where_it_is_asked_for(folder: Path) -> None:
    for name, beginning in (("out.svg", b"<?xml"), ("out.png", b"\x89PNG"), ("out.pdf", b"%PDF")):
        assert explain("exp(a)", "--plot", name).exit_code == 0
        assert (folder / name).read_bytes().startswith(beginning)


# Models ----------------------------------------------------------------------------------------------


def test_mlp_is_the_network_of_two_layers() -> None:
    found = document("mlp", "--batch", "4", "--width", "8", "--classes", "2")
    assert [op["results"][0]["name"] for op in found["forward"]] == [
        "fc1",
        "sigmoid",
        "fc2",
        "softmax",
        "log",
        "loss",
    ]
    assert found["title"] == "two-layer MLP, batch 4, width 8, classes 2"
    assert found["kept_for_the_backward"][:2] == ["sigmoid", "softmax"]


def test_of_a_model_without_that_size_the_first_layers_are_taken() -> None:
    found = document("mine.py:four", "--layers", "3", "--device", "cpu")
    assert found["title"] == "mine.py:four, on cpu: the first 3 of 8 layers, up to 2"
    calls = ["mm(input, 0.weight.T)", "tanh(0)", "mm(1, 2.weight.T)", "sum(2)"]
    assert [op["call"] for op in found["forward"]] == calls
    gradients = [
        value["name"] for op in found["backward"] for value in op["results"] if value["role"] == "gradient"
    ]
    assert sorted(gradients) == ["0.weight.grad", "2.weight.grad"]
    assert found["notes"] == ["the gradients are those of 'total', the sum of all results"]


def test_the_forward_of_the_first_layers_keeps_its_end() -> None:
    found = document("mine.py:four", "--layers", "2", "--no-backward", "--device", "cpu")
    assert [turn["counters"] for turn in found["walk"]] == [{"0": 1}, {"0": 0, "1": 1}]


def test_a_model_that_has_that_size_is_built_with_it_and_captured_whole() -> None:
    result = explain("mine.py:any_number", "--layers", "3", "--device", "cpu", "--json")
    found = json.loads(result.stdout)
    assert found["sizes"] == {"layers": 3}
    gradients = [
        value["name"] for op in found["backward"] for value in op["results"] if value["role"] == "gradient"
    ]
    assert len(gradients) == 6
    gpt = ("gpt", "--layers", "1", "--width", "8", "--heads", "2", "--tokens", "4", "--vocab", "10")
    assert document(*gpt, "--device", "cpu")["title"].startswith("gpt, batch 1, layers 1")


def test_what_the_users_file_prints_goes_to_stderr() -> None:
    result = explain("mine.py:four", "--json", "--device", "cpu")
    assert set(result.stderr.split()) == {"building"}
    assert json.loads(result.stdout)["title"] == "mine.py:four, on cpu"


# What is an expression, and what fits on a page ------------------------------------------------------


@pytest.mark.parametrize("text", ["exp(a*b+3)", "a +", "y = x", "a-b", "x @ w", "a/b"])
def test_operators_make_an_expression(text: str) -> None:
    assert is_expression(text)


@pytest.mark.parametrize(
    "text", ["resnet18", "hf:gpt2", "path/to-my/file.py:function", "a-b/c.py", "timm:vit-b", "exp"]
)
def test_names_of_models_and_files_are_none(text: str) -> None:
    assert not is_expression(text)


def test_a_table_is_made_to_fit_by_cutting_words_and_never_numbers() -> None:
    table = Table(
        ("#", "words", "", "n"),
        (("1", "a" * 30, "", "123456"), ("2", "b", "", "7")),
        numbers=frozenset({0, 3}),
    )
    fitted = made_to_fit(table, 30, None)
    assert fitted.titles == ("#", "words", "n")
    assert fitted.rows == (("1", "a" * 18 + "…", "123456"), ("2", "b", "7"))
    assert fitted.numbers == {0, 2}
    assert made_to_fit(table, 5, None).rows[0] == ("1", "a" * 11 + "…", "123456")  # not to nothing
    assert made_to_fit(table, 80, None).rows[0] == ("1", "a" * 30, "123456")


def test_numbers_are_never_cut() -> None:
    table = Table(("n", "words"), (("1" * 30, "a" * 20),), numbers=frozenset({0}))
    assert made_to_fit(table, 40, None).rows == (("1" * 30, "a" * 11 + "…"),)


def test_a_row_or_two_are_not_worth_hiding() -> None:
    table = Table(("#",), tuple((str(number),) for number in range(6)))
    assert len(made_to_fit(table, 80, 2).rows) == 6
    assert made_to_fit(table, 80, 1).rows == (("0",), ("…",), ("5",))


# Refusals --------------------------------------------------------------------------------------------

REFUSED = [
    (["foo(a)"], "there is no function called 'foo'"),
    (["sigmod(a)"], "there is no function called 'sigmod'. Did you mean sigmoid"),
    (["a +"], "'a +' cannot be read as an expression"),
    (["y = z + 1; z = y * 2"], "these definitions depend on each other: y -> z -> y"),
    (["a @ b", "--shape", "a=2,3", "--shape", "b=2,3"], "a is (2, 3) and b is (2, 3)"),
    (["exp(a)", "--shape", "b=2"], "'b' is described as a variable, but does not occur in 'exp(a)'"),
    (["exp(a)", "--wrt", "b"], "'b' is not given, so there is no gradient by it. Given are: a."),
    (
        ["exp(a)", "--wrt", "a", "--no-backward"],
        "--wrt says by what to differentiate, and --no-backward not to",
    ),
    (["exp(a)", "--at", "b=1"], "there is no 'b' to give a number for. There are: 'a'."),
    (["a*b", "--at", "a=1"], "there is no number for 'b'"),
    (["exp(a)", "--arena", "4"], "in an arena of 4 bytes: it needs 8"),
    (["exp(a)", "--batch", "3"], "an expression has no batch. Give its variables shapes"),
    (["mlp", "--layers", "3"], "mlp has no layers: the sizes that apply are batch, width, classes"),
    (["mlp", "--shape", "a=3"], "--shape is for variables of an expression, and 'mlp' is a model"),
    (["resnt18"], "there is no model called 'resnt18'. Did you mean resnet18"),
    (["mine.py:four", "--wrt", "0.weight"], "a captured step has the gradients that it has"),
    (["exp(a)", "--shape", "a=2,0"], "the sizes of 'a' are whole numbers above zero, not '2,0'"),
    (["exp(a)", "--shape", "a=2:float7"], "'float7' is none of float64"),
    (["exp(a)", "--shape", "a"], "'a' is not of the form NAME=2,3"),
    (["exp(a)", "--shape", "a=2", "--shape", "a=3"], "'a' is given twice"),
    (["exp(a)", "--at", "a=two"], "'two' is no number for 'a'"),
    (["exp(a)", "--at", "a=nan"], "'nan' is no number for 'a'"),
    (["exp(a)", "--steps", "few"], "it must be a whole number of at least 1, not 'few'"),
    (["exp(a)", "--match-range", "0"], "it must be a whole number of at least 1, not '0'"),
    (["exp(a)", "--plot", "out.gif"], "'out.gif' must end in .svg or .png or .pdf"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(each[0]) for each in REFUSED])
def test_what_cannot_be_explained_says_why_and_writes_nothing(arguments: list[str], message: str) -> None:
    plot = [] if "--plot" in arguments else ["--plot", "out.svg"]
    result = explain(*arguments, *plot)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())
    assert not Path("out.svg").exists()


def test_help_and_plain_expressions_do_without_torch() -> None:
    code = (
        "import sys\nfrom lowtide.cli import main\n"
        "try:\n    main(['explain', 'exp(a*b+3)', '--json'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = explain("exp(a)", "--plot", "out.svg")
    assert result.exit_code == 2
    assert result.stderr == "error: drawing a graph needs matplotlib: pip install 'lowtide[plot]'\n"
