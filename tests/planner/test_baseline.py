"""Baselines: what grew since, exactly; files that are read strictly; and the assertion for test suites."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import fit
from lowtide._version import __version__
from lowtide.errors import BadFile, BadRequest
from lowtide.planner.baseline import Baseline, Source, Verdict, judge, load_baseline, save_baseline
from lowtide.testing import assert_peak, baseline_of
from tests.helpers.editable import editable

BEFORE = Baseline(
    model="net",
    device="cuda:0",
    optimizer="adam",
    inputs=("float32[8, 16]",),
    sizes={"batch": 8},
    source=Source.PREDICTED,
    peak_bytes=1000,
    categories={"parameters": 400, "activations": 600},
    modules={"head": 500, "body": 400, "": 100},
    lowtide_version="1.0",
    torch_version="2.11.0",
)
AFTER = replace(
    BEFORE,
    peak_bytes=1100,
    categories={"parameters": 400, "activations": 650, "workspace": 50},
    modules={"head": 450, "body": 530, "tail": 20, "": 100},
)


# Judging --------------------------------------------------------------------------------------------------


def test_what_grew_comes_first_and_what_stayed_is_left_out() -> None:
    judgement = judge(BEFORE, AFTER, "2%")
    assert (judgement.growth_bytes, judgement.tolerance_bytes) == (100, 20)
    assert judgement.verdict is Verdict.GREW
    assert [(change.name, change.bytes) for change in judgement.modules] == [
        ("body", 130),
        ("tail", 20),
        ("head", -50),
    ]
    assert [(change.name, change.bytes) for change in judgement.categories] == [
        ("activations", 50),
        ("workspace", 50),
    ]


TOLD = """\
the predicted peak grew: 1000 B → 1.1 KiB (+10.00 %, tolerance 20 B)

module  before B  now  difference
body         400  530        +130
tail           0   20         +20
head         500  450         −50

