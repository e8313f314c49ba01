"""Graphs, traces and plans as JSON files: written whole or not at all, read strictly.

A file is data, never code: only JSON is parsed, every field is checked for its type, and the last word is
the graph's own validator's, or the referee's. What was written is read as an equal object, to the last bit.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict

from lowtide.chain.chain import Chain, Kind
from lowtide.chain.plan import Plan
from lowtide.ir.graph import Call, Graph
from lowtide.ir.notation import (
    NEWEST_SCHEMA,
    graph_from_json,
    graph_to_json,
    schedule_from_json,
    schedule_to_json,
    schema_of,
)
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import simulate
from lowtide.ir.validate import validate
from lowtide.solvers.chains.worst import worst_moment
from lowtide.solvers.solution import Confirmation, GraphSolution, Solution, Status
from lowtide.text.documents import Json, Reader, Unexpected, read_document, understanding, write_document

_PLAN = "plan"  # the kind of document; what is in it tells a schedule from a plan for a chain
_CHAINED = "solution"
_SCHEDULED = "scheduled"


def save_graph(graph: Graph, path: str | os.PathLike[str], schedule: Schedule | None = None) -> None:
    """Write `graph`, and the schedule that goes with it if there is one, to `path`.

    Raises:
        MalformedGraph: the graph breaks its own rules, and could not be read again.
        BadFile: the file cannot be written.
    """
    fields: dict[str, Json] = {"graph": graph_to_json(validate(graph))}
    if schedule is not None:
        fields["schedule"] = schedule_to_json(schedule)
    write_document(path, "graph", fields, schema_of(graph, schedule))


def load_graph(path: str | os.PathLike[str]) -> tuple[Graph, Schedule | None]:
    """Read what `save_graph` wrote.

    Raises:
        BadFile: the file is missing, damaged, cut off, not lowtide's, of another schema, or its
            contents are not a well-formed graph.
    """
    document = read_document(path, "graph", ("graph", "schedule"), NEWEST_SCHEMA)
    with understanding(path):
        graph = validate(graph_from_json(Reader(document["graph"], "graph")))
        raw = document.get("schedule")
        return graph, None if raw is None else schedule_from_json(Reader(raw, "schedule"))


def save_solution(solution: Solution | GraphSolution, path: str | os.PathLike[str]) -> None:
    """Write `solution` to `path`: the plan and the chain it is for, or the schedule and its graph.

    Raises:
        MalformedGraph: the graph breaks its own rules, and could not be read again.
        BadFile: the file cannot be written.
    """
    if isinstance(solution, GraphSolution):
        scheduled: dict[str, Json] = {_SCHEDULED: _scheduled_to_json(solution)}
        write_document(path, _PLAN, scheduled, schema_of(solution.graph, solution.schedule))
    else:
        write_document(path, _PLAN, {_CHAINED: _solution_to_json(solution)})


def load_solution(path: str | os.PathLike[str]) -> Solution | GraphSolution:
    """Read what `save_solution` wrote. The plan or schedule is replayed again.

    Raises:
        BadFile: the file is missing, damaged, cut off, not lowtide's, of another schema, or its plan does
            not peak where it says.
    """
    document = read_document(path, _PLAN, (_CHAINED, _SCHEDULED), NEWEST_SCHEMA)
    with understanding(path):
        if _SCHEDULED in document:
            return _scheduled_from_json(Reader(document[_SCHEDULED], _SCHEDULED))
        return _solution_from_json(Reader(document[_CHAINED], _CHAINED))


# Plans for chains -----------------------------------------------------------------------------------


def _solution_to_json(solution: Solution) -> Json:
    confirmation = solution.confirmation
    return {
        "chain": _chain_to_json(solution.chain),
        "method": solution.method,
        "plan": str(solution.plan),
        "status": solution.status.value,
        "peak_bytes": solution.peak_bytes,
        "lower_bound_bytes": solution.lower_bound_bytes,
        "extra_seconds": solution.extra_seconds,
        "planning_seconds": solution.planning_seconds,
        "budget_bytes": solution.budget_bytes,
        "objective_bytes": solution.objective_bytes,
        "confirmation": None if confirmation is None else asdict(confirmation),
        **_remark_to_json(solution.remark),
    }


def _chain_to_json(chain: Chain) -> Json:
    calls: list[Json] = [[call.module, call.call, call.first, call.stop] for call in chain.calls]
    return {
        "output_bytes": list(chain.output_bytes),
        "gradient_bytes": list(chain.gradient_bytes),
        "saved_bytes": list(chain.saved_bytes),
        "forward_bytes": list(chain.forward_bytes),
        "backward_bytes": list(chain.backward_bytes),
        "settled_bytes": list(chain.settled_bytes),
        "output_saved_by_itself": list(chain.output_saved_by_itself),
        "output_saved_by_next": list(chain.output_saved_by_next),
        "forward_seconds": list(chain.forward_seconds),
        "backward_seconds": list(chain.backward_seconds),
        "base_bytes": chain.base_bytes,
        "name": chain.name,
        "names": list(chain.names),
        "kinds": [kind.value for kind in chain.kinds],
        "places": list(chain.places),
        "calls": calls,
        "timed": chain.timed,
        "changed_buffers": list(chain.changed_buffers),
        "inputs": list(chain.inputs),
        "fingerprint": chain.fingerprint,
    }


def _solution_from_json(entry: Reader) -> Solution:
    solution = Solution(
        chain=_chain_from_json(entry["chain"]),
        method=entry["method"].of(str),
        plan=Plan.read(entry["plan"].of(str)),
        status=entry["status"].choice(Status),
        peak_bytes=entry["peak_bytes"].of(int),
        lower_bound_bytes=entry["lower_bound_bytes"].of(int),
        extra_seconds=_seconds(entry["extra_seconds"]),
        planning_seconds=_seconds(entry["planning_seconds"]),
        budget_bytes=entry["budget_bytes"].optional(int),
        objective_bytes=entry["objective_bytes"].optional(int),
        confirmation=_confirmation_from_json(entry["confirmation"]),
        remark=_remark_from_json(entry),
    )
    _agree(solution.peak_bytes, worst_moment(solution.chain, solution.plan).peak_bytes)
    return solution


def _agree(said_bytes: int, replayed_bytes: int) -> None:
    if said_bytes != replayed_bytes:
        raise Unexpected(
            f"its plan is said to peak at {said_bytes} bytes, and replayed it peaks at {replayed_bytes}. "
            "Plan again"
        )


def _confirmation_from_json(entry: Reader) -> Confirmation | None:
    if entry.json_value is None:
        return None
    return Confirmation(
        peak_bytes=entry["peak_bytes"].of(int),
        recomputed_ops=entry["recomputed_ops"].of(int),
        extra_seconds=_seconds(entry["extra_seconds"]),
        plain_peak_bytes=entry["plain_peak_bytes"].of(int),
        plain_seconds=_seconds(entry["plain_seconds"]),
    )


def _chain_from_json(entry: Reader) -> Chain:
    chain = Chain(
        output_bytes=entry["output_bytes"].ints(),
        gradient_bytes=entry["gradient_bytes"].ints(),
        saved_bytes=entry["saved_bytes"].ints(),
        forward_bytes=entry["forward_bytes"].ints(),
        backward_bytes=entry["backward_bytes"].ints(),
        settled_bytes=entry["settled_bytes"].ints(),
        output_saved_by_itself=entry["output_saved_by_itself"].many(lambda flag: flag.of(bool)),
        output_saved_by_next=entry["output_saved_by_next"].many(lambda flag: flag.of(bool)),
        forward_seconds=entry["forward_seconds"].many(_seconds),
        backward_seconds=entry["backward_seconds"].many(_seconds),
        base_bytes=entry["base_bytes"].of(int),
        name=entry["name"].of(str),
        names=entry["names"].many(_text),
        kinds=entry["kinds"].many(lambda kind: kind.choice(Kind)),
        places=entry["places"].ints(),
        calls=entry["calls"].many(_call_from_json),
        timed=entry["timed"].of(bool),
        changed_buffers=entry["changed_buffers"].many(_text),
        inputs=entry["inputs"].many(_text),
        fingerprint=entry["fingerprint"].of(str),
    )
    if chain.places and len(chain.places) != len(chain) + 1:
        raise Unexpected(f"{entry.where} has {len(chain)} layers, but {len(chain.places)} places")
    return chain


def _call_from_json(entry: Reader) -> Call:
    fields = entry.many(lambda field: field)
    if len(fields) != 4:
        raise Unexpected(f"{entry.where} should have 4 fields, found {len(fields)}")
    module, *numbers = fields
    call, first, stop = (number.of(int) for number in numbers)
    return Call(module.of(str), call, first, stop)


# Schedules for graphs -------------------------------------------------------------------------------


def _scheduled_to_json(solution: GraphSolution) -> Json:
    return {
        "graph": graph_to_json(validate(solution.graph)),
        "method": solution.method,
        "schedule": schedule_to_json(solution.schedule),
        "status": solution.status.value,
        "peak_bytes": solution.peak_bytes,
        "lower_bound_bytes": solution.lower_bound_bytes,
        "extra_seconds": solution.extra_seconds,
        "planning_seconds": solution.planning_seconds,
        "budget_bytes": solution.budget_bytes,
        "least_extra_seconds": solution.least_extra_seconds,
        "objective_bytes": solution.objective_bytes,
        "plain_peak_bytes": solution.plain_peak_bytes,
        "fingerprint": solution.fingerprint,
        "inputs": list(solution.inputs),
        "torch_version": solution.torch_version,
        **_remark_to_json(solution.remark),
    }


def _scheduled_from_json(entry: Reader) -> GraphSolution:
    solution = GraphSolution(
        graph=validate(graph_from_json(entry["graph"])),
        method=entry["method"].of(str),
        schedule=schedule_from_json(entry["schedule"]),
        status=entry["status"].choice(Status),
        peak_bytes=entry["peak_bytes"].of(int),
        lower_bound_bytes=entry["lower_bound_bytes"].of(int),
        extra_seconds=_seconds(entry["extra_seconds"]),
        planning_seconds=_seconds(entry["planning_seconds"]),
        budget_bytes=entry["budget_bytes"].optional(int),
        least_extra_seconds=_seconds(entry["least_extra_seconds"]),
        objective_bytes=entry["objective_bytes"].optional(int),
        plain_peak_bytes=entry["plain_peak_bytes"].optional(int),
        fingerprint=entry["fingerprint"].of(str),
        inputs=entry["inputs"].many(_text),
        torch_version=entry["torch_version"].of(str),
        remark=_remark_from_json(entry),
    )
    _agree(solution.peak_bytes, simulate(solution.graph, solution.schedule).peak_bytes)
    return solution


# Fields ---------------------------------------------------------------------------------------------


def _text(entry: Reader) -> str:
    return entry.of(str)


def _remark_to_json(remark: str) -> dict[str, Json]:
    """Most plans have none, and their files read as they did before there were any."""
    return {"remark": remark} if remark else {}


def _remark_from_json(entry: Reader) -> str:
    return entry["remark"].of(str) if "remark" in entry.of(dict) else ""


def _seconds(entry: Reader) -> float:
    seconds = float(entry.number())
    if not 0 <= seconds < math.inf:
        raise Unexpected(f"{entry.where} is no time: {seconds}")
    return seconds
