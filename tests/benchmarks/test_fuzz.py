"""Modules drawn at random train under a plan as without one, within what was promised."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.fuzz.fuzz import task_of
from benchmarks.fuzz.processes import rows_of
from benchmarks.fuzz.recipe import recipe
from benchmarks.fuzz.report import line, report
from benchmarks.fuzz.trial import BAD, RIGHT, tried
from benchmarks.fuzz.ways import NO_ARENA

_SEEDS, _QUICK, _AT_ONCE = 200, 40, 4
_SECONDS = 600  # that one seed may take, however busy the machine is


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[] if first < _QUICK else pytest.mark.long)
        for first in range(0, _SEEDS, _AT_ONCE)
    ],
)
def test_random_modules_are_right_and_within_the_budget_or_refused(first: int) -> None:
    tasks = [task_of(seed) for seed in range(first, first + _AT_ONCE)]
    rows = list(rows_of(tasks, jobs=1, seconds=_SECONDS))
    assert len(rows) == _AT_ONCE
    bad = [line(row) for row in rows if row["outcome"] in BAD]
    assert not bad, "\n".join(bad)


def test_a_step_without_an_arena_is_tried_by_its_plan_and_counted(tmp_path: Path) -> None:
    """A part is multiplied by a number that is drawn anew in every step."""
    row = tried(recipe(60234), "arena", "min")
    assert (row["outcome"], row["how"]) == (RIGHT, NO_ARENA), line(row)
    where = dict.fromkeys(("device", "torch", "python", "date", "commit", "command"), "")
    report({"rows": [row], "machine": where}, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "Refused: 0 of 1, 0.0%." in page
    assert "Of the 1 steps for an arena 1 have none: what they do follows from a number" in page
