"""JSON documents of lowtide's own: written whole or not at all, read strictly.

A file is data, never code: only JSON is parsed, and a `Reader` checks every field for its type. A checksum
over the content tells damage that would else be read as something else; older files have none.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, TypeVar

from lowtide.errors import BadFile, BadRequest, IllegalSchedule, MalformedGraph

SCHEMA = 1
_CHECKSUM = "checksum"
_TOO_DEEP = "it is nested too deeply to be lowtide's"
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one, never a part."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write `content` to `path`, likewise."""
    target = Path(path)
    try:
        handle, scratch = tempfile.mkstemp(dir=target.parent or ".", prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.chmod(scratch, 0o644)
            os.replace(scratch, target)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise BadFile(path, f"{error.strerror}", doing="write") from None


def write_document(
    path: str | os.PathLike[str], kind: str, fields: Mapping[str, Json], schema: int = SCHEMA
) -> None:
    """Write a document of that kind ("graph", "plan")."""
    document: dict[str, Json] = {"lowtide": kind, "schema": schema, **fields}
    document[_CHECKSUM] = _checksum(document)
    write_text(path, json.dumps(document, separators=(",", ":"), allow_nan=False))


def _checksum(document: Mapping[str, Json]) -> str:
    """Of the content, however it is laid out: of what is there beside a checksum."""
    content = {name: field for name, field in document.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_document(
    path: str | os.PathLike[str], kind: str, fields: Collection[str], newest: int = SCHEMA
) -> dict[str, Json]:
    """The document of that kind that was written to `path`, of the first schema or any up to `newest`.

    It holds none but `fields`: an unknown one may be the damaged name of a checksum.

    Raises:
        BadFile: the file is missing, damaged, cut off, not lowtide's, or of another kind or schema.
    """
    document = _parsed(path)
    if not isinstance(document, dict) or document.get("lowtide") != kind:
        raise BadFile(path, f"it is not a lowtide {kind} file")
    schema = document.get("schema")
    if type(schema) is not int or not SCHEMA <= schema <= newest:  # True equals 1
        known = f"{SCHEMA}" if newest == SCHEMA else f"{SCHEMA} to {newest}"
        raise BadFile(
            path,
            f"it has schema {schema!r:.40}; this lowtide reads schema {known}. "
            "Write it again with this version",
        )
    for name in document.keys() - {"lowtide", "schema", _CHECKSUM, *fields}:
        raise BadFile(path, f"it has a field '{name:.40}' that no {kind} file has: damaged?")
    with understanding(path):
        if _CHECKSUM in document and document[_CHECKSUM] != _checksum(document):
            raise Unexpected(
                "its content is not what was written: it was damaged, or edited. Write it again, or, "
                f"if the edit is meant, take the field '{_CHECKSUM}' out"
            )
    return document


def _parsed(path: str | os.PathLike[str]) -> Json:
    """The JSON in a file."""
    try:
        parsed: Json = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        return parsed
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


def _refuse_constant(literal: str) -> float:
    raise ValueError(f"{literal} is not JSON")


@contextmanager
def understanding(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a document's contents are refused for into BadFile."""
    try:
        yield
    except (Unexpected, MalformedGraph, IllegalSchedule, BadRequest) as error:
        raise BadFile(path, str(error)) from None
    except KeyError as error:
        raise BadFile(path, f"'{error.args[0]}' is missing") from None
    except RecursionError:
        raise BadFile(path, _TOO_DEEP) from None


class Unexpected(Exception):
    """A field does not hold what it should; the message says which and what."""


class Reader:
    """One JSON value and where it stands in the file, read by what it should be."""

    def __init__(self, json_value: Json, where: str) -> None:
        self.json_value = json_value
        self.where = where

    def __getitem__(self, key: str) -> Reader:
        if not isinstance(self.json_value, dict):
            raise Unexpected(f"{self.where} should be an object")
        if key not in self.json_value:
            raise Unexpected(f"{self.where} has no '{key}'")
        return Reader(self.json_value[key], f"{self.where}.{key}")

    def of(self, kind: type[T]) -> T:
        # bool is an int to Python but not to us
        if not isinstance(self.json_value, kind) or (kind is int and isinstance(self.json_value, bool)):
            raise Unexpected(f"{self.where} should be {kind.__name__}, found {self.json_value!r:.40}")
        if isinstance(self.json_value, int) and self.json_value.bit_length() > 63:
            raise Unexpected(f"{self.where} does not fit in 64 bits: {self.json_value!r:.40}")
        return self.json_value

    def number(self) -> float:
        return self.of(float) if isinstance(self.json_value, float) else self.of(int)

    def optional(self, kind: type[T]) -> T | None:
        return None if self.json_value is None else self.of(kind)

    def choice(self, kind: type[E]) -> E:
        try:
            return kind(self.of(str))
        except ValueError:
            raise Unexpected(f"{self.where} is {self.json_value!r:.40}, not one of {[*kind]}") from None

    def many(self, read: Callable[[Reader], T]) -> tuple[T, ...]:
        items: Iterable[Json] = self.of(list)
        return tuple(read(Reader(item, f"{self.where}[{i}]")) for i, item in enumerate(items))

    def ints(self) -> tuple[int, ...]:
        return self.many(lambda item: item.of(int))
