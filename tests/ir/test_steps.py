"""Steps are an open family: kinds that only this file knows are counted, laid out, shown, written and read.

`Leave` and `Return` are what moves to the host could be: a value's memory is given up, and taken again for
the same content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch

from lowtide.aot.codegen import _Half
from lowtide.arena.layout import lay_out
from lowtide.errors import BadFile, CannotApply, CannotRun, IllegalSchedule
from lowtide.execute.executor import Executor
from lowtide.ir.assumptions import Finding, NoGradient
from lowtide.ir.cuda_allocator import cached
from lowtide.ir.graph import Graph
from lowtide.ir.lives import lives
from lowtide.ir.schedule import KINDS, Compute, Event, Free, Schedule, Step
from lowtide.ir.simulate import EXACT, simulate
from lowtide.ir.walk import walk
from lowtide.report.content.curve import Curve
from lowtide.report.export.snapshot import snapshot
from lowtide.solvers.files import load_graph, load_solution, save_graph, save_solution
from lowtide.solvers.solution import GraphSolution
from lowtide.solvers.summary import held_at_turn
from tests.helpers.editable import editable
from tests.helpers.handmade import Drawing, solved, steps, three_layers


@dataclass(frozen=True, slots=True)
class Leave(Step):
    """A value's memory is given up; what it holds is not lost."""

    kind: ClassVar[str] = "leave"
    value: int

    def event(self, graph: Graph, position: int) -> Event:
        return Event(position, self, None, died=(self.value,))


@dataclass(frozen=True, slots=True)
class Return(Step):
    """A value is there again, as it was."""

    kind: ClassVar[str] = "return"
    value: int

    def event(self, graph: Graph, position: int) -> Event:
        return Event(position, self, None, born=(self.value,))


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, Leave.kind, Leave)
    monkeypatch.setitem(KINDS, Return.kind, Return)


OLD_FILE = Path(__file__).parents[1] / "files" / "plan-schema-1.json"
WIDE = 2  # 1000 bytes, which the first op makes, and the second and the last one read


def away() -> Schedule:
    """`three_layers` with `wide` away between its two uses."""
    before, between, after = steps(0, 1), steps(2, 3, 4, "f4"), steps(5, "f2", "f3", "f6")
    return Schedule((*before, Leave(WIDE), *between, Return(WIDE), *after))


# What there is ----------------------------------------------------------------------------------------


def test_the_present_kinds_are_registered_by_their_tags() -> None:
    assert {tag: KINDS[tag] for tag in ("compute", "free")} == {"compute": Compute, "free": Free}
    assert [repr(step) for step in (Compute(3), Free(2))] == ["Compute(op=3)", "Free(value=2)"]


def test_a_walk_says_what_each_step_does() -> None:
    graph = three_layers()
    assert list(walk(graph, steps(0, "f2"))) == [
        Event(0, Compute(0), graph.ops[0], born=(2,), died=()),
        Event(1, Free(2), None, born=(), died=(2,)),
    ]
    assert away().computed == [0, 1, 2, 3, 4, 5]


def test_a_kind_that_does_not_say_what_it_holds_is_a_bug() -> None:
    with pytest.raises(NotImplementedError, match="Step does not say what it holds"):
        list(walk(three_layers(), Schedule((Step(),))))


# What it holds ----------------------------------------------------------------------------------------


def test_the_referee_counts_a_kind_it_has_never_heard_of() -> None:
    timeline = simulate(three_layers(), away(), EXACT)
    assert timeline.live_bytes.tolist() == [
        1150, 1550, 550, 850, 854, 1154, 854, 1854, 1911, 904, 504, 204,
    ]  # fmt: skip
    assert (timeline.peak_step, timeline.peak_op) == (8, three_layers().ops[5])
    assert sum(holding.bytes for holding in timeline.holdings) == 1911 - 7  # the workspace is nobody's value
    assert timeline.phases[2] is None


def test_the_step_can_peak_where_no_op_runs() -> None:
    schedule = Schedule((*steps(0, 1), Leave(WIDE), *steps(2, 3, 4), Return(WIDE), *steps("f4", 5)))
    timeline = simulate(three_layers(), schedule, EXACT)
    assert (timeline.peak_step, timeline.peak_op, timeline.peak_bytes) == (6, None, 2154)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((Return(WIDE),), "step 0 brings back value 2, which was never made"),
        ((Compute(0), Return(WIDE)), "step 1 brings back value 2, which is alive"),
        ((Compute(0), Leave(WIDE), Compute(1)), r"step 2, op 1 .* reads value 2 \('wide'\), which was freed"),
        ((Compute(0), Leave(WIDE), Leave(WIDE)), r"step 2 frees value 2 \('wide'\), already freed"),
        ((Compute(6),), "step 0 computes op 6, which is not in the graph"),
    ],
)
def test_what_cannot_be_is_refused(schedule: tuple[Step, ...], message: str) -> None:
    with pytest.raises(IllegalSchedule, match=message):
        simulate(three_layers(), Schedule(schedule))


