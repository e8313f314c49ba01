"""Memory against time: op-level plans, and what a user picks today, measured in the same way.

    python -m benchmarks.frontier.frontier measure --rows FILE.json --commit HASH  on the machine with the GPU
    python -m benchmarks.frontier.frontier measure --rows FILE.json --small         in small, for a CPU
    python -m benchmarks.frontier.frontier report --rows FILE.json                  Markdown and pictures

Each network is measured in a process of its own. The step is traced, captured and profiled once; each row is
one way to train: eager, a peer, or a plan. A row is written as soon as it is there, and a row that is there
for the same commit is not measured again: after `--seconds` no new one begins, and the next call goes on.

A step is the same for all: out = model(batch), loss, backward, with `out` referenced until the backward is
done, gradients None when it begins, no optimizer. Milliseconds are the median of 7 steps after 3.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from benchmarks.frontier.report import report
from benchmarks.shared.machines import again, device, machine
from benchmarks.shared.peers import Peer, compiled_peers, eager_peers
from benchmarks.shared.subjects import FRONTIER, FRONTIER_SMALL, Made, Subject
from lowtide.cost.measure import measure, seconds_of
from lowtide.errors import InfeasibleBudget
from lowtide.ir.cuda_allocator import cached
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule
from lowtide.planner.ops import StepBudget
from lowtide.text.documents import write_text
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import training_step

WARM_UP, STEPS = 3, 7
EVERYTHING_FITS = 1 << 50
GRACE_SECONDS = 45.0  # for a row that began in time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--rows", type=Path, required=True, help="where they are written")
    measuring.add_argument("--commit", default="unknown", help="of the code, to be written down")
    measuring.add_argument("--only", help="these networks: vgg19,resnet50")
    measuring.add_argument("--labels", help="these rows, by words in their labels: eager,min,40 %%")
    measuring.add_argument("--seconds", type=float, default=500, help="after that no new row begins")
    measuring.add_argument("--row-seconds", type=float, default=240, help="a row that takes longer failed")
    measuring.add_argument("--inductor", action="store_true", help="torch.compile too; slow")
    measuring.add_argument("--retry", action="store_true", help="measure rows that failed again")
    measuring.add_argument("--small", action="store_true", help="sizes for a CPU")
    measuring.add_argument("--alone", help="this network, in this process")
    reporting = commands.add_parser("report")
    reporting.add_argument("--rows", type=Path, required=True)
    reporting.add_argument("-o", "--output", type=Path, help="benchmarks/frontier/results/frontier-DATE.md")
    chosen = parser.parse_args()
    if chosen.command == "report":
        report(json.loads(chosen.rows.read_text()), chosen.output)
    elif chosen.alone is not None:
        del sys.argv[sys.argv.index("--alone") :]  # the command, to be written down as it was given
        measure_alone(chosen)
    else:
        measure_all(chosen)


def subjects(chosen: argparse.Namespace) -> dict[str, Subject]:
    found = {subject.key: subject for subject in (FRONTIER_SMALL if chosen.small else FRONTIER)}
    if chosen.only is None:
        return found
    unknown = set(chosen.only.split(",")) - set(found)
    if unknown:
        raise SystemExit(f"no network {', '.join(unknown)}; there are {', '.join(found)}")
    return {key: found[key] for key in chosen.only.split(",")}


def measure_all(chosen: argparse.Namespace) -> None:
    """Each network in its own process: one that breaks the device leaves the others alone."""
    deadline = time.monotonic() + chosen.seconds
    for key in subjects(chosen):
        left = deadline - time.monotonic()
        if left <= 0:
            print("out of time; call again to go on", file=sys.stderr)
            break
        alone = again("--alone", key, "--seconds", f"{left:.0f}")
        try:
            code = subprocess.run(alone, check=False, timeout=left + 2 * GRACE_SECONDS).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            print(f"{key}: the process ended with {code}; its rows so far are kept", file=sys.stderr)


# Rows -----------------------------------------------------------------------------------------------------


class Rows:
    """The rows so far, on disk."""

    def __init__(self, path: Path, commit: str) -> None:
        self._path = path
        self._commit = commit
        document = json.loads(path.read_text()) if path.exists() else {}
        self.all: list[dict[str, Any]] = document.get("rows", [])

    def find(self, subject: str, label: str) -> dict[str, Any] | None:
        """The row of this commit, if it is there."""
        wanted = (subject, label, self._commit)
        return next((row for row in self.all if _identity(row) == wanted), None)

    def put(self, row: dict[str, Any]) -> None:
        """Add a row, in place of an older one of the same kind, and write all."""
        row = {**row, "commit": self._commit}
        kept = [old for old in self.all if _identity(old) != _identity(row)]
        self.all = [*kept, row]
        write_text(self._path, json.dumps({"machine": machine(self._commit), "rows": self.all}, indent=1))


def _identity(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["subject"], row["label"], row["commit"]


class OutOfTime(BaseException):
    """A row took too long. Not an Exception: compilers catch those, and try something else."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop what the block does after that time."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# One network ----------------------------------------------------------------------------------------------


