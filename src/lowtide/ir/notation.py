"""Graphs and schedules as JSON can hold them, and back, to the last bit."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TypeVar

from lowtide.ir.assumptions import (
    Assumption,
    Finding,
    GradientLayouts,
    Guess,
    Layout,
    NodesBetween,
    NoGradient,
    UseByUse,
)
from lowtide.ir.graph import (
    Arg,
    Fused,
    Graph,
    Op,
    Origin,
    Phase,
    Ref,
    Role,
    Signs,
    Symbol,
    Tensor,
    Tile,
    Tiled,
    Value,
)
from lowtide.ir.schedule import KINDS, Compute, Free, Schedule, Step
from lowtide.text.documents import SCHEMA, Json, Reader, Unexpected

T = TypeVar("T")
_NO_GRADIENT = re.compile(
    r"no gradient enters output (?P<output>\d{1,9}) of graph (?P<graph>\d{1,9})", re.ASCII
)
_USE_BY_USE = re.compile(
    r"input (?P<input>\d{1,9}) of graph (?P<graph>\d{1,9}) enters once for each use", re.ASCII
)
_NODES_BETWEEN = re.compile(r"nodes of autograd between graphs: (?P<counts>\{.*\})")
_GUESS = re.compile(r"taken to be (?P<number>[^:]+): (?P<line>.+)", re.DOTALL)
_LAYOUTS = re.compile(
    r"gradients enter graph (?P<graph>\d{1,9}) with shapes and strides (?P<layouts>\[.*\])", re.ASCII
)
NEWEST_SCHEMA = 4  # of documents with a graph, a schedule, or both
_WITH_ROWS = 2  # steps that are neither a compute nor a free
_WITH_TILES = 3
_WITH_KERNELS = 4

# Writing --------------------------------------------------------------------------------------------


def graph_to_json(graph: Graph) -> Json:
    """Ids are positions, and are not written."""
    return {
        "name": graph.name,
        "origin": graph.origin.value,
        "device": graph.device,
        "profiled_on": graph.profiled_on,
        "notes": list(graph.notes),
        "assumptions": [str(assumption) for assumption in graph.assumptions],
        "outputs": [*sorted(graph.outputs)],
        "results": [[name, tensor] for name, tensor in graph.results],
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
        "tensors": [_tensor_to_json(tensor) for tensor in graph.tensors],
        "ops": [_op_to_json(op) for op in graph.ops],
        **({} if graph.tiled is None else {"tiled": _tiled_to_json(graph.tiled)}),
        **({} if graph.fused is None else {"fused": _fused_to_json(graph.fused)}),
    }


def _fused_to_json(fused: Fused) -> Json:
    """What a graph was before ops became kernels, and which they became."""
    return {
        "plain": graph_to_json(fused.plain),
        "members": [list(ops) for ops in fused.members],
        "written": [*sorted(fused.written)],
    }


def _tiled_to_json(tiled: Tiled) -> Json:
    """What a graph was before some of its ops were cut into slices, and where these are."""
    return {
        "plain": graph_to_json(tiled.plain),
        "origin": list(tiled.origin),
        "blocks": [
            {
                "first": block.first,
                "stop": block.stop,
                "ops": list(block.ops),
                "count": block.count,
                "extent": block.extent,
                "where": block.where,
                "spared_bytes": block.spared_bytes,
            }
            for block in tiled.blocks
        ],
    }


def _tensor_to_json(tensor: Tensor) -> Json:
    """Few tensors have other signs than their memory, and only these say so."""
    row: list[Json] = [
        tensor.value,
        list(tensor.shape),
        list(tensor.stride),
        tensor.offset,
        tensor.dtype,
    ]
    return row if tensor.signs is Signs.AS_THEY_ARE else [*row, tensor.signs.value]


def schedule_to_json(schedule: Schedule) -> Json:
    """One whole number for a compute or a free: op n is n, the free of value n is -n-1.

    A step of any other kind is a row: its tag, then its fields.
    """
    return [_step_to_json(step) for step in schedule.steps]


def schema_of(graph: Graph, schedule: Schedule | None) -> int:
    """The lowest schema of a document that can hold both: rows of steps need the second, slices the third,
    kernels of several ops the fourth.
    """
    if graph.fused is not None:
        return _WITH_KERNELS
    if graph.tiled is not None:
        return _WITH_TILES
    rows = (isinstance(_step_to_json(step), list) for step in schedule or ())
    return _WITH_ROWS if any(rows) else SCHEMA


def _step_to_json(step: Step) -> Json:
    match step:
        case Compute(op):
            return op
        case Free(value):
            return -value - 1
        case _:
            return [step.kind, *(getattr(step, field.name) for field in fields(step))]


def _op_to_json(op: Op) -> Json:
    return {
        "target": op.target,
        "args": [_arg_to_json(arg) for arg in op.args],
        "kwargs": {name: _arg_to_json(arg) for name, arg in op.kwargs},
        "outputs": list(op.outputs),
        "reads": list(op.reads),
        "creates": list(op.creates),
        "mutates": list(op.mutates),
        "updates": list(op.updates),
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


# Reading --------------------------------------------------------------------------------------------


def graph_from_json(json_graph: Reader) -> Graph:
    """What `graph_to_json` wrote; every field is of its type, and nothing more is checked."""
    return Graph(
        name=json_graph["name"].of(str),
        origin=json_graph["origin"].choice(Origin),
        device=json_graph["device"].of(str),
        profiled_on=json_graph["profiled_on"].optional(str),
        notes=json_graph["notes"].many(lambda note: note.of(str)),
        assumptions=json_graph["assumptions"].many(_assumption_from_json),
        outputs=frozenset(json_graph["outputs"].ints()),
        results=json_graph["results"].many(_result_from_json),
        values=tuple(_numbered(json_graph["values"], _value_from_json)),
        tensors=tuple(_numbered(json_graph["tensors"], _tensor_from_json)),
        ops=tuple(_numbered(json_graph["ops"], _op_from_json)),
        tiled=_tiled_from_json(json_graph["tiled"]) if "tiled" in json_graph.of(dict) else None,
        fused=_fused_from_json(json_graph["fused"]) if "fused" in json_graph.of(dict) else None,
    )


def _fused_from_json(entry: Reader) -> Fused:
    return Fused(
        plain=graph_from_json(entry["plain"]),
        members=entry["members"].many(lambda ops: ops.ints()),
        written=frozenset(entry["written"].ints()),
    )


def _tiled_from_json(entry: Reader) -> Tiled:
    return Tiled(
        plain=graph_from_json(entry["plain"]),
        origin=entry["origin"].ints(),
        blocks=entry["blocks"].many(_tile_from_json),
    )


def _tile_from_json(entry: Reader) -> Tile:
    return Tile(
        first=entry["first"].of(int),
        stop=entry["stop"].of(int),
        ops=entry["ops"].ints(),
        count=entry["count"].of(int),
        extent=entry["extent"].of(int),
        where=entry["where"].of(str),
        spared_bytes=entry["spared_bytes"].of(int),
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
    if len(fields) not in (5, 6):
        raise Unexpected(f"{entry.where} should have 5 or 6 fields, found {len(fields)}")
    value, shape, stride, offset, dtype = fields[:5]
    signs = fields[5].choice(Signs) if len(fields) == 6 else Signs.AS_THEY_ARE
    return Tensor(position, value.of(int), shape.ints(), stride.ints(), offset.of(int), dtype.of(str), signs)


def _result_from_json(entry: Reader) -> tuple[str, int]:
    fields = entry.many(lambda field: field)
    if len(fields) != 2:
        raise Unexpected(f"{entry.where} should be a name and a tensor, found {len(fields)} fields")
    return fields[0].of(str), fields[1].of(int)


def _assumption_from_json(entry: Reader) -> Assumption:
    text = entry.of(str)
    if found := _NO_GRADIENT.fullmatch(text):
        return NoGradient(output=int(found[1]), graph=int(found[2]))
    if found := _USE_BY_USE.fullmatch(text):
        return UseByUse(input=int(found["input"]), graph=int(found["graph"]))
    if found := _LAYOUTS.fullmatch(text):
        return GradientLayouts(int(found["graph"]), tuple(_layouts(found["layouts"], entry.where)))
    if found := _GUESS.fullmatch(text):
        return Guess(found["number"], found["line"])
    if found := _NODES_BETWEEN.fullmatch(text):
        return NodesBetween(tuple(_counts(found["counts"], entry.where)))
    return entry.choice(Finding)


def _counts(text: str, where: str) -> Iterator[tuple[str, int]]:
    try:
        for name, count in json.loads(text).items():
            if type(count) is not int:
                raise ValueError
            yield name, count
    except (AttributeError, ValueError):
        raise Unexpected(f"{where} should say how many nodes there are of each name, found {text}") from None


def _layouts(text: str, where: str) -> Iterator[Layout | None]:
    try:
        layouts = json.loads(text)
        for layout in layouts:
            shape, strides = layout or ((), ())
            if not all(type(number) is int for number in (*shape, *strides)):
                raise ValueError
            yield layout and (tuple(shape), tuple(strides))
    except (TypeError, ValueError):
        raise Unexpected(f"{where} should have pairs of shapes and strides, found {text}") from None


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
        updates=entry["updates"].ints(),
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


def schedule_from_json(entry: Reader) -> Schedule:
    """What `schedule_to_json` wrote."""
    return Schedule(entry.many(_step_from_json))


def _step_from_json(entry: Reader) -> Step:
    if isinstance(entry.json_value, list):
        return _row_from_json(entry)
    code = entry.of(int)
    return Compute(code) if code >= 0 else Free(-code - 1)


def _row_from_json(entry: Reader) -> Step:
    row = entry.many(lambda field: field)
    if not row:
        raise Unexpected(f"{entry.where} is an empty row, and says no kind of step")
    tag, numbers = row[0].of(str), row[1:]
    kind = KINDS.get(tag)
    if kind is None:
        raise Unexpected(
            f"{entry.where} is a step of kind {tag!r:.40}; this lowtide knows {', '.join(KINDS)}. "
            "Read it with the version that wrote it"
        )
    if len(numbers) != len(fields(kind)):
        raise Unexpected(
            f"{entry.where} is a step of kind {tag!r} with {len(numbers)} fields; it has {len(fields(kind))}"
        )
    return kind(*(number.of(int) for number in numbers))
