"""What one op costs on one device, and a disk cache of such costs that survives anything.

A cost belongs to a *signature* (op, shapes, strides, dtypes, other arguments) in an *environment*
(device, library versions and every switch that changes which kernel runs).
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from lowtide.cost.contents import is_sized_by_numbers
from lowtide.errors import BadFile
from lowtide.ir.graph import Arg, Graph, Op, Ref, Signs, Symbol

BY_RULE = "rules for CUDA"  # where costs are from if the device is not here and nothing could be run
_OURS = 0x4C54_4944  # SQLite's application_id: a database without it is someone else's
_SCHEMA = 2
_TABLE = (
    "CREATE TABLE costs (environment TEXT, signature TEXT, cost BLOB, checksum INTEGER, "
    "PRIMARY KEY (environment, signature)) WITHOUT ROWID"
)
_WAIT_SECONDS = 30.0  # for another process that is writing


@dataclass(frozen=True, slots=True)
class Cost:
    """`workspace_bytes` beyond the outputs; `output_bytes` of the storages the op creates, in order.

    `extrapolated` costs were measured at smaller sizes; their outputs are not corrected.
    """

    workspace_bytes: int
    seconds: float
    output_bytes: tuple[int, ...] | None
    extrapolated: bool = False


def signature(op: Op, graph: Graph) -> str:
    """What an op's cost depends on, as text: equal for calls that run the same kernel on the same sizes."""

    def plain(arg: Arg) -> object:
        if isinstance(arg, Ref):
            tensor = graph.tensors[arg.tensor]
            signs = [] if tensor.signs is Signs.AS_THEY_ARE else [tensor.signs]
            return {"tensor": [tensor.shape, tensor.stride, tensor.dtype, *signs]}
        if isinstance(arg, Symbol):
            return "device" if arg.kind == "device" else {arg.kind: arg.text}
        return [plain(item) for item in arg] if isinstance(arg, tuple) else arg

    kwargs = {name: plain(arg) for name, arg in op.kwargs}
    parts = [op.target, [plain(arg) for arg in op.args], kwargs]
    if is_sized_by_numbers(op.target):
        parts.append([None if output is None else graph.tensors[output].shape for output in op.outputs])
    return json.dumps(parts, separators=(",", ":"))


class _Damaged(sqlite3.DatabaseError):
    """The file is a database, but not a sound one or not ours."""


class CostCache:
    """Costs on disk, for one environment.

    Several processes may use one file at once: every write is a transaction. A file that is damaged, or
    not ours, is set aside (`costs.sqlite.damaged`) and begun anew, and every cost carries a checksum: a
    cache may be lost, never wrong.

    Raises:
        BadFile: the file cannot be opened, read or written at all.
    """

    def __init__(self, path: Path, environment: str) -> None:
        self.path = path
        self.environment = environment
        with self._blamed():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_sound():
                self._begin_anew()

    def get(self, signatures: Iterable[str]) -> dict[str, Cost]:
        """The costs that are known among `signatures`."""
        with self._blamed(), closing(self._connect()) as connection:
            rows = {key: self._row(connection, key) for key in signatures}
        return {
            key: _decoded(row[0])
            for key, row in rows.items()
            if row is not None and row[1] == self._checksum(key, row[0])
        }

    def put(self, costs: Mapping[str, Cost]) -> None:
        """Remember costs; all of them or, if this process dies meanwhile, none."""
        encoded = {key: json.dumps(astuple(cost)).encode() for key, cost in costs.items()}
        rows = [(self.environment, key, cost, self._checksum(key, cost)) for key, cost in encoded.items()]
        with self._blamed(), self._transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO costs VALUES (?, ?, ?, ?)", rows)

    def _row(self, connection: sqlite3.Connection, key: str) -> tuple[bytes, int] | None:
        query = "SELECT cost, checksum FROM costs WHERE environment = ? AND signature = ?"
        try:
            row: tuple[bytes, int] | None = connection.execute(query, (self.environment, key)).fetchone()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if not _tells_damage(error):
                raise
            return None
        return row if row is not None and isinstance(row[0], bytes) else None

    def _checksum(self, key: str, cost: bytes) -> int:
        return zlib.crc32(b"\0".join((self.environment.encode(), key.encode(), cost)))

    def _is_sound(self) -> bool:
        try:
            self._prepare()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if _tells_damage(error):
                return False
            raise
        return True

    def _begin_anew(self) -> None:
        """Set the file aside, unless another process that found the damage too has done so meanwhile.

        It is copied and emptied, not renamed: a process that still looks at it would else take the
        journal of the new one for its own, and undo it.
        """
        with closing(_connected(self.path.with_name(f"{self.path.name}.lock"))) as alone:
            alone.execute("BEGIN EXCLUSIVE")
            if not self._is_sound():
                shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.damaged"))
                self.path.write_bytes(b"")
                self._prepare()

    def _prepare(self) -> None:
        """Make sure that the file is a sound database, with our table in it."""
        with self._transaction() as connection:
            if connection.execute("PRAGMA quick_check").fetchone() != (b"ok",):
                raise _Damaged
            owner = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            tables = connection.execute("SELECT sql FROM sqlite_master").fetchall()
            if (owner, version, tables) == (_OURS, _SCHEMA, [(_TABLE.encode(),)]):
                return
            if tables and (owner != _OURS or version == _SCHEMA):
                raise _Damaged
            connection.execute("DROP TABLE IF EXISTS costs")
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA application_id = {_OURS}")
            connection.execute(f"PRAGMA user_version = {_SCHEMA}")

    def _connect(self) -> sqlite3.Connection:
        return _connected(self.path)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection that no other process writes beside, from before the first look to the commit."""
        with closing(self._connect()) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            reason = "it is a directory" if self.path.is_dir() else str(error)
            raise BadFile(self.path, reason, doing="keep costs in") from error


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
    connection.text_factory = bytes  # what is damaged may not be text any more
    return connection


def _decoded(cost: bytes) -> Cost:
    workspace_bytes, seconds, output_bytes, extrapolated = json.loads(cost)
    outputs = None if output_bytes is None else tuple(output_bytes)
    return Cost(workspace_bytes, seconds, outputs, extrapolated)


def _tells_damage(error: Exception) -> bool:
    """Whether SQLite complains of what is in the file, and not of permission, space or a lock."""
    return not isinstance(error, sqlite3.OperationalError) or error.sqlite_errorcode == sqlite3.SQLITE_ERROR