def test_it_has_lives_buffers_and_blocks() -> None:
    graph, schedule = three_layers(), away()
    spans = [(life.first, life.stop) for life in lives(graph, schedule) if life.value == WIDE]
    assert spans == [(0, 2), (7, 9)]
    layout = lay_out(graph, schedule, alignment=1)
    assert [(b.first, b.stop) for b in layout.buffers if b.births[0].value == WIDE] == spans
    assert cached(graph, schedule).allocated_bytes == 1024 + 1024 + 5 * 512  # in grains of 512, workspace too
    assert held_at_turn(graph, schedule) == {3, 4, 5}


# How it is shown --------------------------------------------------------------------------------------


def test_a_snapshot_shows_that_it_goes_and_comes() -> None:
    def actions(found: Any) -> Iterator[tuple[str, int]]:
        for event in found["device_traces"][0]:
            if event["frames"] and event["frames"][0]["name"].startswith("wide"):
                yield event["action"], event["size"]

    shown = list(actions(snapshot(Curve("away", three_layers(), away()))))
    once = [("alloc", 1000), ("free_requested", 1000), ("free_completed", 1000)]
    assert shown == [*once, *once]


# How it is written ------------------------------------------------------------------------------------


def test_a_plan_with_it_is_written_in_the_second_schema_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    solution = solved(three_layers(), away())
    save_solution(solution, path)
    document = json.loads(path.read_text())
    assert document["schema"] == 2
    assert document["scheduled"]["schedule"][:4] == [0, 1, ["leave", 2], 2]
    assert load_solution(path) == solution
    save_graph(three_layers(), path, away())
    assert load_graph(path) == (three_layers(), away())


def test_a_plan_without_it_is_written_as_it_always_was(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(three_layers(), path, steps(0, "f2"))
    document = json.loads(path.read_text())
    assert (document["schema"], document["schedule"]) == (1, [0, -3])


def test_a_plan_of_the_first_schema_is_read_and_written_again_with_a_checksum(
    tmp_path: Path,
) -> None:
    old, new = OLD_FILE, tmp_path / "plan.json"
    solution = load_solution(old)
    assert isinstance(solution, GraphSolution)
    assert solution.schedule == steps(0, 1, "f2", 2, 3, 4, "f4", 0, 5, "f2", "f3", "f6")
    assert solution.graph.assumptions == (Finding.UNPACKED, NoGradient(graph=0, output=1))
    save_solution(solution, new)
    assert json.dumps(editable(new), separators=(",", ":")) == old.read_text()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            ["tile", 2],
            r"schedule\[1\] is a step of kind 'tile'; this lowtide knows compute, free, leave, return",
        ),
        (["leave"], r"schedule\[1\] is a step of kind 'leave' with 0 fields; it has 1"),
        (["leave", 1, 2], r"schedule\[1\] is a step of kind 'leave' with 2 fields; it has 1"),
        (["leave", "wide"], r"schedule\[1\]\[1\] should be int, found 'wide'"),
        ([], r"schedule\[1\] is an empty row"),
        ([7], r"schedule\[1\]\[0\] should be str, found 7"),
        ({"leave": 2}, r"schedule\[1\] should be int, found \{'leave': 2\}"),
    ],
)
def test_what_is_no_step_is_refused_by_name(row: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(three_layers(), path, Schedule((Compute(0), Leave(WIDE))))
    document = editable(path)
    document["schedule"][1] = row
    path.write_text(json.dumps(document))
    with pytest.raises(BadFile, match=message):
        load_graph(path)


# What it does -----------------------------------------------------------------------------------------


def test_an_executor_refuses_it_by_name() -> None:
    drawing = Drawing()
    a, b, c = (drawing.value(name, 16) for name in "abc")
    drawing.op("aten.exp.default", [a], [b])
    drawing.op("aten.neg.default", [b], [c])
    schedule = Schedule((Compute(0), Leave(b), Return(b), Compute(1)))
    with pytest.raises(CannotRun, match=r"the schedule has a step of kind '(leave|return)'"):
        Executor(drawing.graph(outputs=[c]), {"a": torch.zeros(4)}, schedule=schedule)


def test_code_is_not_written_for_it() -> None:
    with pytest.raises(CannotApply, match="the schedule has a step of kind 'leave', which no code"):
        _Half(cast(Any, None)).do(Leave(WIDE))
