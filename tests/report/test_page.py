"""The page: its data is what the referee counts, it asks nobody for anything, and names in it are inert."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import lowtide.report.page
from lowtide.chain.chain import Chain
from lowtide.cost.measure import Reading
from lowtide.errors import MissingExtra
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule, in_order, straight
from lowtide.report.content.contents import ARENA, FRONTIER, Contents, of_layers, of_ops, with_readings
from lowtide.report.content.curve import Curve
from lowtide.report.content.strip import Piece, strip_of
from lowtide.report.export.perfetto import perfetto
from lowtide.report.export.snapshot import snapshot_bytes
from lowtide.report.page import page
from lowtide.report.page.embedding import embedded
from lowtide.solvers import solve
from lowtide.solvers.frontier import frontier
from lowtide.solvers.solution import Confirmation, Solution
from lowtide.solvers.summary import shares
from tests.helpers.handmade import solved
from tests.helpers.layouts import stepped
from tests.helpers.reported import EVIL, SMALL_TOTALS, embedded_in, every_second_again, small, tower
from tests.helpers.slices import in_slices, two_layers

MEGA = 1_000_000


# The data -----------------------------------------------------------------------------------------------


def added_up(data: Any, curve: Any) -> np.ndarray:
    """Bytes by moment and category, as the page's script adds them up."""
    stack = np.zeros((len(curve["ops"].get("target", [])), len(data["categories"])), dtype=np.int64)
    lives = curve["lives"]
    columns = (lives.get(key, []) for key in ("first", "stop", "category", "bytes"))
    for first, stop, category, count in zip(*columns, strict=True):
        stack[first:stop, category] += count
    stack[:, data["categories"].index("workspace")] += curve["ops"].get("workspace", [])
    return stack


def test_the_data_of_a_page_is_what_is_held_at_every_moment() -> None:
    data = embedded_in(page(of_ops(small())))
    planned = data["curves"][1]
    assert added_up(data, planned).sum(axis=1).tolist() == SMALL_TOTALS
    assert (planned["peak"], planned["peakMoment"], data["budget"]) == (1911, 6, 2000)
    assert [data["phases"][phase] for phase in planned["ops"]["phase"]] == [
        "forward", "forward", "forward", "forward", "backward", "recompute", "backward",
    ]  # fmt: skip
    assert planned["ops"]["time"] == [10**9, 2 * 10**9, 4 * 10**9, 0, 8 * 10**9, 10**9, 5 * 10**9]
    word = data["words"].__getitem__
    names = [word(name) for name in planned["lives"]["name"]]
    assert names == [
        "weight",
        "image",
        "wide",
        "middle",
        "narrow",
        "loss",
        "narrow.grad",
        "wide",
        "weight.grad",
    ]
    assert [word(module) for module in planned["lives"]["module"]][2:5] == ["stem", "layers.0", "layers.1"]


@given(stepped())
def test_the_data_adds_up_to_the_timeline_of_any_plan(drawn: tuple[Graph, Schedule]) -> None:
    contents = of_ops(solved(*drawn))
    data: Any = embedded(contents)
    for curve, found in zip((contents.plain, contents.planned), data["curves"], strict=True):
        assert np.array_equal(added_up(data, found), curve.stack)
        assert found["peak"] == curve.timeline.peak_bytes


@given(stepped())
def test_spots_lie_in_the_arena_and_overlap_at_no_moment(drawn: tuple[Graph, Schedule]) -> None:
    contents = of_ops(solved(*drawn))
    data: Any = embedded(contents)
    arena, first = data["arena"], data["curves"][1]["lives"].get("first", [])
    spots = [
        (first[life], stop, offset, offset + count)
        for life, offset, count, stop in zip(
            *(arena["spots"].get(key, []) for key in ("life", "offset", "bytes", "stop")), strict=True
        )
    ]
    assert all(0 <= low < high <= arena["bytes"] for _, _, low, high in spots)
    for place, (begin, end, low, high) in enumerate(spots):
        for other in spots[:place]:
            assert end <= other[0] or other[1] <= begin or high <= other[2] or other[3] <= low
    live = np.zeros(len(contents.planned.moments) + 1, dtype=np.int64)
    for begin, end, low, high in spots:
        live[begin:end] += high - low
    assert live.max(initial=0) == arena["lowerBound"]


def test_the_strip_has_the_layers_in_the_order_of_the_forward() -> None:
    solution = small()
    assert strip_of(solution) == (
        Piece("stem", 0, 1000, 1, 1.0),
        Piece("layers.0", 400, 0, 0, 0.0),
        Piece("layers.1", 300, 0, 0, 0.0),
        Piece("(outside of any module)", 4, 0, 0, 0.0),
    )
    assert sum(piece.kept_bytes for piece in strip_of(solution)) == sum(
        s.kept_bytes for s in shares(solution)
    )


