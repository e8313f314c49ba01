"""Modules drawn at random train under a plan as without one, within what was promised."""

from __future__ import annotations

import pytest
from benchmarks.fuzz.fuzz import task_of
from benchmarks.fuzz.processes import rows_of
from benchmarks.fuzz.report import line
from benchmarks.fuzz.trial import BAD

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
