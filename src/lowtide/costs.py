"""What one op costs on one device, and a disk cache of such costs that survives anything.

A cost belongs to a *signature* (op, shapes, strides, dtypes, other arguments) in an *environment*
(device, library versions and every switch that changes which kernel runs).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lowtide.graph import Arg, Graph, Op, Ref, Symbol, Tensor

_SCHEMA = 1
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
            return {"tensor": [tensor.shape, tensor.stride, tensor.dtype]}
        if isinstance(arg, Symbol):
            return "device" if arg.kind == "device" else {arg.kind: arg.text}
        return [plain(item) for item in arg] if isinstance(arg, tuple) else arg

    kwargs = {name: plain(arg) for name, arg in op.kwargs}
    return json.dumps([op.target, [plain(arg) for arg in op.args], kwargs], separators=(",", ":"))


def argument_bytes(tensors: Iterable[Tensor], graph: Graph) -> int:
    """Bytes of the values behind some tensors."""
    return sum(graph.values[value].bytes for value in {tensor.value for tensor in tensors})


class CostCache:
    """Costs on disk, for one environment.

    Several processes may use one file at once: every write is a transaction. A file that is damaged, or
    not ours, is set aside and begun anew: a cache may be lost, never wrong.
    """

    def __init__(self, path: Path, environment: str) -> None:
        self.path = path
        self.environment = environment
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._create()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                raise
            self.path.unlink(missing_ok=True)
            self._create()

    def get(self, signatures: Iterable[str]) -> dict[str, Cost]:
        """The costs that are known among `signatures`."""
        found: dict[str, Cost] = {}
        with closing(self._connect()) as connection:
            for key in signatures:
                row = connection.execute(
                    "SELECT workspace_bytes, seconds, output_bytes, extrapolated FROM costs "
                    "WHERE environment = ? AND signature = ?",
                    (self.environment, key),
                ).fetchone()
                if row is not None:
                    outputs = None if row[2] is None else tuple(json.loads(row[2]))
                    found[key] = Cost(row[0], row[1], outputs, bool(row[3]))
        return found

    def put(self, costs: Mapping[str, Cost]) -> None:
        """Remember costs; all of them or, if this process dies meanwhile, none."""
        rows = [
            (
                self.environment,
                key,
                cost.workspace_bytes,
                cost.seconds,
                None if cost.output_bytes is None else json.dumps(cost.output_bytes),
                cost.extrapolated,
            )
            for key, cost in costs.items()
        ]
        with closing(self._connect()) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO costs VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=_WAIT_SECONDS)

    def _create(self) -> None:
        with closing(self._connect()) as connection, connection:
            if connection.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("damaged")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != _SCHEMA:
                connection.execute("DROP TABLE IF EXISTS costs")
                connection.execute(f"PRAGMA user_version = {_SCHEMA}")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS costs (environment TEXT, signature TEXT, "
                "workspace_bytes INTEGER, seconds REAL, output_bytes TEXT, extrapolated INTEGER, "
                "PRIMARY KEY (environment, signature)) WITHOUT ROWID"
            )