def test_the_strip_of_a_chain_has_a_piece_for_each_layer() -> None:
    chain = Chain.from_sizes([8, 16, 32, 8], forward_seconds=[1.0, 2.0, 3.0])
    found = solve(chain, "chen-sqrt")
    assert found.plan.segments
    again = [any(s.start < k <= s.stop for s in found.plan.segments) for k in (1, 2, 3)]
    pieces = strip_of(found)
    assert [piece.name for piece in pieces] == ["layer 1", "layer 2", "layer 3"]
    assert [bool(piece.runs_again) for piece in pieces] == again
    assert [piece.recomputed_bytes for piece in pieces] == [16 * again[0], 32 * again[1], 8 * again[2]]


# What is told -------------------------------------------------------------------------------------------


def facts(contents: Contents) -> dict[str, str]:
    return {fact.what: fact.figure for fact in contents.facts}


def test_a_page_of_ops_tells_what_the_plan_saves_and_costs() -> None:
    contents = of_ops(small())
    assert facts(contents) == {
        "plain peak": "2.1 KiB",  # 50 + 100 + 1000 + 400 + 300 + 4 + 300
        "planned peak": "1.9 KiB",
        "saved": "243 B",
        "extra time": "1.00 s",
        "budget": "2.0 KiB",
        "lower bound": "1.9 KiB",
        "status": "feasible",
        "method": "",
    }
    assert contents.absent == {FRONTIER: "No frontier was asked for."}


def test_a_plain_step_that_was_written_otherwise_is_explained() -> None:
    contents = of_ops(replace(small(), plain_peak_bytes=3072))
    assert facts(contents)["plain peak"] == "3.0 KiB"
    assert contents.notes[0].endswith("as it is written the step peaks at 3.0 KiB.")
    plain = Curve("plain", contents.plain.graph, contents.plain.schedule)
    assert "larger blocks" in of_ops(replace(small(), plain_peak_bytes=3072), plain).notes[0]
    assert of_ops(small(), plain).notes == ()


def test_a_plan_of_layers_says_what_it_has_not() -> None:
    chain = Chain.from_sizes([8, 16, 32, 8], name="bare")
    solution = solve(chain, "chen-sqrt")
    assert isinstance(solution, Solution)
    contents = of_layers(solution)
    assert set(contents.absent) == {FRONTIER, ARENA}
    assert contents.layout is None
    assert "holds layers, not ops" in contents.notes[0]
    assert contents.planned_peak_bytes == solution.peak_bytes
    html = page(contents)
    assert contents.absent[ARENA] in html
    assert embedded_in(html)["arena"] is None
    assert embedded_in(html)["frontier"] is None


def test_what_a_dry_run_confirmed_comes_before_what_the_chain_says() -> None:
    solution = solve(Chain.from_sizes([8, 16, 32, 8]), "chen-sqrt")
    tried = Confirmation(2048, 5, 0.25, 4096, 1.0)
    contents = of_layers(replace(solution, confirmation=tried))
    found = facts(contents)
    assert (found["plain peak"], found["planned peak"], found["saved"]) == ("4.0 KiB", "2.0 KiB", "2.0 KiB")
    assert found["extra time"] == "250.0 ms"
    assert (contents.plain_peak_bytes, contents.planned_peak_bytes) == (4096, 2048)
    dry = of_ops(small())
    told = of_layers(replace(solution, confirmation=tried), dry.plain, dry.planned)
    assert "with them the plain step peaks at 4.0 KiB" in told.notes[0]
    assert told.layout is not None


def test_readings_stand_beside_what_was_predicted() -> None:
    contents = of_ops(small())
    plain = Reading("cpu", 4308, 150, 1.0, tuple(range(5000)))
    told = with_readings(contents, plain, None)
    assert told.facts[-1] == ("measured, plain", "4.2 KiB", "predicted 2.1 KiB, -50.00 %")
    assert told.notes == ("planned by by hand: the device ran out of memory when it was measured.",)
    (measured,) = embedded_in(page(told))["measured"]
    assert (measured["predicted"], measured["events"]) == (2154, 5000)
    assert len(measured["bytes"]) <= 1200
    assert max(measured["bytes"]) == 4999  # a stretch of events shows the one that holds most


