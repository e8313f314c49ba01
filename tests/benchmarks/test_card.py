"""The benchmark of cards: what is done in which turn, how rows are judged, and what is replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.card import card, replay
from benchmarks.card.card import HISTORIES, MORE, NAMED, Task, batch_of, fraction, larger, tasks, verdict
from benchmarks.card.subjects import subjects
from benchmarks.frontier.frontier import Rows

from lowtide.cost.cuda_rules import CONTEXT_BYTES
from lowtide.ir.graph import Role
from lowtide.ir.training_reserve import AllocatedRun
from lowtide.planner.on_card import Training
from tests.helpers.handmade import Drawing, steps

MIB = 1 << 20


def row(**more: Any) -> dict[str, Any]:
    about = {"subject": "gpt2 fp32", "gib": 8, "way": "plain", "history": HISTORIES[0], "batch": 8}
    held = {"peak_bytes": 7 << 30, "reserved_bytes": 7 << 30, "taken_part": 0.98}
    return {**about, **held, "steps": 20, "stopped_by": None, **more}


def test_batches_are_named_first_and_then_trained_in_turns() -> None:
    found = sorted(tasks(["a", "b"], (8, 40)))
    assert [task.way for task in found[:4]] == [NAMED] * 4
    assert [(task.gib, task.subject) for task in found[:4]] == [(8, "a"), (8, "b"), (40, "a"), (40, "b")]
    assert [task.history for task in found[4:12]] == [HISTORIES[0]] * 8
    assert [task.history for task in found[12:20]] == [MORE] * 8
    assert len(found) == 2 * 2 * (1 + 2 * (len(HISTORIES) + 1))
    assert len({(task.subject, task.label) for task in found}) == len(found)
    assert all(Task(**json.loads(json.dumps(task.__dict__))) == task for task in found)


@pytest.mark.parametrize(("batch", "more"), [(1, 2), (10, 11), (20, 21), (40, 42), (457, 479)])
def test_five_per_cent_more_is_at_least_one_more(batch: int, more: int) -> None:
    assert larger(batch) == more


def test_a_card_is_a_part_of_the_one_that_there_is() -> None:
    assert fraction(8, 140 << 30) == ((8 << 30) - CONTEXT_BYTES) / (140 << 30)


def test_only_batches_that_were_named_are_trained(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.json", "c")
    label = Task(0, 8, "a", NAMED, NAMED).label
    rows.put({"subject": "a", "label": label, "plain": {"batch": 20}, "planned": None})
    plain, more = Task(1, 8, "a", "plain", HISTORIES[0]), Task(2, 8, "a", "plain", MORE)
    assert (batch_of(rows, plain), batch_of(rows, more)) == (20, 21)
    assert card.is_due(rows, plain)
    assert not card.is_due(rows, Task(1, 8, "a", "planned", HISTORIES[0]))
    assert not card.is_due(rows, Task(1, 12, "a", "plain", HISTORIES[0]))
    assert card.is_due(rows, Task(0, 12, "a", NAMED, NAMED))
    assert not card.is_due(rows, Task(0, 8, "a", NAMED, NAMED))  # it is there
    rows.put({"subject": "a", "label": plain.label, "batch": 20})
    assert not card.is_due(rows, plain)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, "trains"),
        ({"taken_part": 0.9}, "trains, **90.0% used**"),
        ({"steps": 1, "stopped_by": "OutOfMemoryError"}, "**OutOfMemoryError after 1 steps**"),
        ({"history": MORE}, "**fits**"),
        ({"history": MORE, "steps": 0, "stopped_by": "InfeasibleBudget"}, "does not fit (InfeasibleBudget)"),
        ({"error": "KeyError: x", "failure": "KeyError"}, "failed: KeyError"),
    ],
)
def test_rows_are_judged(found: dict[str, Any], told: str) -> None:
    assert verdict(row(**found)) == told


def test_the_page_counts_what_trains_and_what_does_not() -> None:
    machine = dict.fromkeys(("device", "torch", "python", "commit", "date", "command"), "x")
    rows = [
        row(),
        row(history=HISTORIES[1], taken_part=0.9),
        row(way="planned", steps=1, stopped_by="OutOfMemoryError"),
        row(history=MORE, steps=2, stopped_by="OutOfMemoryError"),
        row(history=MORE, way="planned"),
        row(way=NAMED),
    ]
    page = "\n".join(card.render({"machine": machine, "rows": rows}))
    assert "| gpt2 fp32 | 8 GiB | plain | fresh | 8 | 7,168.0 | 7,168.0 | 98.0% | trains |" in page
    assert "- 2 of 3 named batches train 20 steps" in page
    assert "- 1 of these use 97% of the card or more" in page
    assert "- 1 of 2 batches that are 5 % larger do not fit" in page


def test_subjects_have_names_of_their_own() -> None:
    keys = [subject.key for subject in subjects()]
    assert len(keys) == len(set(keys)) == 14


# Replays --------------------------------------------------------------------------------------------


def drawn() -> AllocatedRun:
    drawing = Drawing("cuda:0")
    weight = drawing.value("weight", 20 * MIB, Role.PARAMETER)
    first, second = drawing.value("first", 40 * MIB), drawing.value("second", 40 * MIB)
    drawing.op("aten.one.default", [weight], [first], workspace=60 * MIB)
    drawing.op("aten.two.default", [first], [second])
    return AllocatedRun(drawing.graph(), steps(0, 1, f"f{first}", f"f{second}"))


def test_workspaces_have_a_place_in_the_layout() -> None:
    run = drawn()
    graph, schedule = replay.with_workspaces(run.graph, run.schedule)
    assert [op.workspace_bytes for op in graph.ops] == [0, 0]
    assert len(schedule) == len(run.schedule) + 1
    assert replay.offsets_bytes(run) == (20 + 40 + 60) * MIB  # `second` lies where the workspace was


def test_reserves_are_those_of_the_replay() -> None:
    found = replay.reserves(Training(drawn()))
    assert found["allocated_bytes"] == found["steps_allocated_bytes"] == 120 * MIB
    assert found["segments_bytes"] == found["expandable_bytes"] == 120 * MIB
    assert found["least_part"] == 1.0


def test_the_committed_replay_is_rendered_as_it_is() -> None:
    results = Path(replay.__file__).parent / "results"
    page = next(results.glob("replay-*.md"))
    document = json.loads(page.with_suffix(".json").read_text())
    assert page.read_text() == "\n".join(replay.render(document)) + "\n"
