"""Ways to train side by side: the table, what is said beneath it, and the picture."""

from __future__ import annotations

import pytest

from lowtide.planner.peer_steps import PeerReading
from lowtide.planner.peer_ways import IN_ONE_PIECE, PeerKind, PeerRow
from lowtide.planner.peers import PeerComparison
from lowtide.report.picture.peers import draw_peers, measured_points, series_of, time_axis
from lowtide.report.text.peers import peers_table, print_peers, problems

MIB = 1 << 20


def reading(
    mib: float, ms: float, eager_ms: float | None = 10.0, difference: str | None = None
) -> PeerReading:
    eager = None if eager_ms is None else eager_ms / 1e3
    return PeerReading(int(mib * MIB), ms / 1e3, eager, 1.0, 2.0, 3.0, None, difference)


def planned(label: str, mib: float, ms: float, budget: float, remark: str | None = None) -> PeerRow:
    found = reading(mib, ms)
    predicted = int(mib * MIB) + 1
    return PeerRow(label, PeerKind.PLANNED, None, remark, found, int(budget * MIB), predicted, 0.1, 3)


ROWS = (
    PeerRow("eager", PeerKind.EAGER, reading=reading(400, 10), predicted_peak_bytes=400 * MIB),
    PeerRow("checkpointing", PeerKind.LIBRARY, remark="timm's", reading=reading(150, 13)),
    PeerRow("compile 1", PeerKind.COMPILED, reading=reading(380, 8, difference="its loss is 3, eager's 2")),
    PeerRow("compile 0.2", PeerKind.COMPILED, "there is no C++ compiler"),
    PeerRow("compile 0", PeerKind.COMPILED, "there is no C++ compiler"),
    PeerRow("compile + checkpointing", PeerKind.COMPILED, remark="timm's", reading=reading(140, 11)),
    planned("lowtide within checkpointing", 149, 11, 150),
    PeerRow("lowtide tiles within checkpointing", PeerKind.PLANNED, IN_ONE_PIECE),
    planned("lowtide, lowest", 121, 12, 120),
)
COMPARISON = PeerComparison("net", "cpu", None, ROWS)


def test_the_table_has_what_was_measured_and_dashes() -> None:
    assert str(peers_table(COMPARISON)).splitlines() == [
        "way to train                  peak MiB  predicted   a step  of eager",
        "eager                            400.0      400.0  10.0 ms     1.00×",
        "checkpointing                    150.0          –  13.0 ms     1.30×",
        "compile 1                        380.0          –   8.0 ms     0.80×",
        "compile 0.2                          –          –        –         –",
        "compile 0                            –          –        –         –",
        "compile + checkpointing          140.0          –  11.0 ms     1.10×",
        "lowtide within checkpointing     149.0      149.0  11.0 ms     1.10×",
        "lowtide, lowest                  121.0      121.0  12.0 ms     1.20×",
    ]


def test_beneath_it_stands_what_went_wrong_and_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    print_peers("net, on cpu", COMPARISON, ["small"])
    told = capsys.readouterr().out
    assert "compile 0.2, compile 0: there is no C++ compiler\n" in told
    assert "compile 1: it does not train as eager does: its loss is 3, eager's 2\n" in told
    assert "lowtide, lowest: 1.0 MiB over its budget\n" in told
    assert "note: checkpointing, compile + checkpointing: timm's\n" in told
    assert "note: within 1 of the budgets nothing runs in slices, so that tiles change nothing\n" in told
    assert "note: small\n" in told
    assert "interrupted" not in told
    assert max(map(len, told.splitlines())) <= 120


def test_that_it_was_interrupted_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    print_peers("net", PeerComparison("net", "cpu", None, ROWS[:1], interrupted=True))
    assert "interrupted: not every way was tried" in capsys.readouterr().out


def test_nothing_is_wrong_with_a_row_that_was_measured() -> None:
    assert [list(problems(row)) for row in ROWS[:2]] == [[], []]


def test_points_are_where_rows_were_measured() -> None:
    found = list(measured_points(ROWS))
    assert [(point.label, point.series, point.peak_bytes) for point in found[3:]] == [
        ("compile + checkpointing", "", 140 * MIB),
        ("lowtide within checkpointing", "lowtide", 149 * MIB),
        ("lowtide, lowest", "lowtide", 121 * MIB),
    ]
    assert [point.time for point in found] == pytest.approx([1.0, 1.3, 0.8, 1.1, 1.1, 1.2])
    assert time_axis(ROWS) == "a step (times an eager one)"


def test_without_eager_steps_times_are_milliseconds() -> None:
    rows = [PeerRow("compile 1", PeerKind.COMPILED, reading=reading(1, 7, eager_ms=None))]
    assert [point.time for point in measured_points(rows)] == [pytest.approx(7)]
    assert time_axis(rows) == "a step (ms)"


@pytest.mark.parametrize(
    ("label", "series"),
    [
        ("lowtide, all kept", "lowtide"),
        ("lowtide tiles within compile 0.5", "lowtide tiles"),
        ("lowtide tiles, lowest", "lowtide tiles"),
    ],
)
def test_plans_of_one_kind_are_joined(label: str, series: str) -> None:
    assert series_of(label) == series


def test_the_picture_names_what_others_do_and_has_a_legend_of_plans() -> None:
    svg = draw_peers(COMPARISON, "svg", title="net, on cpu").decode()
    for label in (
        "eager",
        "checkpointing",
        "compile 1",
        "compile + checkpointing",
        ">lowtide<",
        "net, on cpu",
    ):
        assert label in svg
    assert "lowtide, lowest" not in svg


def test_nothing_measured_can_be_drawn_too() -> None:
    nothing = PeerComparison("net", "cpu", None, ROWS[3:4])
    assert draw_peers(nothing, "png", title="net").startswith(b"\x89PNG")