def test_the_frontier_marks_the_plan() -> None:
    graph = tower(6)
    found = frontier(graph, 4)
    solution = solve(graph, "auto", found[1].peak_bytes)
    data = embedded_in(page(of_ops(solution, frontier=found)))["frontier"]
    assert [point["peak"] for point in data["points"]] == [point.peak_bytes for point in found]
    assert data["chosen"]["peak"] == solution.peak_bytes
    assert data["lowerBound"] == solution.lower_bound_bytes


# The file -----------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and the text of the first title and heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts.setdefault(self.tags[-1][0], data)


@pytest.fixture(scope="module")
def evil_page() -> str:
    graph = tower(6, evil=True)
    return page(of_ops(solved(graph, every_second_again(graph, 6)), notes=[EVIL]))


def test_names_from_the_graph_are_inert(evil_page: str) -> None:
    found = Tags(evil_page)
    scripts = [attributes for tag, attributes in found.tags if tag == "script"]
    assert [attributes.get("type") for attributes in scripts] == ["text/plain", None, None]
    assert EVIL not in evil_page
    assert found.texts["h1"] == f"{EVIL}, on cpu"
    assert EVIL in embedded_in(evil_page)["words"]


def test_a_page_refers_to_nothing_outside_of_itself(evil_page: str) -> None:
    tags = Tags(evil_page).tags
    assert not [tag for tag in tags if {"src", "href", "srcset", "action", "data"} & set(tag[1])]
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} & {tag for tag, _ in tags}
    policy = next(a["content"] for t, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "connect-src" not in policy
    for name in ("page.js", "page.css", "page.html"):
        own = files(lowtide.report.page).joinpath(name).read_text(encoding="utf-8")
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttp|innerHTML|import\(", own), (
            name
        )


def test_the_same_plan_gives_the_same_page(evil_page: str) -> None:
    graph = tower(6, evil=True)
    assert page(of_ops(solved(graph, every_second_again(graph, 6)), notes=[EVIL])) == evil_page


def test_a_page_of_five_thousand_ops_stays_small() -> None:
    layers = 2500
    graph = tower(layers)
    contents = of_ops(solved(graph, every_second_again(graph, layers)))
    assert len(graph.ops) > 5000
    assert len(page(contents).encode()) < 6 * MEGA


def test_without_plotly_there_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowtide.report.page, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"a page to look at needs plotly: pip install 'lowtide\[page\]'"):
        page(of_ops(small()))


# Slices -------------------------------------------------------------------------------------------------


def test_the_data_says_from_when_to_when_something_runs_in_slices() -> None:
    graph = in_slices(two_layers())
    order = [*range(30), *range(15, 30), *range(30, 64)]  # one stretch runs twice
    schedule = in_order(graph, order)
    data = embedded_in(page(of_ops(solved(graph, schedule))))
    plain, planned = data["curves"]
    assert plain["slices"] == {}
    assert len(plain["ops"]["target"]) == len(two_layers().ops)
    slices = planned["slices"]
    assert [data["words"][name] for name in slices["name"]] == [
        "layers.0", "layers.1", "layers.1", "layers.1", "layers.0",
    ]  # fmt: skip
    assert slices["first"] == [0, 15, 30, 47, 63]
    assert slices["stop"] == [15, 30, 45, 63, 79]
    assert (set(slices["count"]), set(slices["of"])) == ({4}, {8})


def test_a_stretch_ends_where_something_else_runs() -> None:
    graph = in_slices(two_layers())
    order = [0, 1, 31, *range(2, 31), *range(32, 64)]
    curve = Curve("planned", graph, in_order(graph, order))
    assert [found[1:] for found in curve.slices] == [(0, 2), (16, 31), (32, 48), (48, 64)]


def test_a_page_has_a_row_for_each_family_of_regions_and_names_in_it_are_inert() -> None:
    graph = in_slices(two_layers())
    assert graph.tiled is not None
    blocks = tuple(replace(block, where=EVIL) for block in graph.tiled.blocks)
    evil = replace(graph, tiled=replace(graph.tiled, blocks=blocks))
    html = page(of_ops(solved(evil, straight(evil))))
    row = re.search(r"<table class='families'>.*</table>", html)
    assert row is not None
    assert "<td class=number>2,048</td><td class=number>4.00 s</td>" in row[0]
    assert EVIL not in html
    assert "families'>" not in page(of_ops(small()))


def test_a_plan_in_slices_is_exported_too() -> None:
    graph = in_slices(two_layers())
    curve = Curve("planned", graph, straight(graph))
    events = [event for event in perfetto([curve])["traceEvents"] if event["ph"] == "X"]  # type: ignore[index, union-attr, call-overload]
    assert len(events) == len(graph.ops)
    assert pickle.loads(snapshot_bytes(curve))["segments"]
