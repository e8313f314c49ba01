"""The benchmark of tiles: rows are judged by their goals and told as they are; the small steps run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tiles import tiles
from benchmarks.tiles.report import cut, report, verdict
from benchmarks.tiles.subjects import LARGE, SMALL

from lowtide.text.sizes import parse_bytes


def row(**more: Any) -> dict[str, Any]:
    about = {"subject": "a step", "label": "lowest", "kind": "planned", "library": "none", "commit": "c"}
    measured = {"peak_bytes": 3 << 20, "ms": 11.0, "predicted_bytes": 3 << 20, "planning_seconds": 1.0}
    return {**about, **measured, "recomputed_ops": 2, "kept_within_budget": None, "tiles": [], **more}


EAGER = {"subject": "a step", "label": "eager", "kind": "peer", "peak_bytes": 9 << 20, "ms": 10.0}


@pytest.mark.parametrize(
    ("goals", "words", "met"),
    [
        ({"most_mib": 3}, "≤ 3 MiB", True),
        ({"most_mib": 2.9}, "≤ 3 MiB", False),
        ({"most_ms": 11}, "≤ 11 ms", True),
        ({"most_ms": 10.9, "most_mib": 4}, "≤ 4 MiB, ≤ 11 ms", False),
        ({"most_times": 1.1}, "≤ 1.1× eager", True),
        ({"most_times": 1.09}, "≤ 1.09× eager", False),
        ({}, "", None),
    ],
)
def test_goals_are_judged_by_what_was_measured(goals: dict[str, float], words: str, met: bool | None) -> None:
    assert verdict(row(**goals), EAGER) == (words, met)


def test_regions_that_are_cut_alike_are_told_together() -> None:
    mlp = {"count": 8, "extent": 512, "spared_bytes": 2 << 20}
    told = cut([{"where": "a.mlp", **mlp}, {"where": "b.mlp", **mlp}, {"where": "head", **mlp, "count": 4}])
    assert told == (
        "`a.mlp and 1 more`: 512 in 8 slices, 2 MiB never there at once; "
        "`head`: 512 in 4 slices, 2 MiB never there at once"
    )


def test_a_row_that_failed_and_a_goal_that_was_missed_are_in_the_report(tmp_path: Path) -> None:
    facts = ("device", "torch", "python", "commit", "date", "command")
    machine = dict.fromkeys(facts, "known")
    failed = {"subject": "a step", "label": "within eager", "kind": "planned", "error": "no\nplan"}
    document = {"machine": machine, "rows": [EAGER, row(most_mib=1), failed]}
    report(document, tmp_path / "rows.md")
    text = (tmp_path / "rows.md").read_text(encoding="utf-8")
    assert "**missed**" in text
    assert "- within eager: no plan" in text
    assert (tmp_path / "rows.png").stat().st_size > 1000


@pytest.mark.long
def test_a_small_step_is_measured_within_what_its_peers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.json"
    asked = ["measure", "--rows", str(rows), "--small", "--alone", "head"]
    monkeypatch.setattr(sys, "argv", ["tiles.py", *asked])
    tiles.main()
    found = {each["label"]: each for each in json.loads(rows.read_text(encoding="utf-8"))["rows"]}
    assert found["lowest"]["peak_bytes"] < found["eager"]["peak_bytes"] / 2
    assert found["lowest"]["predicted_bytes"] == pytest.approx(found["lowest"]["peak_bytes"], rel=0.01)
    assert [tile["where"] for tile in found["lowest"]["tiles"]] == ["head"]


def test_every_question_is_about_a_peer_that_is_measured_or_a_number() -> None:
    for subject in (*LARGE.values(), *SMALL.values()):
        for question in subject.questions:
            known = (*subject.peers, "lowest")
            assert question.within in known or parse_bytes(question.within) > 0
