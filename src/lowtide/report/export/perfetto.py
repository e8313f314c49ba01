"""Curves as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: a process a curve, a slice an op.

Times are predicted. An op without one gets a nanosecond, or, where nothing was timed, a microsecond, so that
no two ops begin at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from lowtide._version import __version__
from lowtide.ir.simulate import CATEGORIES
from lowtide.report.content.curve import Curve
from lowtide.text.documents import Json

_OPS = 1  # the only thread of a process
_LEAST_US = 1e-3
_UNTIMED_US = 1.0


def perfetto_text(curves: Sequence[Curve]) -> str:
    """The file that Perfetto opens."""
    return json.dumps(perfetto(curves), separators=(",", ":"), allow_nan=False)


def perfetto(curves: Sequence[Curve]) -> dict[str, Json]:
    """The trace as an object of Chrome's trace event format.

    At every op a counter has the bytes held by category, those of its workspace among them; their sum peaks
    where the curve does.
    """
    events: list[Json] = [event for number, curve in enumerate(curves, 1) for event in _events(curve, number)]
    timed = all(curve.timed for curve in curves)
    times = "predicted" if timed else "not known: an op is drawn as a microsecond"
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": f"lowtide {__version__}", "times": times},
    }


def _events(curve: Curve, process: int) -> Iterator[Json]:
    where: dict[str, Json] = {"pid": process, "tid": _OPS}
    yield {**where, "ph": "M", "name": "process_name", "args": {"name": f"{curve.name}: {curve.graph.name}"}}
    yield {**where, "ph": "M", "name": "process_sort_index", "args": {"sort_index": process}}
    yield {**where, "ph": "M", "name": "thread_name", "args": {"name": "ops"}}
    shown = [column for column in range(len(CATEGORIES)) if curve.stack[:, column].any()]
    now_us = 0.0
    for moment, (op, phase, held) in enumerate(
        zip(curve.ops, curve.phases, curve.stack.tolist(), strict=True)
    ):
        lasting_us = max(op.seconds * 1e6, _LEAST_US) if curve.timed else _UNTIMED_US
        at = {**where, "ts": now_us}
        counted: dict[str, Json] = {CATEGORIES[column].value: held[column] for column in shown}
        yield {**at, "ph": "C", "name": "bytes held", "args": counted}
        yield {
            **at,
            "ph": "X",
            "dur": lasting_us,
            "name": op.label,
            "cat": phase.value,
            "args": {
                "op": moment,
                "module": op.module,
                "workspace bytes": op.workspace_bytes,
                "held bytes": sum(held),
            },
        }
        now_us += lasting_us
