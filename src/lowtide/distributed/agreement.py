"""One plan for all ranks: decided by the first, handed to the others, and the same everywhere or nowhere.

Ranks talk through the store that the process group was made with: it needs no device and no collective,
takes JSON as it is, and every wait has an end. Before anything is planned they compare what they have (the
model, the batch, what was asked for). Whatever goes wrong on one of them is an error on each.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lowtide.compat.collectives import default_store
from lowtide.errors import BadRequest, LowtideError, RanksDisagree
from lowtide.solvers.files import load_solution, save_solution
from lowtide.solvers.solution import GraphSolution, Solution

Plan: TypeAlias = Solution | GraphSolution

TIMEOUT_SECONDS = 600.0
_LEADER = 0
_PIECE_BYTES = 1 << 20  # what is sent at once: stores are made for short messages
_FAILED, _PLANNED = b"!", b"="


def agreed(make: Callable[[], Plan], facts: Mapping[str, str], timeout_seconds: float) -> Plan:
    """What `make` returns on the first rank, on every rank; it is called nowhere else.

    `facts` must be the same everywhere. To be called by all ranks of the default process group, as a
    collective is; whoever is not there within `timeout_seconds` is missing.

    Raises:
        RanksDisagree: facts differ, a rank is missing or has gone, or the first rank cannot plan; there its
            own error is raised.
        BadRequest: there is no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise BadRequest(
            "there is no process group, so there are no ranks to plan for. Call "
            "torch.distributed.init_process_group first, and start the script with torchrun; on one device "
            "use lowtide.optimize."
        )
    return _Round(timeout_seconds).agreed(make, facts)


def largest(number: int, timeout_seconds: float) -> int:
    """The largest `number` of any rank. To be called by all of them.

    Raises:
        RanksDisagree: a rank is missing or has gone.
    """
    return _Round(timeout_seconds).largest(number)


class _Round:
    """One agreement. Ranks number theirs as they come, so that the n-th of each belong together."""

    def __init__(self, timeout_seconds: float) -> None:
        self.rank = dist.get_rank()
        self.ranks = range(dist.get_world_size())
        self._timeout = timedelta(seconds=timeout_seconds)
        store = PrefixStore("lowtide", default_store())
        with self._reached():
            number = store.add(f"rounds of {self.rank}", 1)
        self._store = PrefixStore(f"round {number}", store)

    def agreed(self, make: Callable[[], Plan], facts: Mapping[str, str]) -> Plan:
        self._compare(facts)
        plan = self._decide(make) if self.rank == _LEADER else self._hear()
        self._wait_for_all("has the plan", b"yes")
        return plan

    def largest(self, number: int) -> int:
        return max(map(int, self._wait_for_all("number", str(number).encode())))

    def _compare(self, facts: Mapping[str, str]) -> None:
        everyones = self._wait_for_all("facts", json.dumps(dict(facts)).encode())
        leaders = json.loads(everyones[_LEADER])
        differences = [
            f"rank {rank} has {fact} {theirs.get(fact)}, rank {_LEADER} has {leaders.get(fact)}"
            for rank, theirs in enumerate(map(json.loads, everyones))
            for fact in leaders
            if theirs.get(fact) != leaders[fact]
        ]
        if differences:
            raise RanksDisagree(
                f"the ranks cannot share a plan: {'; '.join(differences)}. "
                "Give every rank the same model, batches of the same shape and the same request."
            )

    def _decide(self, make: Callable[[], Plan]) -> Plan:
        try:
            plan = make()
        except BaseException as error:
            told = str(error) if isinstance(error, LowtideError) else f"{type(error).__name__}: {error}"
            self._send(_FAILED + told.encode())
            raise
        self._send(_PLANNED + zlib.compress(_written(plan)))
        return plan

    def _hear(self) -> Plan:
        message = self._receive()
        if message.startswith(_FAILED):
            raise RanksDisagree(f"rank {_LEADER} could not plan: {message[len(_FAILED) :].decode()}")
        return _read(zlib.decompress(message[len(_PLANNED) :]))

    # Messages -----------------------------------------------------------------------------------------

    def _send(self, message: bytes) -> None:
        pieces = range(0, len(message), _PIECE_BYTES)
        for number, start in enumerate(pieces):
            self._set(f"plan {number}", message[start : start + _PIECE_BYTES])
        self._set("plan", str(len(pieces)).encode())

    def _receive(self) -> bytes:
        pieces = int(self._get("plan", _LEADER))
        return b"".join(self._get(f"plan {number}", _LEADER) for number in range(pieces))

    def _wait_for_all(self, what: str, mine: bytes) -> list[bytes]:
        self._set(f"{what} {self.rank}", mine)
        return [self._get(f"{what} {rank}", rank) for rank in self.ranks]

    def _set(self, key: str, message: bytes) -> None:
        with self._reached():
            self._store.set(key, message)  # type: ignore[arg-type] # its stub forgets that bytes do

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except dist.DistStoreError:  # it is there, and says no
            raise
        except dist.DistError as error:
            raise RanksDisagree(
                f"rank {self.rank} has lost the store that the process group was made with: the process that "
                "holds it has gone."
            ) from error

    def _get(self, key: str, rank: int) -> bytes:
        try:
            with self._reached():
                self._store.wait([key], self._timeout)
                found: bytes = self._store.get(key)
        except dist.DistStoreError as error:
            raise RanksDisagree(
                f"rank {rank} did not answer within {self._timeout.total_seconds():g} s: it has failed or "
                "gone, or it does not plan where the others do. Its own output says more; all ranks must "
                "call lowtide.distributed alike, and a plan that takes longer needs a larger timeout_seconds."
            ) from error
        return found


def _written(plan: Plan) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_solution(plan, path)
        return path.read_bytes()


def _read(document: bytes) -> Plan:
    """A plan as files are read: strictly, and replayed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(document)
        return load_solution(path)
