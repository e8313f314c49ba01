"""A schedule in words: what is told adds up to what the referee counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import IllegalSchedule
from lowtide.ir.graph import Graph, Phase
from lowtide.ir.keep import forward_values, keep_only
from lowtide.ir.schedule import Compute, Schedule, straight
from lowtide.ir.simulate import simulate
from lowtide.report.text.scheduled import print_schedule
from lowtide.solvers.solution import GraphSolution, Status
from lowtide.solvers.summary import Share, explained, held_at_turn, share_table, shares, summary, turn_of
from lowtide.text.names import in_common, ranges, together, unnumbered
from lowtide.text.table import Table, lined_up
from tests.helpers.handmade import Drawing, chain, graphs, solved, steps, three_layers

# The referee -----------------------------------------------------------------------------------------


def held_before(graph: Graph, schedule: Schedule, position: int) -> int:
    """What the replay holds before a step, without what is resident and without any workspace."""
    if position == 0:
        return 0
    timeline = simulate(graph, schedule)
    before = schedule.steps[position - 1]
    workspace = graph.ops[before.op].workspace_bytes if isinstance(before, Compute) else 0
    return int(timeline.live_bytes[position - 1]) - workspace - timeline.resident_bytes


@given(graphs(seconds=st.floats(0, 1e3)), st.data())
def test_what_is_told_adds_up_to_what_the_referee_counts(graph: Graph, data: st.DataObject) -> None:
    values = sorted(forward_values(graph))
    kept = data.draw(st.sets(st.sampled_from(values)) if values else st.just(set()))
    try:
        solution = solved(graph, keep_only(graph, kept))
    except IllegalSchedule:  # a random graph may overwrite what it reads later
        return
    found = shares(solution)
    turn = turn_of(graph, solution.schedule)
    assert sum(share.kept_bytes for share in found) == held_before(graph, solution.schedule, turn)
    plainly = straight(graph)
    assert sum(share.plain_bytes for share in found) == held_before(graph, plainly, turn_of(graph, plainly))
    assert sum(share.ops_again for share in found) == sum(solution.recomputed.values())
    assert sum(share.seconds_again for share in found) == pytest.approx(solution.extra_seconds)
    assert len({(share.module, share.call) for share in found}) == len(found)
    assert all(share.recomputed_bytes <= share.plain_bytes for share in found)


def test_the_turn_comes_before_recomputation_and_after_the_last_free_of_the_forward() -> None:
    graph = three_layers()
    assert turn_of(graph, steps(0, 1, 2, "f3", 3, 4, 1, 5)) == 5
    assert turn_of(graph, steps(0, 1, 2, 3, "f3", "f2", 0, 1, 4, 5)) == 6
    assert turn_of(graph, steps(0, "f2", 0, 1, 2, 3, 4, 5)) == 6  # run again within the forward
    assert turn_of(graph, steps()) == 0
    assert held_at_turn(graph, steps(0, 1, 2, 3, "f3", "f2", 0, 1, 4, 5)) == {4, 5}


# By hand ---------------------------------------------------------------------------------------------

WITHOUT_MIDDLE = steps(0, 1, 2, "f3", 3, 4, "f4", 1, 5, "f2", "f3", "f6")


def planned(**fields: object) -> GraphSolution:
    return solved(three_layers(), WITHOUT_MIDDLE, **fields)


def test_each_module_is_told_what_it_keeps_gives_up_and_runs_again() -> None:
    assert shares(planned()) == (
        Share("stem", 0, plain_bytes=1000, kept_bytes=1000),
        Share("layers.0", 0, plain_bytes=400, recomputed_bytes=400, ops_again=1, seconds_again=2.0),
        Share("layers.1", 0, plain_bytes=300, kept_bytes=300),
        Share("", 0, plain_bytes=4, kept_bytes=4),
    )


def test_an_op_that_runs_three_times_runs_again_twice() -> None:
    twice = steps(0, 1, 2, "f3", 1, "f3", 3, 4, "f4", 1, 5, "f2", "f3", "f6")
    solution = solved(three_layers(), twice)
    again = {share.module: (share.ops_again, share.seconds_again) for share in shares(solution)}
    assert again["layers.0"] == (2, 4.0)
    assert solution.extra_seconds == 4.0


TEXT = """\
three layers, on cpu
plain peak     2,154 B  with everything kept
planned peak   1,911 B  at stem: aten.mm
saved            243 B  11.3 %
extra time      2.00 s  10.0 % of the step; 1 op runs again
budget         2,000 B  89 B to spare
lower bound    1,911 B  any schedule holds that at stem: aten.mm
status        feasible  not proven to be the best
method                  by hand, in 1.5 ms

