"""Graphs, traces and plans as JSON files: written whole or not at all, read strictly.

A file is data, never code: only JSON is parsed, every field is checked for its type, and the last word is
the graph's own validator's, or the referee's. What was written is read as an equal object, to the last bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TypeVar

from lowtide.chain import Chain, Kind
from lowtide.documents import Json, Reader, Unexpected, read_document, understanding, write_document
from lowtide.graph import Arg, Call, Graph, Op, Origin, Phase, Ref, Role, Symbol, Tensor, Value
from lowtide.plans import Plan
from lowtide.schedule import Compute, Free, Schedule, Step
from lowtide.solution import Confirmation, Solution, Status
from lowtide.unrolling import replay
from lowtide.validation import validate

T = TypeVar("T")


def save_graph(graph: Graph, path: str | os.PathLike[str], schedule: Schedule | None = None) -> None:
    """Write `graph`, and the schedule that goes with it if there is one, to `path`.

    Raises:
        MalformedGraph: the graph breaks its own rules, and could not be read again.
        BadFile: the file cannot be written.
    """
    fields: dict[str, Json] = {"graph": _graph_to_json(validate(graph))}
    if schedule is not None:
        # One whole number a step: op n is n, the free of value n is -n-1.
        fields["schedule"] = [
            step.op if isinstance(step, Compute) else -step.value - 1 for step in schedule.steps
        ]
    write_document(path, "graph", fields)


def load_graph(path: str | os.PathLike[str]) -> tuple[Graph, Schedule | None]:
    """Read what `save_graph` wrote.

    Raises:
        BadFile: the file is missing, damaged, cut off, not lowtide's, of another schema, or its
            contents are not a well-formed graph.
    """
    document = read_document(path, "graph")
    with understanding(path):
        graph = validate(_graph_from_json(Reader(document["graph"], "graph")))
        raw = document.get("schedule")
        return graph, None if raw is None else _schedule_from_json(Reader(raw, "schedule"))


def save_solution(solution: Solution, path: str | os.PathLike[str]) -> None:
    """Write `solution` to `path`: the plan, the chain it is for, and what is known about both.

    Raises:
        BadFile: the file cannot be written.
    """
    write_document(path, "plan", {"solution": _solution_to_json(solution)})


def load_solution(path: str | os.PathLike[str]) -> Solution:
    """Read what `save_solution` wrote. The plan is replayed again.

    Raises:
        BadFile: the file is missing, damaged, cut off, not lowtide's, of another schema, or its plan does
            not peak where it says.
    """
    document = read_document(path, "plan")
    with understanding(path):
        return _solution_from_json(Reader(document["solution"], "solution"))


# Writing graphs -------------------------------------------------------------------------------------


def _graph_to_json(graph: Graph) -> Json:
    return {
        "name": graph.name,
        "origin": graph.origin.value,
        "device": graph.device,
        "profiled_on": graph.profiled_on,
        "notes": list(graph.notes),
        "outputs": [*sorted(graph.outputs)],
        "values": [
            {
                "bytes": value.bytes,
                "role": value.role.value,
                "name": value.name,
                "module": value.module,
                "device": value.device,
            }
            for value in graph.values
        ],
        "tensors": [
            [tensor.value, list(tensor.shape), list(tensor.stride), tensor.offset, tensor.dtype]
            for tensor in graph.tensors
        ],
        "ops": [_op_to_json(op) for op in graph.ops],
    }


def _op_to_json(op: Op) -> Json:
    return {
        "target": op.target,
        "args": [_arg_to_json(arg) for arg in op.args],
        "kwargs": {name: _arg_to_json(arg) for name, arg in op.kwargs},
        "outputs": list(op.outputs),
        "reads": list(op.reads),
        "creates": list(op.creates),
        "mutates": list(op.mutates),
        "phase": op.phase.value,
        "module": op.module,
        "call": op.call,
        "section": op.section,
        "random": op.random,
        "workspace_bytes": op.workspace_bytes,
        "seconds": op.seconds,
        "extrapolated": op.extrapolated,
    }


def _arg_to_json(arg: Arg) -> Json:
    if isinstance(arg, tuple):
        return [_arg_to_json(item) for item in arg]
    if isinstance(arg, Ref):
        return {"tensor": arg.tensor}
    if isinstance(arg, Symbol):
        return {arg.kind: arg.text}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": repr(arg)}  # JSON has no infinity; attention masks do
    return arg


# Reading graphs -------------------------------------------------------------------------------------


def _graph_from_json(json_graph: Reader) -> Graph:
    return Graph(
        name=json_graph["name"].of(str),
        origin=json_graph["origin"].choice(Origin),
        device=json_graph["device"].of(str),
        profiled_on=json_graph["profiled_on"].optional(str),
        notes=json_graph["notes"].many(lambda note: note.of(str)),
        outputs=frozenset(json_graph["outputs"].ints()),
        values=tuple(_numbered(json_graph["values"], _value_from_json)),
        tensors=tuple(_numbered(json_graph["tensors"], _tensor_from_json)),
        ops=tuple(_numbered(json_graph["ops"], _op_from_json)),
    )


def _numbered(table: Reader, read: Callable[[int, Reader], T]) -> Iterable[T]:
    return (read(position, entry) for position, entry in enumerate(table.many(lambda entry: entry)))


def _value_from_json(position: int, entry: Reader) -> Value:
    return Value(
        id=position,
        bytes=entry["bytes"].of(int),
        role=entry["role"].choice(Role),
        name=entry["name"].of(str),
        module=entry["module"].of(str),
        device=entry["device"].of(str),
    )


def _tensor_from_json(position: int, entry: Reader) -> Tensor:
    fields = entry.many(lambda field: field)
    if len(fields) != 5:
        raise Unexpected(f"{entry.where} should have 5 fields, found {len(fields)}")
    value, shape, stride, offset, dtype = fields
    return Tensor(position, value.of(int), shape.ints(), stride.ints(), offset.of(int), dtype.of(str))


def _op_from_json(position: int, entry: Reader) -> Op:
    kwargs: Mapping[str, Json] = entry["kwargs"].of(dict)
    return Op(
        id=position,
        target=entry["target"].of(str),
        args=entry["args"].many(_arg_from_json),
        kwargs=tuple((name, _arg_from_json(entry["kwargs"][name])) for name in kwargs),
        outputs=entry["outputs"].many(lambda output: output.optional(int)),
        reads=entry["reads"].ints(),
        creates=entry["creates"].ints(),
        mutates=entry["mutates"].ints(),
        phase=entry["phase"].choice(Phase),
        module=entry["module"].of(str),
        call=entry["call"].of(int),
        section=entry["section"].of(int),
        random=entry["random"].of(bool),
        workspace_bytes=entry["workspace_bytes"].of(int),
        seconds=float(entry["seconds"].number()),
        extrapolated=entry["extrapolated"].of(bool),
    )


def _arg_from_json(entry: Reader) -> Arg:
    found = entry.json_value
    if isinstance(found, list):
        return entry.many(_arg_from_json)
    if not isinstance(found, dict):
        return found
    if len(found) != 1:
        raise Unexpected(f"{entry.where} should name one thing, found {len(found)}")
    (kind,) = found
    if kind == "tensor":
        return Ref(entry["tensor"].of(int))
    text = entry[kind].of(str)
    if kind != "float":
        return Symbol(kind, text)
    if text not in ("inf", "-inf", "nan"):
        raise Unexpected(f"{entry.where} is no float: {text!r:.40}")
    return float(text)


def _schedule_from_json(entry: Reader) -> Schedule:
    def step(code: int) -> Step:
        return Compute(code) if code >= 0 else Free(-code - 1)

    return Schedule(tuple(step(code) for code in entry.ints()))


# Solutions ------------------------------------------------------------------------------------------


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
    )
    peak_bytes = replay(solution.chain, solution.plan).peak_bytes
    if peak_bytes != solution.peak_bytes:
        raise Unexpected(
            f"its plan is said to peak at {solution.peak_bytes} bytes, and replayed it peaks at "
            f"{peak_bytes}. Plan again"
        )
    return solution


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


def _text(entry: Reader) -> str:
    return entry.of(str)


def _seconds(entry: Reader) -> float:
    seconds = float(entry.number())
    if not 0 <= seconds < math.inf:
        raise Unexpected(f"{entry.where} is no time: {seconds}")
    return seconds