def measure_alone(chosen: argparse.Namespace) -> None:
    """Every row of one network that is not there yet."""
    deadline = time.monotonic() + chosen.seconds
    subject = subjects(chosen)[chosen.alone]
    rows = Rows(chosen.rows, chosen.commit)
    torch.manual_seed(0)
    with torch.device(device()):
        made = subject.build()
    trial = Trial(subject.name, made)
    for label, kind, work in trial.questions(rows, chosen.inductor):
        if chosen.labels and not any(word in label for word in chosen.labels.split(",")):
            continue
        there = rows.find(subject.name, label)
        if there is not None and not (chosen.retry and "error" in there):
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if kind != "planned":  # the graphs of one plan serve the next
            lowtide.remove(made.model)
            torch._dynamo.reset()
        row = guarded(work, min(chosen.row_seconds, left + GRACE_SECONDS))
        clean_up(made.model)
        cut_short = row.get("failure") == OutOfTime.__name__ and left + GRACE_SECONDS < chosen.row_seconds
        if not cut_short:  # else the next call has more time for it
            rows.put({"subject": subject.name, "label": label, "kind": kind, **row})
        tell(subject.key, label, row)


def guarded(work: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What a row finds; if it fails, why: one failure must not cost the other rows."""
    started = time.perf_counter()
    try:
        with time_limit(seconds):
            found = work()
    except (Exception, OutOfTime) as error:  # noqa: BLE001
        if not isinstance(error, InfeasibleBudget | OutOfTime):
            traceback.print_exc(limit=-12)
        found = {"error": f"{type(error).__name__}: {error}"[:800], "failure": type(error).__name__}
    return {**found, "wall_seconds": time.perf_counter() - started}


def clean_up(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tell(subject: str, label: str, row: dict[str, Any]) -> None:
    if "error" in row:
        found = row["error"].splitlines()[0][:140]
    elif "peak_bytes" in row:
        found = f"{row['peak_bytes'] / 2**20:10,.1f} MiB {row['ms']:8.1f} ms"
    else:
        found = f"{row['ops']} ops"
    if "predicted_bytes" in row:
        found += f"  predicted {row['predicted_bytes'] / 2**20:,.1f}"
    print(f"{subject:14s} {label:34s} {found}  ({row['wall_seconds']:.1f} s)", file=sys.stderr, flush=True)


Question = tuple[str, str, Callable[[], dict[str, Any]]]


@dataclass(frozen=True)
class Trial:
    """One network, and every way to train it."""

    name: str
    made: Made

    @cached_property
    def budget(self) -> StepBudget:
        """Traced, captured and profiled once."""
        return StepBudget(StepSpec(self.made.model, self.made.example, self.made.loss, name=self.name))

    def questions(self, rows: Rows, inductor: bool) -> Iterator[Question]:
        """A label, a kind and what to do, the most telling ones first."""
        yield "prepared", "prepared", self.prepared
        yield "eager", "eager", self.eager
        peers = eager_peers(self.made)
        for peer in peers:
            yield peer.name, "peer", partial(self.peer, peer)
        if "error" not in (rows.find(self.name, "prepared") or {}):
            for label, wanted in self.budgets(rows, peers):
                yield label, "planned", partial(self.planned, wanted)
        yield "eager again", "eager", self.eager
        if inductor:
            for peer in compiled_peers(self.made):
                yield peer.name, "compiled", partial(self.peer, peer)

    def budgets(self, rows: Rows, peers: Sequence[Peer]) -> Iterator[tuple[str, str | int]]:
        """What is asked of the planner; what each peer reached, too."""
        yield "planned, everything kept", EVERYTHING_FITS
        for peer in peers:
            reached = rows.find(self.name, peer.name) or {}
            if "peak_bytes" in reached:
                yield f"planned at {peer.name}", reached["peak_bytes"]
        for wanted in ("min", "60%", "40%", "80%"):
            yield f"planned, {wanted.replace('%', ' %')}", wanted

    def prepared(self) -> dict[str, Any]:
        """What is known of the step before it is planned."""
        started = time.perf_counter()
        plain = self.budget.plain
        traced = time.perf_counter()
        graph = self.budget.graph
        return {
            "traced_seconds": traced - started,
            "captured_seconds": time.perf_counter() - traced,
            "ops": len(graph.ops),
            "eager_ops": len(plain.graph.ops),
            "predicted_bytes": self.budget.plain_peak_bytes,
            "predicted_resident_bytes": plain.timeline.resident_bytes,
            "lower_bound_bytes": lowtide.solve(graph, "auto", EVERYTHING_FITS).lower_bound_bytes,
            "op_seconds": sum(op.seconds for op in graph.ops),
            "notes": [*plain.graph.notes, *graph.notes],
        }

    def eager(self) -> dict[str, Any]:
        """Plain training."""
        return self.measured(self.made.model)

    def peer(self, peer: Peer) -> dict[str, Any]:
        """Training as a peer does it."""
        with peer.under() as model:
            return self.measured(model)

    def planned(self, wanted: str | int) -> dict[str, Any]:
        """Training under a plan of ours."""
        assert self.budget.graph.ops, "it is captured before the clock starts"
        started = time.perf_counter()
        solution = self.budget.solve("auto", wanted)
        planning_seconds = time.perf_counter() - started
        lowtide.apply(self.made.model, solution, on_new_inputs="error")
        measured = self.measured(self.made.model)
        budget_bytes = None if wanted == EVERYTHING_FITS else solution.budget_bytes
        return {
            "budget_bytes": budget_bytes,
            "kept_within_budget": None if budget_bytes is None else measured["peak_bytes"] <= budget_bytes,
            "predicted_bytes": allocated_bytes(solution.graph, solution.schedule),
            "status": solution.status.value,
            "recomputed_ops": sum(solution.recomputed.values()),
            "extra_seconds": solution.extra_seconds,
            "extra_seconds_ratio": solution.extra_seconds_ratio,
            "planning_seconds": planning_seconds,
            **measured,
        }

    def measured(self, model: nn.Module) -> dict[str, Any]:
        """Training steps of `model`, which is the network or shares its parameters."""
        where = torch.device(device())
        step = training_step(model, self.made.example, self.made.loss)

        def fresh_step() -> float:
            self.made.model.zero_grad(set_to_none=True)
            return seconds_of(step, where)

        first_seconds, *_ = [fresh_step() for _ in range(WARM_UP)]
        self.made.model.zero_grad(set_to_none=True)
        gc.collect()
        memory = cuda_memory if where.type == "cuda" else cpu_memory
        seconds, held = memory(lambda: [fresh_step() for _ in range(STEPS)], step, self.made.model)
        return {"ms": 1e3 * statistics.median(seconds), "first_seconds": first_seconds, **held}


def cuda_memory(
    steps: Callable[[], list[float]], step: Callable[[], object], model: nn.Module
) -> tuple[list[float], dict[str, int]]:
    """The steps' times, and the allocator's statistics over all of them."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    seconds = steps()
    return seconds, {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "resident_bytes": resident,
    }


def cpu_memory(
    steps: Callable[[], list[float]], step: Callable[[], object], model: nn.Module
) -> tuple[list[float], dict[str, int]]:
    """The steps' times, and what the allocator did in one more."""
    seconds = steps()
    model.zero_grad(set_to_none=True)
    reading = measure(step, device="cpu")
    return seconds, {"peak_bytes": reading.peak_bytes, "resident_bytes": reading.resident_bytes}


def allocated_bytes(graph: Graph, schedule: Schedule) -> int:
    """The peak that the device's allocator will report: CUDA's may hand out blocks larger than asked for."""
    peak_bytes = lowtide.simulate(graph, schedule).peak_bytes
    if not graph.device.startswith("cuda"):
        return peak_bytes
    return max(peak_bytes, cached(graph, schedule).allocated_bytes)


if __name__ == "__main__":
    main()