held as      before B  now  difference
activations       600  650         +50
workspace           0   50         +50"""


def test_a_judgement_reads_as_a_verdict_and_two_tables() -> None:
    assert str(judge(BEFORE, AFTER, "2%")) == TOLD


@pytest.mark.parametrize(
    ("tolerance", "peak", "verdict"),
    [
        ("10%", 1100, Verdict.HELD),
        ("9.9%", 1100, Verdict.GREW),
        ("100B", 1100, Verdict.HELD),
        (99, 1100, Verdict.GREW),
        ("0%", 1001, Verdict.GREW),
        (0, 1000, Verdict.HELD),
        ("2%", 980, Verdict.HELD),
        ("2%", 979, Verdict.FELL),
        ("0", 999, Verdict.FELL),
    ],
)
def test_the_tolerance_is_the_last_that_is_tolerated(
    tolerance: str | int, peak: int, verdict: Verdict
) -> None:
    assert judge(BEFORE, replace(BEFORE, peak_bytes=peak), tolerance).verdict is verdict


def test_of_many_modules_those_that_grew_least_are_summed_up() -> None:
    modules = {f"layers.{number}": 10 + number for number in range(20)}
    before = replace(BEFORE, modules=dict.fromkeys(modules, 5))
    table, _ = judge(before, replace(AFTER, modules=modules)).tables
    assert len(table.rows) == 13
    assert table.rows[0] == ("layers.19", "5", "29", "+24")
    assert table.rows[-1] == ("8 others", "40", str(sum(range(10, 18))), f"+{sum(range(10, 18)) - 40}")


def test_other_versions_are_compared_and_noted() -> None:
    judgement = judge(BEFORE, replace(BEFORE, lowtide_version="2.0", torch_version="2.13.0"))
    assert judgement.verdict is Verdict.HELD
    assert judgement.notes == (
        "the baseline is from lowtide 1.0, and this is 2.0",
        "the baseline is from torch 2.11.0, and this is 2.13.0",
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "other"}, "model net instead of other"),
        ({"device": "cpu"}, "device cuda:0 instead of cpu"),
        ({"optimizer": None}, "optimizer adam instead of none"),
        ({"sizes": {"batch": 9}}, "sizes batch 8 instead of batch 9"),
        ({"inputs": ()}, r"inputs float32\[8, 16\] instead of "),
        ({"source": Source.MEASURED}, "peak predicted instead of measured"),
    ],
)
def test_another_step_is_not_compared(change: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=f"the baseline is of another step: {told}"):
        judge(BEFORE, replace(AFTER, **change))


@pytest.mark.parametrize("tolerance", ["-1%", "two", "%", "nan%", ""])
def test_a_tolerance_that_cannot_be_read_is_refused(tolerance: str) -> None:
    with pytest.raises(BadRequest, match=r"as a tolerance\. Write 2% or 10MiB"):
        judge(BEFORE, AFTER, tolerance)


# Files ----------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    save_baseline(BEFORE, tmp_path / "peak.json")
    assert load_baseline(tmp_path / "peak.json", "") == BEFORE
    document = json.loads((tmp_path / "peak.json").read_text())
    assert (document["lowtide"], document["schema"]) == ("baseline", 1)


def test_a_baseline_that_is_not_there_says_how_to_write_it(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"there is no baseline '.*peak\.json' yet\. Do so\."):
        load_baseline(tmp_path / "peak.json", "Do so.")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lowtide": "graph"}, "it is not a lowtide baseline file"),
        ({"schema": 2}, "it has schema 2; this lowtide reads schema 1"),
        ({"peak_bytes": "1000"}, "peak_bytes should be int, found '1000'"),
        ({"peak_bytes": -5, "modules": {}, "categories": {}}, "its peak is -5 bytes"),
        ({"peak_bytes": 999}, "its categories do not add up to that"),
        ({"modules": {"head": 1}}, "its modules do not add up to that"),
        ({"modules": {"head": None}}, "modules.head should be int"),
        ({"sizes": [8]}, "sizes should be dict"),
        ({"source": "guessed"}, "source is 'guessed', not one of"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "peak.json"
    save_baseline(BEFORE, path)
    path.write_text(json.dumps({**editable(path), **change}))
    with pytest.raises(BadFile, match=r"peak\.json") as caught:
        load_baseline(path, "")
    assert told in str(caught.value)


def test_a_file_that_is_cut_off_or_lacks_a_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peak.json"
    save_baseline(BEFORE, path)
    whole, found = path.read_text(), editable(path)
    path.write_text(whole[:50])
    with pytest.raises(BadFile, match="damaged or cut off"):
        load_baseline(path, "")
    path.write_text(whole.replace('"device"', '"devices"'))
    with pytest.raises(BadFile, match="a field 'devices' that no baseline file has: damaged"):
        load_baseline(path, "")
    path.write_text(json.dumps({name: field for name, field in found.items() if name != "device"}))
    with pytest.raises(BadFile, match="has no 'device'"):
        load_baseline(path, "")


# The assertion --------------------------------------------------------------------------------------------


def mlp(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))


ROWS = torch.ones(8, 16)
PEAK = fit(mlp(), ROWS, torch.sum, profile=False).peak_bytes


def check(model: nn.Module, **wishes: Any) -> None:
    assert_peak(model, ROWS, loss=torch.sum, profile=False, **wishes)


def test_a_peak_that_is_within_passes_and_one_byte_less_fails() -> None:
    check(mlp(), at_most=PEAK)
    with pytest.raises(AssertionError, match=r"the predicted peak is .*, 1 B above .*; held at the peak: 0 "):
        check(mlp(), at_most=PEAK - 1)


def test_a_model_that_grew_fails_with_the_module_that_did(tmp_path: Path) -> None:
    path = tmp_path / "peak.json"
    check(mlp(), baseline=path, write_baseline=True)
    check(mlp(), baseline=path, tolerance=0)
    with pytest.raises(AssertionError, match=r"the predicted peak grew: ") as caught:
        check(mlp(64), baseline=path)
    assert "\n0 " in str(caught.value)
    check(mlp(16), baseline=path)  # less is fine
    assert load_baseline(path, "").peak_bytes == PEAK  # and nothing was written


def test_a_baseline_says_what_it_is_of(tmp_path: Path) -> None:
    found = baseline_of(fit(mlp(), ROWS, torch.sum, optimizer="adam", profile=False), ROWS, {"batch": 8})
    assert (found.model, found.device, found.optimizer) == ("Sequential", "cpu", "adam")
    assert (found.inputs, found.sizes, found.source) == (("float32[8, 16]",), {"batch": 8}, Source.PREDICTED)
    assert sum(found.modules.values()) == sum(found.categories.values()) == found.peak_bytes
    assert (found.lowtide_version, found.torch_version) == (
        __version__,
        torch.__version__.partition("+")[0],
    )


def test_a_measured_peak_is_held_against_measured_ones(tmp_path: Path) -> None:
    path = tmp_path / "peak.json"
    check(mlp(), baseline=path, write_baseline=True, measured=True, optimizer="sgd")
    check(mlp(), baseline=path, measured=True, optimizer="sgd", tolerance="50%")
    with pytest.raises(BadRequest, match="peak measured instead of predicted"):
        check(mlp(), baseline=path, optimizer="sgd")
    with pytest.raises(AssertionError, match="the measured peak is "):
        check(mlp(), at_most=1, measured=True)


def test_a_model_is_measured_without_the_gradients_that_it_has_and_keeps_them() -> None:
    model = mlp()
    gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    check(model, at_most="1GiB", measured=True)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient


def test_nothing_to_hold_a_peak_against_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="there is nothing to hold the peak against"):
        check(mlp())
    with pytest.raises(BadRequest, match="write_baseline says to write a file; say which"):
        check(mlp(), at_most="1GiB", write_baseline=True)
    with pytest.raises(BadRequest, match=r"yet\. Write it once, with write_baseline=True"):
        check(mlp(), baseline=tmp_path / "none.json")
    assert not list(tmp_path.iterdir())
