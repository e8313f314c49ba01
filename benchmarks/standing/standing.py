"""Where lowtide stands against what people use: one step, each way to train it, peak and time.

    python -m benchmarks.standing.standing measure --rows FILE.json --commit HASH  on the machine with the GPU
    python -m benchmarks.standing.standing measure --rows FILE.json --small        in small, for a CPU
    python -m benchmarks.standing.standing table --rows FILE.json                  dated Markdown

Every way to train is measured in a process of its own, lowtide's three in one, since the step is traced and
captured once for all of them. A row is written as soon as it is there, one that fails with its error. A row
that is there for the same commit is not measured again: after `--seconds` none begins, the next call goes on.

A step is the same for all: forward, loss, backward, gradients from None, no optimizer; only the loss is
referenced. Milliseconds are the median of 7 steps after 3, the peak is the allocator's over those 7.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.frontier.frontier import EVERYTHING_FITS, Rows, Trial, clean_up, guarded, tell
from benchmarks.shared.machines import again, device
from benchmarks.shared.peers import compiled, in_segments, library_checkpointing
from benchmarks.shared.subjects import Made
from benchmarks.standing.chunked_loss import ChunkedHeadLoss
from benchmarks.standing.models import LARGE, SMALL, Sample
from benchmarks.standing.report import (
    CHECKPOINTED,
    CHECKPOINTED_CHUNKED,
    CHUNKED,
    COMPILED,
    COMPILED_CHUNKED,
    COMPILED_HALF,
    EAGER,
    KEPT,
    LOWTIDE,
    SAME_PEAK,
    report,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--rows", type=Path, required=True, help="where they are written")
    measuring.add_argument("--commit", default="unknown", help="of the code, to be written down")
    measuring.add_argument("--models", help=f"some of {','.join(LARGE)}")
    measuring.add_argument("--ways", help="those with one of these in their names: eager,compile")
    measuring.add_argument("--seconds", type=float, default=520, help="after that no new row begins")
    measuring.add_argument("--row-seconds", type=float, default=120, help="a row that takes longer failed")
    measuring.add_argument("--retry", action="store_true", help="measure rows that failed again")
    measuring.add_argument("--small", action="store_true", help="sizes for a CPU")
    measuring.add_argument("--alone", nargs="+", metavar=("MODEL", "WAY"), help="these, in this process")
    tabling = commands.add_parser("table")
    tabling.add_argument("--rows", type=Path, required=True)
    tabling.add_argument("-o", "--output", type=Path, help="FILE.md beside the rows, unless told")
    chosen = parser.parse_args()
    if chosen.command == "table":
        report(json.loads(chosen.rows.read_text()), chosen.output or chosen.rows.with_suffix(".md"))
    elif chosen.alone is not None:
        del sys.argv[sys.argv.index("--alone") :]  # the command, to be written down as it was given
        measure_alone(chosen)
    else:
        measure_all(chosen)


def samples(chosen: argparse.Namespace) -> dict[str, Sample]:
    """The models that were chosen."""
    found = SMALL if chosen.small else LARGE
    if chosen.models is None:
        return found
    unknown = set(chosen.models.split(",")) - set(found)
    if unknown:
        raise SystemExit(f"no model {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    return {key: found[key] for key in chosen.models.split(",")}


# Which rows -----------------------------------------------------------------------------------------------


def measure_all(chosen: argparse.Namespace) -> None:
    """Every row that was chosen and is not there yet."""
    deadline = time.monotonic() + chosen.seconds
    for key, sample in samples(chosen).items():
        for ways in processes(sample):
            missing = [way for way in ways if wanted(chosen, sample, way)]
            left = deadline - time.monotonic()
            if missing and left <= 0:
                print("out of time; call again to go on", file=sys.stderr)
                return
            if missing:
                measure_in_a_process(chosen, key, sample, missing)


def processes(sample: Sample) -> Iterator[tuple[str, ...]]:
    """The ways that apply to this model, those together that share a process."""
    peers = [way for way in PEERS if sample.is_text or CHUNKED not in way]
    yield from ((way,) for way in peers if COMPILED not in way)
    yield LOWTIDE
    yield from ((way,) for way in peers if COMPILED in way)  # the slow ones last


def wanted(chosen: argparse.Namespace, sample: Sample, way: str) -> bool:
    if chosen.ways and not any(word in way for word in chosen.ways.split(",")):
        return False
    there = Rows(chosen.rows, chosen.commit).find(sample.name, way)
    return there is None or (chosen.retry and "error" in there)


def measure_in_a_process(chosen: argparse.Namespace, key: str, sample: Sample, ways: Sequence[str]) -> None:
    """Have a process of its own measure these rows; one that it did not write has failed with it."""
    started = time.perf_counter()
    before = {way: Rows(chosen.rows, chosen.commit).find(sample.name, way) for way in ways}
    command = again("--alone", key, *ways)
    try:
        code = str(subprocess.run(command, check=False, timeout=limit_seconds(chosen, ways)).returncode)
    except subprocess.TimeoutExpired:
        code = "no answer in time"
    rows = Rows(chosen.rows, chosen.commit)
    for way in ways:
        if rows.find(sample.name, way) == before[way]:
            row: dict[str, Any] = {"error": f"the process ended with {code}", "failure": "ProcessEnded"}
            row["wall_seconds"] = time.perf_counter() - started
            rows.put({"subject": sample.name, "label": way, "kind": kind_of(way), **row})
            tell(key, way, row)


def limit_seconds(chosen: argparse.Namespace, ways: Sequence[str]) -> float:
    """When a process that measures these ways hangs: building the model is one row more."""
    return float(chosen.row_seconds * (len(ways) + 1))


# One process ----------------------------------------------------------------------------------------------


def measure_alone(chosen: argparse.Namespace) -> None:
    """These ways to train one model, here."""
    key, *ways = chosen.alone
    sample = samples(chosen)[key]
    rows = Rows(chosen.rows, chosen.commit)
    built = guarded(partial(build, sample), chosen.row_seconds)
    for way in ways:
        row = built if "error" in built else measured(built["trial"], way, rows, chosen.row_seconds)
        about = {"subject": sample.name, "label": way, "kind": kind_of(way), "library": sample.library()}
        rows.put({**about, **row})
        tell(key, way, row)


def build(sample: Sample) -> dict[str, Any]:
    """The model and its batch, on the device."""
    torch.manual_seed(0)
    with torch.device(device()):
        made = sample.build()
    return {"trial": Trial(sample.name, made)}


def measured(trial: Trial, way: str, rows: Rows, seconds: float) -> dict[str, Any]:
    """One row, or why there is none."""
    planned = way in LOWTIDE
    work = partial(lowtide_row, trial, way, rows) if planned else partial(peer_row, trial, way)
    row = guarded(work, seconds)
    clean_up(trial.made.model)
    return row


def kind_of(way: str) -> str:
    return "planned" if way in LOWTIDE else "peer"


def peer_row(trial: Trial, way: str) -> dict[str, Any]:
    """Training as others do it."""
    with PEERS[way](trial.made) as model:
        return trial.measured(model)


def lowtide_row(trial: Trial, way: str, rows: Rows) -> dict[str, Any]:
    """Training under a plan."""
    if way != SAME_PEAK:
        return trial.planned(EVERYTHING_FITS if way == KEPT else "min")
    reached = rows.find(trial.name, CHECKPOINTED) or {}
    if "peak_bytes" not in reached:
        raise LookupError(f"there is no peak to stay within: measure {CHECKPOINTED!r} first")
    return trial.planned(reached["peak_bytes"])


# What people use ------------------------------------------------------------------------------------------


@contextmanager
def as_it_is(made: Made) -> Iterator[nn.Module]:
    yield made.model


@contextmanager
def own_checkpointing(made: Made) -> Iterator[nn.Module]:
    """The library's own, where it has one; else √n segments."""
    with in_segments(made.model) if made.checkpoint is None else library_checkpointing(made) as model:
        yield model


@contextmanager
def chunked(made: Made) -> Iterator[nn.Module]:
    """Checkpointed, with the head and the loss in chunks."""
    with library_checkpointing(made) as model:
        yield ChunkedHeadLoss(model.model)


@contextmanager
def compiled_and_chunked(made: Made) -> Iterator[nn.Module]:
    """The same, compiled."""
    with chunked(made) as model, compiled(model, 1.0) as fast:
        yield fast


@contextmanager
def compiled_at(budget: float, made: Made) -> Iterator[nn.Module]:
    with compiled(made.model, budget) as model:
        yield model


PEERS: dict[str, Callable[[Made], AbstractContextManager[nn.Module]]] = {
    EAGER: as_it_is,
    CHECKPOINTED: own_checkpointing,
    CHECKPOINTED_CHUNKED: chunked,
    COMPILED: partial(compiled_at, 1.0),
    COMPILED_HALF: partial(compiled_at, 0.5),
    COMPILED_CHUNKED: compiled_and_chunked,
}


if __name__ == "__main__":
    main()
