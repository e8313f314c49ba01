"""What memory costs in time: the table and the picture of many schedules of one graph."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import BadFile, BadRequest, MissingExtra
from lowtide.ir.schedule import straight
from lowtide.report.picture.frontier import (
    FrontierPoint,
    best,
    draw_frontier,
    frontier_picture,
    points_of,
    print_frontier,
)
from lowtide.solvers.solution import GraphSolution, Status
from tests.helpers.handmade import chain, solved, steps, three_layers

GRAPH = three_layers()
KEEPING_ALL = solved(GRAPH, straight(GRAPH), method="evict", budget_bytes=2200)
LESS = solved(
    GRAPH,
    steps(0, 1, 2, "f3", 3, 4, "f4", 1, 5, "f2", "f3", "f6"),
    method="exact",
    status=Status.OPTIMAL,
    budget_bytes=1999,
)
WORSE = solved(  # as low as the one before, and slower: the wide one is made again as well
    GRAPH,
    steps(0, 1, 2, "f3", "f2", 3, 4, "f4", 0, 1, 5, "f2", "f3", "f6"),
    method="evict",
)

# What is best ----------------------------------------------------------------------------------------


def test_points_are_peaks_and_what_they_add() -> None:
    assert points_of([KEEPING_ALL, LESS, WORSE]) == [
        FrontierPoint(2154, 0.0, "evict"),
        FrontierPoint(1911, 10.0, "exact"),  # 2 of 20 seconds
        FrontierPoint(1911, 15.0, "evict"),
    ]
    untimed = chain()
    assert points_of([solved(untimed, straight(untimed))]) == [FrontierPoint(3504, 0.0, "by hand")]


def test_the_best_are_those_that_nothing_beats() -> None:
    a, b, c, d = (
        FrontierPoint(10, 9.0, ""),
        FrontierPoint(20, 9.0, ""),
        FrontierPoint(20, 3.0, ""),
        FrontierPoint(30, 0.0, ""),
    )
    assert best([d, b, a, c]) == [a, c, d]
    assert best([]) == []


@given(st.lists(st.builds(FrontierPoint, st.integers(1, 9), st.floats(0, 9), st.sampled_from("ab"))))
def test_every_point_is_matched_by_one_of_the_best_and_no_two_of_those_match(
    points: list[FrontierPoint],
) -> None:
    found = best(points)
    for point in points:
        assert any(other.peak_bytes <= point.peak_bytes and other.added <= point.added for other in found)
    assert [point.peak_bytes for point in found] == sorted({point.peak_bytes for point in found})
    assert [point.added for point in found] == sorted({point.added for point in found}, reverse=True)


# The table -------------------------------------------------------------------------------------------

TABLE = """\
three layers

budget B  peak B  of plain  extra time  of the step  ops again  status    method
       –   2,154   100.0 %           0       +0.0 %          0  optimal   keep-all
   2,200   2,154   100.0 %        0 µs       +0.0 %          0  feasible  evict
   1,999   1,911    88.7 %      2.00 s      +10.0 %          1  optimal   exact
       –   1,911    88.7 %      3.00 s      +15.0 %          2  feasible  evict

lower bound: 1.9 KiB, held by any schedule at stem: aten.mm
note: the sea is blue
"""


def test_the_table_goes_from_most_memory_to_least(capsys: pytest.CaptureFixture[str]) -> None:
    print_frontier("three layers", [WORSE, LESS, KEEPING_ALL], ["the sea is blue"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == TABLE.splitlines()


def test_without_times_the_table_counts_ops(capsys: pytest.CaptureFixture[str]) -> None:
    untimed = replace(GRAPH, ops=tuple(replace(op, seconds=0.0) for op in GRAPH.ops))
    print_frontier("untimed", [solved(untimed, LESS.schedule)])
    row = capsys.readouterr().out.splitlines()[4].split()
    assert row == ["–", "1,911", "88.7", "%", "unknown", "–", "1", "feasible", "by", "hand"]


# The picture -----------------------------------------------------------------------------------------


def svg(*solutions: GraphSolution) -> str:
    return frontier_picture("three layers", solutions, "svg").decode()


def test_the_picture_names_methods_bounds_and_axes() -> None:
    text = svg(KEEPING_ALL, LESS, WORSE)
    for words in (
        "three layers",
        ">evict<",
        ">exact<",
        ">keep-all 2.1 KiB<",
        ">lower bound 1.9 KiB<",
        ">the least within a budget<",
        ">peak (KiB)<",
        ">extra time of a step (%)<",
        ">of keep-all<",
        ">100 %<",
    ):
        assert words in text, words


def test_without_times_the_picture_counts_ops() -> None:
    untimed = chain()
    assert "ops run again (no times are known)" in svg(solved(untimed, straight(untimed)))


def test_a_picture_is_written_as_what_its_name_says_and_always_the_same(tmp_path: Path) -> None:
    for name, beginning in (("a.png", b"\x89PNG\r\n\x1a\n"), ("a.SVG", b"<?xml")):
        draw_frontier("three layers", [KEEPING_ALL, LESS], tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(beginning)
    assert svg(KEEPING_ALL, LESS) == svg(KEEPING_ALL, LESS)


def test_one_schedule_at_its_lower_bound_can_be_drawn() -> None:
    assert "<svg" in svg(replace(KEEPING_ALL, lower_bound_bytes=2154))


# Refusals --------------------------------------------------------------------------------------------


def test_nothing_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="there is no schedule to show"):
        draw_frontier("nothing", [], tmp_path / "a.png")
    with pytest.raises(BadRequest, match="there is no schedule to show"):
        print_frontier("nothing", [])
    assert list(tmp_path.iterdir()) == []


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lowtide\[plot\]'"):
        draw_frontier("three layers", [LESS], tmp_path / "a.png")


def test_a_picture_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot write '.*/a.png': No such file or directory"):
        draw_frontier("three layers", [LESS], tmp_path / "absent" / "a.png")
