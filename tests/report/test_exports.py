"""Exports of a curve: PyTorch's viewer and Perfetto read them, and they peak where the curve does."""

from __future__ import annotations

import json
import pickle
import pickletools
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from torch.cuda import _memory_viz

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan
from lowtide.chain.unroll import unrolled_graph, unrolled_schedule
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import EXACT
from lowtide.report.content.curve import Curve
from lowtide.report.export.perfetto import perfetto, perfetto_text
from lowtide.report.export.snapshot import snapshot, snapshot_bytes
from tests.helpers.layouts import stepped
from tests.helpers.reported import SMALL_TOTALS, every_second_again, small, tower


def small_curve() -> Curve:
    solution = small()
    return Curve("planned", solution.graph, solution.schedule)


def tower_curve(layers: int = 12) -> Curve:
    graph = tower(layers)
    return Curve("planned", graph, every_second_again(graph, layers))


# The snapshot -------------------------------------------------------------------------------------------


def held(found: dict[str, Any]) -> Iterator[int]:
    """Bytes after each event of the trace."""
    sign = {"alloc": 1, "free_completed": -1}
    return accumulate(sign.get(event["action"], 0) * event["size"] for event in found["device_traces"][0])


def test_the_events_of_a_snapshot_are_those_of_the_schedule() -> None:
    found: Any = snapshot(small_curve())
    events = [(e["action"], e["size"]) for e in found["device_traces"][0] if "free_req" not in e["action"]]
    mega = 1 << 21
    assert events[:3] == [("segment_alloc", mega)] * 3
    assert events[3:] == [
        ("alloc", 50), ("alloc", 100),  # resident
        ("alloc", 1000), ("alloc", 400), ("free_completed", 1000), ("alloc", 300), ("alloc", 4),
        ("alloc", 300), ("free_completed", 300), ("alloc", 1000),
        ("alloc", 50), ("alloc", 7), ("free_completed", 7),  # a gradient, then workspace
        ("free_completed", 300), ("free_completed", 400), ("free_completed", 1000),
    ]  # fmt: skip
    assert max(held(found)) == max(SMALL_TOTALS)


def test_events_name_the_value_and_the_op_and_tell_the_predicted_time() -> None:
    found: Any = snapshot(small_curve())
    again = [e for e in found["device_traces"][0] if e["action"] == "alloc" and e["size"] == 1000][1]
    assert [(frame["filename"], frame["line"], frame["name"]) for frame in again["frames"]] == [
        ("stem", 5, "wide (activations)"),
        ("stem", 5, "aten.mm.default (recompute)"),
    ]
    assert again["time_us"] == 15_000_000  # 1, 2, 4 and 8 seconds


