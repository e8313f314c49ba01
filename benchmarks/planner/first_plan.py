"""How long does somebody wait for the first plan after `pip install lowtide`, and how long for later ones?

    python -m benchmarks.planner.first_plan [--repeats 5] -o first-plan-DATE.json

Steps of the zoo for CUDA, which is not needed: costs come from rules. Timed are two things, each in a process
of its own: `lowtide plan`, from its start to its end, and the planning alone, from the call of `solve` with
the captured graph to the refereed answer. What is imported, compiled and searched on the way counts.

A first plan finds no cache of any kind: no bytecode, no compiled loops, no costs. A later one finds what the
first has left. These are wall times, on a machine that others may use as well: the least and the median are
told, and of the planning the least time of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lowtide.text.documents import write_text

MODELS = ("resnet50", "gpt", "inception_v3")
KINDS = ("first", "later")
BUDGET = "60%"
_CACHES = ("PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")
_PLAN = """
import json, sys, time
import lowtide
graph = lowtide.load_solution(sys.argv[1]).graph
started, worked = time.perf_counter(), time.process_time()
solution = lowtide.solve(graph, "auto", sys.argv[2])
seconds, processor = time.perf_counter() - started, time.process_time() - worked
print(json.dumps({"ops": len(graph.ops), "seconds": seconds, "processor_seconds": processor,
                  "peak_bytes": solution.peak_bytes, "extra_seconds": solution.extra_seconds}))
"""


def run(arguments: list[str], caches: Path) -> tuple[float, str]:
    """The seconds that a process takes which keeps its caches there, and what it prints."""
    folders = {name: str(caches / name) for name in _CACHES}
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **folders},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.perf_counter() - started, done.stdout


def asked(model: str, batch: int, repeats: int) -> Iterator[dict[str, Any]]:
    """The command once, and the planning alone again and again; the first and the later of each."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "plan.json"
        command = ["-m", "lowtide", "--no-progress", "plan", model, "--batch", str(batch), "--device", "cuda"]
        for kind in KINDS:
            seconds, _ = run([*command, "--budget", BUDGET, "-o", str(plan)], folder / "command")
            yield {"model": model, "what": "command", "kind": kind, "seconds": seconds}
        for repeat in range(repeats):
            for kind in KINDS:
                _, printed = run(["-c", _PLAN, str(plan), BUDGET], folder / f"planning {repeat}")
                yield {"model": model, "what": "planning", "kind": kind, **json.loads(printed)}


def summed_up(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The least and the median of what was repeated."""
    keys = dict.fromkeys((row["model"], row["what"], row["kind"]) for row in rows)
    found = []
    for model, what, kind in keys:
        here = [row for row in rows if (row["model"], row["what"], row["kind"]) == (model, what, kind)]
        seconds = [row["seconds"] for row in here]
        found.append(
            {
                "model": model,
                "ops": next((row["ops"] for row in rows if row["model"] == model and "ops" in row), None),
                "what": what,
                "kind": kind,
                "repeats": len(here),
                "least_seconds": min(seconds),
                "median_seconds": statistics.median(seconds),
                "least_processor_seconds": min(row.get("processor_seconds", 0.0) for row in here),
            }
        )
    return found


def rendered(found: dict[str, Any]) -> str:
    lines = [
        "# The first plan, and later ones",
        "",
        ", ".join(f"{key} {value}" for key, value in found["machine"].items())
        + f". Steps for CUDA at batch {found['batch']}, within {BUDGET} of the plain peak. planning: from "
        "the call with the captured graph to the refereed answer; command: all of `lowtide plan`, with the "
        "import of torch, the dry run and the capture.",
        "",
        "| model | ops | what | plan | least | median | processor |",
        "|---|---:|---|---|---:|---:|---:|",
    ]
    for row in found["summary"]:
        processor = row["least_processor_seconds"]
        lines.append(
            f"| {row['model']} | {row['ops']} | {row['what']} | {row['kind']} | "
            f"{row['least_seconds']:.2f} s | {row['median_seconds']:.2f} s | "
            f"{f'{processor:.2f} s' if processor else '–'} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--model", action="append", help=f"{', '.join(MODELS)} unless told")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in chosen.model or MODELS:
        for row in asked(model, chosen.batch, chosen.repeats):
            rows.append(row)
            print(f"{model:14s} {row['what']:8s} {row['kind']} {row['seconds']:.2f} s", flush=True)
    found = {
        "machine": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "numpy", "llvmlite", "numba")},
            "commit": chosen.commit,
            "date": time.strftime("%Y-%m-%d"),
        },
        "batch": chosen.batch,
        "summary": summed_up(rows),
        "rows": rows,
    }
    write_text(chosen.output, json.dumps(found, indent=1))
    write_text(chosen.output.with_suffix(".md"), rendered(found))
    print(rendered(found))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
