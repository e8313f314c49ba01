"""Every family in a process of its own: it may crash, hang or want too much memory, and only its row says so.

The processes are forked from one that has imported everything, so that each begins at once.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.families.trial import Row, Wanted, tried

_IMPORTED = ["torch._dynamo", "transformers", "lowtide.planner.ladder", "benchmarks.families.trial"]
_PATIENCE = 10  # times the processor's seconds that a process may have


@dataclass(frozen=True)
class Limits:
    """Of one process. Its seconds are the processor's: others may use the machine as well."""

    seconds: float
    gibibytes: float

    def impose(self, device: str) -> None:
        """On this process; its memory not on CUDA, whose driver reserves more than there is."""
        seconds, held = int(self.seconds), int(self.gibibytes * 2**30)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        if device == "cpu":
            resource.setrlimit(resource.RLIMIT_DATA, (held, held))


@dataclass
class _Running:
    family: str
    process: Any
    heard: Connection
    began: float = field(default_factory=time.monotonic)
    row: Row = field(default_factory=dict)


def rows_of(
    families: Sequence[str], jobs: int, wanted: Wanted, limits: Limits, may_begin: Callable[[], bool]
) -> Iterator[Row]:
    """The row of every family, as they come; none begins after `may_begin` says no."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    waiting, running = list(families), list[_Running]()
    while running or (waiting and may_begin()):
        while waiting and len(running) < jobs and may_begin():
            running.append(_begun(context, waiting.pop(0), wanted, limits))
        wait([each.heard for each in running], timeout=1)
        for each in list(running):
            if (row := _row_of(each, limits)) is not None:
                running.remove(each)
                yield row


def _begun(context: Any, family: str, wanted: Wanted, limits: Limits) -> _Running:
    heard, telling = context.Pipe(duplex=False)
    process = context.Process(target=_alone, args=(family, wanted, limits, telling), daemon=True)
    process.start()
    telling.close()
    return _Running(family, process, heard, row={"family": family, "stage": "begun"})


def _alone(family: str, wanted: Wanted, limits: Limits, telling: Connection) -> None:
    """One family, here."""
    with open(os.devnull, "w") as nowhere:  # what libraries print
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    limits.impose(wanted.device)
    if wanted.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
    tried(family, wanted, telling.send)


def _row_of(running: _Running, limits: Limits) -> Row | None:
    """The row, when the process is over, or its time."""
    over = not running.process.is_alive()
    try:
        while running.heard.poll():
            running.row = running.heard.recv()
    except EOFError:
        over = True
    if running.row["stage"] == "ended":
        running.process.join(5)
    elif over:
        running.process.join(5)
        slow = running.process.exitcode == -signal.SIGXCPU
        ended = f"the process ended with {running.process.exitcode}"
        running.row["crashed"] = f"no answer in {limits.seconds:.0f} s" if slow else ended
    elif time.monotonic() - running.began > _PATIENCE * limits.seconds:
        running.row["crashed"] = f"no answer in {_PATIENCE * limits.seconds:.0f} s, of which it waited most"
    else:
        return None
    if running.process.is_alive():
        running.process.kill()
    running.heard.close()
    return running.row