@given(stepped())
def test_a_snapshot_peaks_where_the_curve_does_and_no_two_blocks_overlap(
    drawn: tuple[Graph, Schedule],
) -> None:
    curve = Curve("any", *drawn)
    found: Any = snapshot(curve)
    assert max(held(found), default=0) == curve.timeline.peak_bytes
    segments = [(s["address"], s["address"] + s["total_size"]) for s in found["segments"]]
    alive: dict[int, int] = {}
    for event in found["device_traces"][0]:
        low, high = event["addr"], event["addr"] + event["size"]
        assert any(first <= low and high <= stop for first, stop in segments)
        if event["action"] == "alloc":
            assert all(high <= start or start + size <= low for start, size in alive.items())
            alive[low] = event["size"]
        elif event["action"] == "free_completed":
            assert alive.pop(low) == event["size"]
    blocks = {
        block["address"]: block["size"]
        for segment in found["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert blocks == alive


def test_pytorchs_own_functions_read_a_snapshot() -> None:
    found: Any = snapshot(tower_curve())
    assert "segments: 3" in _memory_viz.segsum(found)  # which adds up the blocks of each segment
    assert f"{len(found['device_traces'][0])} entries" in _memory_viz.trace(found)
    assert "x12 (activations)" not in _memory_viz.memory(found, format_flamegraph=str)  # given back
    assert "layers.0.weight.grad (gradients)" in _memory_viz.memory(found, format_flamegraph=str)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(found)
    assert "Allocator State History" in _memory_viz.segment_plot(found)


VIEWER_READS = {  # the opcodes that the viewer's reader of pickles has
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "TUPLE1", "TUPLE2",
    "TUPLE3", "SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "NEWTRUE", "NEWFALSE", "NONE",
}  # fmt: skip


def test_a_snapshot_file_is_data_that_the_viewer_reads() -> None:
    made = snapshot_bytes(tower_curve())
    found = {opcode.name for opcode, _, _ in pickletools.genops(made)}
    assert found <= VIEWER_READS
    assert made[:2] == b"\x80\x04"
    assert pickle.loads(made) == snapshot(tower_curve())


def test_a_chain_can_be_exported_too() -> None:
    chain = Chain.from_sizes([8, 16, 32, 8])
    curve = Curve("planned", unrolled_graph(chain), unrolled_schedule(chain, Plan.at([2])), EXACT)
    assert max(held(snapshot(curve))) == curve.timeline.peak_bytes


# Perfetto -----------------------------------------------------------------------------------------------

NUMBER = {"type": "number", "minimum": 0}
EVENT = {"pid": {"type": "integer"}, "tid": {"type": "integer"}, "name": {"type": "string", "minLength": 1}}


def event(kind: str, required: list[str], **fields: Any) -> dict[str, Any]:
    """A schema of one kind of event."""
    known = {**EVENT, "ph": {"const": kind}, "args": {"type": "object"}, **fields}
    return {
        "type": "object",
        "properties": known,
        "required": ["ph", "pid", "tid", "name", "args", *required],
        "additionalProperties": False,
    }


TRACE = {  # what ui.perfetto.dev and chrome://tracing need of the trace event format
    "type": "object",
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    event("M", [], name={"enum": ["process_name", "process_sort_index", "thread_name"]}),
                    event(
                        "C",
                        ["ts"],
                        ts=NUMBER,
                        args={"type": "object", "additionalProperties": NUMBER, "minProperties": 1},
                    ),
                    event("X", ["ts", "dur", "cat"], ts=NUMBER, dur=NUMBER, cat={"type": "string"}),
                ]
            },
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
    "required": ["traceEvents"],
}


def events(found: Any, kind: str, process: int = 1) -> list[Any]:
    return [e for e in found["traceEvents"] if e["ph"] == kind and e["pid"] == process]


def test_a_trace_is_of_the_trace_event_format() -> None:
    found = json.loads(perfetto_text([small_curve(), tower_curve()]))
    jsonschema.validate(found, TRACE)
    broken = {"traceEvents": [{**events(found, "X")[0], "dur": "long"}]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, TRACE)


def test_a_trace_has_a_slice_for_every_compute_and_counters_for_what_is_held() -> None:
    found = perfetto([small_curve()])
    slices = events(found, "X")
    assert [(s["name"], s["cat"]) for s in slices] == [
        ("stem: aten.mm", "forward"),
        ("layers.0: aten.relu", "forward"),
        ("layers.1: aten.relu", "forward"),
        ("aten.sum", "forward"),
        ("layers.1: aten.mul", "backward"),
        ("stem: aten.mm", "recompute"),
        ("stem: aten.mm", "backward"),
    ]
    assert [s["dur"] for s in slices] == [1e6, 2e6, 4e6, 1e-3, 8e6, 1e6, 5e6]
    assert [sum(c["args"].values()) for c in events(found, "C")] == SMALL_TOTALS
    assert events(found, "C")[-1]["args"] == {
        "parameters": 50,
        "gradients": 50,
        "batch": 100,
        "activations": 1404,
        "temporaries": 300,
        "workspace": 7,
    }


@given(stepped())
def test_the_counters_of_any_trace_peak_where_the_curve_does(drawn: tuple[Graph, Schedule]) -> None:
    curve = Curve("any", *drawn)
    found = perfetto([curve, curve])
    for process in (1, 2):
        times = [s["ts"] for s in events(found, "X", process)]
        assert all(one < other for one, other in pairwise(times))
        held = [sum(c["args"].values()) for c in events(found, "C", process)]
        assert held == curve.timeline.live_bytes[list(curve.moments)].tolist()
    assert found["otherData"]["times"].startswith("not known")  # type: ignore[index, call-overload, union-attr]
