"""Trials in processes that may crash or hang: the one that did is written down, and a new process goes on.

A process works through a part of the trials and says which it begins, so that it is known which one it was.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.fuzz.recipe import recipe
from benchmarks.fuzz.trial import CRASH, Row, tried

Task = tuple[int, str, str]  # seed, way, budget

_AT_ONCE = 40  # trials of one process; what compilers remember grows with them
_IMPORTED = ["torch._dynamo", "torch._inductor.config", "lowtide.planner.ladder", "benchmarks.fuzz.trial"]


@dataclass
class _Worker:
    tasks: list[Task]
    process: Any
    heard: Connection
    since: float = field(default_factory=time.monotonic)  # it was last heard of


def rows_of(tasks: Sequence[Task], jobs: int, seconds: float) -> Iterator[Row]:
    """The row of every task, as they come. None may take longer than `seconds`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    waiting = [list(tasks[first : first + _AT_ONCE]) for first in range(0, len(tasks), _AT_ONCE)]
    workers: list[_Worker] = []
    while waiting or workers:
        while waiting and len(workers) < jobs:
            workers.append(_begun(context, waiting.pop(0)))
        wait([worker.heard for worker in workers], timeout=1)
        for worker in list(workers):
            yield from _heard(worker)
            if worker.tasks and (reason := _ended(worker, seconds)):
                yield _crashed(worker.tasks.pop(0), reason)
                waiting.insert(0, worker.tasks)
                worker.tasks = []
            if not worker.tasks:
                _put_down(worker)
                workers.remove(worker)
        waiting = [each for each in waiting if each]


def _begun(context: Any, tasks: list[Task]) -> _Worker:
    heard, telling = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(tasks, telling), daemon=True)
    process.start()
    telling.close()
    return _Worker(list(tasks), process, heard)


def _work(tasks: list[Task], telling: Connection) -> None:
    with open(os.devnull, "w") as nowhere:  # what profilers print
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    gc.freeze()  # each measurement collects garbage: among all that was imported that took half the time
    for seed, way, budget in tasks:
        telling.send(tried(recipe(seed), way, budget))


def _heard(worker: _Worker) -> Iterator[Row]:
    """The rows that have come since; each is of the next of the tasks."""
    try:
        while worker.tasks and worker.heard.poll():
            row = worker.heard.recv()
            worker.tasks.pop(0)
            worker.since = time.monotonic()
            yield row
    except EOFError:
        worker.process.join(5)


def _ended(worker: _Worker, seconds: float) -> str:
    """Why nothing will be heard of the task any more, if so."""
    if not worker.process.is_alive() and not worker.heard.poll():
        return f"the process ended with {worker.process.exitcode}"
    if time.monotonic() - worker.since > seconds:
        return f"no answer in {seconds:.0f} s"
    return ""


def _crashed(task: Task, reason: str) -> Row:
    seed, way, budget = task
    row = {"seed": seed, "way": way, "budget": budget, "recipe": str(recipe(seed))}
    return row | {"outcome": CRASH, "reason": reason, "told": [], "seconds": 0.0}


def _put_down(worker: _Worker) -> None:
    worker.process.join(1)
    if worker.process.is_alive():
        worker.process.kill()
    worker.heard.close()
