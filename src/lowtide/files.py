"""Graphs and traces as JSON files: written whole or not at all, read strictly.

A file is data, never code: only JSON is parsed, every field is checked for its type, and the graph's
own validator has the last word. Reading what was written gives an equal object, to the last bit.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar

from lowtide.errors import BadFile, MalformedGraph
from lowtide.graph import Arg, Graph, Op, Origin, Phase, Ref, Role, Symbol, Tensor, Value
from lowtide.schedule import Compute, Free, Schedule, Step
from lowtide.validation import validate

SCHEMA = 1
_TOO_DEEP = "it is nested too deeply to be lowtide's"
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def save_graph(graph: Graph, path: str | os.PathLike[str], schedule: Schedule | None = None) -> None:
    """Write `graph`, and the schedule that goes with it if there is one, to `path`.

    Raises:
        MalformedGraph: the graph breaks its own rules, and could not be read again.
        BadFile: the file cannot be written.
    """
    document: dict[str, Json] = {
        "lowtide": "graph",
        "schema": SCHEMA,
        "graph": _graph_to_json(validate(graph)),
    }
    if schedule is not None:
        # One whole number a step: op n is n, the free of value n is -n-1.
        document["schedule"] = [
            step.op if isinstance(step, Compute) else -step.value - 1 for step in schedule.steps
        ]
    write_text(path, json.dumps(document, separators=(",", ":"), allow_nan=False))


def load_graph(path: str | os.PathLike[str]) -> tuple[Graph, Schedule | None]:
    """Read what `save_graph` wrote.

    Raises:
        BadFile: the file is missing, damaged, cut off, not lowtide's, of another schema, or its
            contents are not a well-formed graph.
    """
    document = _read_document(path)
    try:
        graph = validate(_graph_from_json(_Reader(document["graph"], "graph")))
        raw = document.get("schedule")
        schedule = None if raw is None else _schedule_from_json(_Reader(raw, "schedule"))
    except (_Unexpected, MalformedGraph, KeyError) as error:
        reason = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
        raise BadFile(path, reason) from None
    except RecursionError:
        raise BadFile(path, _TOO_DEEP) from None
    return graph, schedule


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one, never a part."""
    target = Path(path)
    try:
        handle, scratch = tempfile.mkstemp(dir=target.parent or ".", prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(scratch, 0o644)
            os.replace(scratch, target)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise BadFile(path, f"{error.strerror}", doing="write") from None


def _read_document(path: str | os.PathLike[str]) -> dict[str, Json]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise BadFile(path, f"{error.strerror}") from None
    except UnicodeDecodeError:
        raise BadFile(path, "it is not text") from None
    except RecursionError:
        raise BadFile(path, _TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise BadFile(
            path, f"it is not JSON from line {error.lineno}, column {error.colno}: damaged or cut off?"
        ) from None
    except ValueError as error:  # NaN, or a number of more digits than Python will read
        raise BadFile(path, f"it holds an impossible number ({error})") from None
    if not isinstance(document, dict) or document.get("lowtide") != "graph":
        raise BadFile(path, "it is not a lowtide graph file")
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:  # True equals 1
        raise BadFile(
            path,
            f"it has schema {schema!r:.40}; this lowtide reads schema {SCHEMA}. "
            "Write it again with this version",
        )
    return document


def _refuse_constant(literal: str) -> float:
    raise ValueError(f"{literal} is not JSON")


# Writing --------------------------------------------------------------------------------------------


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


# Reading --------------------------------------------------------------------------------------------


class _Unexpected(Exception):
    """A field does not hold what it should; the message says which and what."""


class _Reader:
    """One JSON value and where it stands in the file, read by what it should be."""

    def __init__(self, json_value: Json, where: str) -> None:
        self.json_value = json_value
        self.where = where

    def __getitem__(self, key: str) -> _Reader:
        if not isinstance(self.json_value, dict):
            raise _Unexpected(f"{self.where} should be an object")
        if key not in self.json_value:
            raise _Unexpected(f"{self.where} has no '{key}'")
        return _Reader(self.json_value[key], f"{self.where}.{key}")

    def of(self, kind: type[T]) -> T:
        # bool is an int to Python but not to us
        if not isinstance(self.json_value, kind) or (kind is int and isinstance(self.json_value, bool)):
            raise _Unexpected(f"{self.where} should be {kind.__name__}, found {self.json_value!r:.40}")
        if isinstance(self.json_value, int) and self.json_value.bit_length() > 63:
            raise _Unexpected(f"{self.where} does not fit in 64 bits: {self.json_value!r:.40}")
        return self.json_value

    def number(self) -> float:
        return self.of(float) if isinstance(self.json_value, float) else self.of(int)

    def optional(self, kind: type[T]) -> T | None:
        return None if self.json_value is None else self.of(kind)

    def choice(self, kind: type[E]) -> E:
        try:
            return kind(self.of(str))
        except ValueError:
            raise _Unexpected(f"{self.where} is {self.json_value!r:.40}, not one of {[*kind]}") from None

    def many(self, read: Callable[[_Reader], T]) -> tuple[T, ...]:
        items: Iterable[Json] = self.of(list)
        return tuple(read(_Reader(item, f"{self.where}[{i}]")) for i, item in enumerate(items))

    def ints(self) -> tuple[int, ...]:
        return self.many(lambda item: item.of(int))


def _graph_from_json(json_graph: _Reader) -> Graph:
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


def _numbered(table: _Reader, read: Callable[[int, _Reader], T]) -> Iterable[T]:
    return (read(position, entry) for position, entry in enumerate(table.many(lambda entry: entry)))


def _value_from_json(position: int, entry: _Reader) -> Value:
    return Value(
        id=position,
        bytes=entry["bytes"].of(int),
        role=entry["role"].choice(Role),
        name=entry["name"].of(str),
        module=entry["module"].of(str),
        device=entry["device"].of(str),
    )


def _tensor_from_json(position: int, entry: _Reader) -> Tensor:
    fields = entry.many(lambda field: field)
    if len(fields) != 5:
        raise _Unexpected(f"{entry.where} should have 5 fields, found {len(fields)}")
    value, shape, stride, offset, dtype = fields
    return Tensor(position, value.of(int), shape.ints(), stride.ints(), offset.of(int), dtype.of(str))


def _op_from_json(position: int, entry: _Reader) -> Op:
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


def _arg_from_json(entry: _Reader) -> Arg:
    found = entry.json_value
    if isinstance(found, list):
        return entry.many(_arg_from_json)
    if not isinstance(found, dict):
        return found
    if len(found) != 1:
        raise _Unexpected(f"{entry.where} should name one thing, found {len(found)}")
    (kind,) = found
    if kind == "tensor":
        return Ref(entry["tensor"].of(int))
    text = entry[kind].of(str)
    if kind != "float":
        return Symbol(kind, text)
    if text not in ("inf", "-inf", "nan"):
        raise _Unexpected(f"{entry.where} is no float: {text!r:.40}")
    return float(text)


def _schedule_from_json(entry: _Reader) -> Schedule:
    def step(code: int) -> Step:
        return Compute(code) if code >= 0 else Free(-code - 1)

    return Schedule(tuple(step(code) for code in entry.ints()))
