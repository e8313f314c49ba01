"""What generated code was found to hold, and plans that take it into account."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.errors import InfeasibleBudget
from lowtide.execute import corrected
from lowtide.execute.corrected import Corrected
from lowtide.inductor.reading import Read
from lowtide.ir.graph import Graph, Phase
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.text.budget import LOWEST
from tests.helpers.handmade import steps, three_layers

FORWARD, BACK = (0, Phase.FORWARD), (0, Phase.BACKWARD)
RESIDENT, PEAK = 150, 150 + 1000 + 400 + 300 + 304  # of three_layers; the peak is at op 4


def follow(graph: Graph, budget_bytes: int | None) -> Corrected:
    return Corrected(graph, straight(graph), budget_bytes)


# By hand ----------------------------------------------------------------------------------------------


def test_a_half_holds_what_was_there_and_what_its_code_was_found_to_hold() -> None:
    """Before the backward there are the residents, 1000, 400, 300 and the loss."""
    graph = three_layers()
    found = follow(graph, None)
    assert found.peak_bytes == simulate(graph, straight(graph)).peak_bytes == PEAK
    found.note(BACK, 0)
    assert found.peak_bytes == RESIDENT + 1704  # what the plan says of the forward
    found.note(FORWARD, 1900)
    assert found.peak_bytes == RESIDENT + 1900
    found.note(BACK, 500)
    assert found.peak_bytes == RESIDENT + 1704 + 500


def test_of_two_codes_for_one_half_the_larger_counts() -> None:
    found = follow(three_layers(), None)
    for growth in (400, 500, 300):
        found.note(BACK, growth)
    assert found.peak_bytes == RESIDENT + 1704 + 500


def test_ops_that_run_again_belong_to_the_half_that_waits_for_them() -> None:
    """wide and middle are made again for op 5: before the backward there are narrow and the loss alone."""
    graph = three_layers()
    found = Corrected(graph, steps(0, 1, "f2", 2, "f3", 3, 4, "f4", 0, 1, 5, "f2", "f3", "f6"), None)
    found.note(FORWARD, 0)
    found.note(BACK, 77)
    assert found.peak_bytes == RESIDENT + 304 + 77


def test_workspaces_are_told_by_the_names_of_ops_in_the_order_in_which_they_run() -> None:
    found = follow(three_layers(), None)
    assert found.workspaces(FORWARD) == {"mm": [0], "relu": [0, 0], "sum": [0]}
    assert found.workspaces(BACK) == {"mul": [0], "mm": [7]}
    assert found.workspaces((1, Phase.FORWARD)) == {}
    asked: list[Any] = []

    def read(**given: Any) -> Read:
        asked.append(given)
        return Read(600, (), ())

    found.reading(0)(Phase.BACKWARD, read)
    assert asked == [{"device": "cpu", "workspaces": {"mul": [0], "mm": [7]}}]
    assert found.peak_bytes == RESIDENT + 1704 + 600


def test_within_the_budget_nothing_is_planned_anew() -> None:
    found = follow(three_layers(), PEAK)
    assert found.next_plan() is None
    found.note(BACK, 300)
    assert found.next_plan() is None
    found.note(BACK, 301)
    assert found.next_plan() is not None
    without = follow(three_layers(), None)
    without.note(BACK, 10**9)
    assert without.next_plan() is None


def test_over_the_budget_the_next_plan_holds_as_much_less_as_was_too_much() -> None:
    """200 too much: wide cannot be held over the middle of the step."""
    graph = three_layers()
    found = follow(graph, PEAK)
    found.note(BACK, 300 + 200)
    better = found.next_plan()
    assert better is not None
    assert simulate(graph, better).peak_bytes <= PEAK - 200
    assert found.next_plan() is None  # nothing is known of its code
    assert found.peak_bytes == simulate(graph, better).peak_bytes


def test_nobody_replays_the_step_again_until_more_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = follow(three_layers(), PEAK)
    found.note(BACK, 300)
    assert found.next_plan() is None
    monkeypatch.setattr(corrected, "simulate", None)
    assert found.next_plan() is None


def test_where_no_plan_holds_so_little_the_lowest_is_tried() -> None:
    graph = three_layers()
    found = follow(graph, PEAK)
    found.note(BACK, 5000)
    lowest = found.next_plan()
    assert lowest is not None
    assert simulate(graph, lowest).peak_bytes < PEAK
    found.note(FORWARD, PEAK - RESIDENT)
    assert found.next_plan() is None


# Refusals ---------------------------------------------------------------------------------------------


def test_code_that_is_over_the_budget_in_the_lowest_plan_is_refused_with_a_budget_that_would_hold() -> None:
    found = follow(three_layers(), PEAK)
    found.note(FORWARD, 5000)
    assert found.next_plan() is not None
    found.note(FORWARD, 4000)
    for _ in range(2):  # and in every step that is tried again
        with pytest.raises(InfeasibleBudget) as refusal:
            found.next_plan()
        assert refusal.value.least_bytes == RESIDENT + 4000
        assert refusal.value.budget_bytes == PEAK
        assert "(4150 bytes)" in str(refusal.value)
        assert "needed by code that Inductor has generated" in str(refusal.value)
        assert 'leave kernels="eager"' in str(refusal.value)


def test_it_is_planned_anew_three_times_and_then_comes_the_lowest_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budget that is named is what the lowest was found to hold: so it is one that would hold."""
    graph, asked = three_layers(), []
    lowest = steps(0, 1, "f2", 2, "f3", 3, 4, "f4", 0, 1, 5, "f2", "f3", "f6")

    def solved(graph: Graph, method: Any, budget: Any) -> Any:
        asked.append(budget)
        return type("Found", (), {"schedule": lowest if budget == LOWEST else straight(graph)})

    monkeypatch.setattr(corrected, "solve", solved)
    found = follow(graph, PEAK)
    for _ in range(4):
        found.note(FORWARD, PEAK)
        assert found.next_plan() is not None
    assert asked[-1] == LOWEST
    assert LOWEST not in asked[:-1]
    found.note(FORWARD, PEAK + 50)
    with pytest.raises(InfeasibleBudget) as refusal:
        found.next_plan()
    assert refusal.value.least_bytes == RESIDENT + PEAK + 50
    assert len(asked) == 4