module                         calls  plain B   kept  recomputed  ops again        ms
stem                               1    1,000  1,000           0          0      0.00
layers.0                           1      400      0         400          1  2,000.00
layers.1                           1      300    300           0          0      0.00
(outside of any module)            1        4      4           0          0      0.00
held when the forward is over      4    1,704  1,304         400          1  2,000.00"""


def test_a_solution_prints_as_what_it_saves_costs_and_does() -> None:
    solution = planned(budget_bytes=2000)
    assert str(solution) == explained(solution) == TEXT
    assert "graph" not in repr(solution)  # thousands of ops


def test_the_report_says_the_same_on_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    print_schedule("three layers, on cpu", planned(budget_bytes=2000), notes=["the sea is blue"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [*TEXT.splitlines(), "note: the sea is blue"]
    print_schedule("[red]", planned(), 4000)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        "[red]",
        "plain peak     4,000 B  as it is written",
        "planned peak   1,911 B  at stem: aten.mm",
        "saved          2,089 B  52.2 %",
    ]


def facts(solution: GraphSolution) -> dict[str, tuple[str, str]]:
    return {what: (figure, remark) for what, figure, remark in summary(solution)}


def test_a_summary_says_how_good_a_schedule_is_known_to_be() -> None:
    assert facts(planned(status=Status.OPTIMAL))["status"] == (
        "optimal",
        "proven: the method finds nothing better",
    )
    assert facts(planned(least_extra_seconds=1.5))["status"] == (
        "feasible",
        "not proven to be the best; within the budget it takes at least 1.50 s",
    )
    assert "budget" not in facts(planned())


def test_the_plain_peak_is_the_one_given_or_the_solutions_own_or_that_of_keeping_everything() -> None:
    assert facts(planned())["plain peak"] == ("2,154 B", "with everything kept")
    assert facts(planned(plain_peak_bytes=3000))["plain peak"] == ("3,000 B", "as it is written")
    assert summary(planned(plain_peak_bytes=3000), 4000)[0] == ("plain peak", "4,000 B", "as it is written")


def test_without_times_ops_are_counted_and_no_column_is_empty() -> None:
    graph = chain()
    solution = solved(graph, straight(graph))
    assert facts(solution)["extra time"] == ("unknown", "0 ops run again")
    assert share_table(solution).titles[-1] == "ops again"


def test_what_is_kept_may_be_what_plainly_is_not() -> None:
    """`a` is not needed by the backward, and `b`, which is, can be made from it."""
    drawing = Drawing()
    batch, a, b, loss, gradient = (
        drawing.value(name, size) for name, size in zip("xablg", (1, 10, 99, 4, 5), strict=True)
    )
    drawing.op("aten.sin.default", [batch], [a], module="a")
    drawing.op("aten.cos.default", [a], [b], module="b")
    drawing.op("aten.sum.default", [b], [loss])
    drawing.op("aten.mul.Tensor", [loss, b], [gradient], phase=Phase.BACKWARD)
    graph = drawing.graph([loss, gradient])
    found = shares(solved(graph, steps(0, 1, 2, "f2", 1, "f1", 3, "f2")))
    assert found == (
        Share("b", 0, plain_bytes=99, recomputed_bytes=99, ops_again=1),
        Share("a", 0, kept_bytes=10),
        Share("", 0, plain_bytes=4, kept_bytes=4),
    )


# Many modules ----------------------------------------------------------------------------------------


def tower(layers: int, calls: int = 1) -> Graph:
    """Layers of 100 bytes on top of each other, all needed by one backward op; or `calls` of one module."""
    drawing = Drawing()
    values = [drawing.value("x", 7)]
    for layer in range(layers):
        values.append(drawing.value("y", 100))
        drawing.op("aten.sin.default", values[-2:-1], values[-1:], module=f"layers.{layer}.act", seconds=0.1)
    drawing.op("aten.mul.Tensor", values[1:], [drawing.value("g", 1)], phase=Phase.BACKWARD)
    graph = drawing.graph([len(drawing.values) - 1], name="tower")
    if calls == 1:
        return graph
    ops = tuple(replace(op, module="cell", call=op.id) if op.module else op for op in graph.ops)
    return replace(graph, ops=ops)


def given_up(graph: Graph, layers: range) -> GraphSolution:
    """A tower whose `layers` are freed as soon as the next has run, and run again before the backward."""
    last = len(graph.ops) - 1
    codes: list[int | str] = []
    for layer in range(last):
        codes.append(layer)
        codes += [f"f{layer}"] if layer - 1 in layers else []
    codes += [f"f{last}"] if last - 1 in layers else []
    return solved(graph, steps(*codes, *layers, last, *(f"f{value}" for value in range(1, last + 1))))


def test_modules_that_are_treated_alike_share_a_row_and_say_which_they_are() -> None:
    table = share_table(given_up(tower(12), range(2, 6)))
    assert table.rows == (
        ("layers.{0–1, 6–11}.act", "8", "800", "800", "0", "0", "0.00"),
        ("layers.{2–5}.act", "4", "400", "0", "400", "4", "400.00"),
    )
    assert table.totals[1:] == ("12", "1,200", "800", "400", "4", "400.00")


def test_calls_of_a_module_that_are_not_treated_alike_are_told_apart() -> None:
    table = share_table(given_up(tower(5, calls=5), range(1, 3)))
    assert [row[:2] for row in table.rows] == [("cell, calls 0, 3–4", "3"), ("cell, calls 1–2", "2")]
    assert share_table(solved(tower(3, calls=3), straight(tower(3, calls=3)))).rows[0][:2] == ("cell", "3")


def test_many_rows_are_cut_and_what_is_left_out_is_counted() -> None:
    drawing = Drawing()
    made = [drawing.value("y", 10 * number) for number in range(1, 41)]
    for number, value in enumerate(made):
        drawing.op("aten.ones.default", [], [value], module=f"{'part' * 20}{chr(97 + number % 26)}{number}x")
    drawing.op("aten.cat.default", made, [drawing.value("g", 1)], phase=Phase.BACKWARD)
    graph = drawing.graph([40])
    table = share_table(solved(graph, straight(graph)), most=10)
    assert len(table.rows) == 11
    assert table.rows[-1][:3] == ("… 30 more rows", "30", f"{sum(range(10, 310, 10)):,}")
    assert table.totals[2] == f"{sum(range(10, 410, 10)):,}"
    assert max(len(row[0]) for row in table.rows) <= 40


@given(st.integers(1, 30), st.data())
def test_printed_rows_add_up_to_printed_totals(layers: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layers - 1))
    table = share_table(given_up(tower(layers), range(start, data.draw(st.integers(start, layers)))), most=2)
    for column in range(1, 7):
        numbers = [float(row[column].replace(",", "")) for row in table.rows]
        assert sum(numbers) == pytest.approx(float(table.totals[column].replace(",", "")), abs=1e-6)


# Words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "stars", "which"),
    [
        (["a.b"], "a.b", "a.b"),
        (["a.3.b", "a.1.b", "a.2.b"], "a.*.b", "a.{1–3}.b"),
        (["a.3.b.0", "a.1.b.0"], "a.*.b.0", "a.{1, 3}.b.0"),
        (["a.3.b.0", "a.1.b.1"], "a.*.b.*", "a.*.b.*"),
        (["input of h.0: Pow2D", "input of h.1: Pow2D"], "input of h.*: Pow2D", "input of h.{0–1}: Pow2D"),
    ],
)
def test_names_that_differ_in_numbers_are_told_as_one(texts: list[str], stars: str, which: str) -> None:
    assert in_common(texts) == stars
    assert together(texts) == which
    assert len({unnumbered(text) for text in texts}) == 1


def test_only_whole_numbers_of_a_path_are_numbers() -> None:
    assert unnumbered("layer1.0.conv2") == "layer1.*.conv2"
    assert unnumbered("output of 1: MaxPool2DBackward0") == "output of *: MaxPool2DBackward0"


def test_ranges_are_told_in_order() -> None:
    assert ranges([]) == ""
    assert ranges([4, 0, 1, 2, 9, 8]) == "0–2, 4, 8–9"


def test_a_table_lines_up() -> None:
    table = Table(("a", "bb"), (("xyz", "1"), ("", "22")), ("in", "23"), frozenset([1]))
    assert str(table).splitlines() == ["a    bb", "xyz   1", "     22", "in   23"]
    assert lined_up([("a", ""), ("b", "c")]) == "a\nb  c"
