"""How long do the methods take on long chains?

    python -m benchmarks.paper.solver_speed -o solver-speed-DATE.json

Random chains, seed 0; the best of three after one that compiles. The referee's replay is timed apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.chain.chain import Chain
from lowtide.chain.unroll import replay
from lowtide.solvers import methods
from lowtide.solvers.jit import is_compiling
from lowtide.text.documents import write_text

QUESTIONS = (
    ("hong-linear", (250_000, 500_000, 1_000_000, 2_000_000)),
    ("hong-quadratic", (1_000, 2_000, 4_000)),
    ("hong-cubic", (100, 200, 400)),
    ("feng-huang", (50, 100, 200, 400)),
    ("rotor", (50, 100, 200, 300)),
    ("chen-recursive", (1_000, 10_000)),
)
LIMITS = {  # seconds, and what they were promised for
    ("hong-linear", 1_000_000): 2.0,
    ("hong-cubic", 400): 30.0,
    ("rotor", 100): 5.0,
    ("rotor", 300): 60.0,
}


def random_chain(n: int) -> Chain:
    numbers = np.random.default_rng(0)
    d = numbers.integers(1 << 20, 1 << 26, n + 1)
    saved = d[1:] + numbers.integers(0, 1 << 24, n)
    return Chain.from_sizes(
        d.tolist(), saved.tolist(), forward_seconds=numbers.uniform(1e-4, 1e-2, n).tolist()
    )


def best_of(repeats: int, method: str, chain: Chain) -> float:
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        answer = methods()[method]().choose(chain, None)
        found.append(time.perf_counter() - started)
        assert answer is not None
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for method, sizes in QUESTIONS:
        best_of(1, method, random_chain(8))
        for n in sizes:
            seconds = best_of(3, method, random_chain(n))
            before = next((row for row in rows if (row["method"], 2 * row["layers"]) == (method, n)), None)
            rows.append(
                {
                    "method": method,
                    "layers": n,
                    "seconds": seconds,
                    "ratio_to_half": seconds / before["seconds"] if before else None,
                    "limit_seconds": LIMITS.get((method, n)),
                }
            )
            print(f"{method:16s} {n:9,d} layers {seconds:8.3f} s", flush=True)
    long = random_chain(100_000)
    plan = methods()["hong-linear"]().choose(long, None)
    assert plan is not None
    started = time.perf_counter()
    replay(long, plan.plan)
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compiled": is_compiling(),
        "commit": chosen.commit,
        "seed": 0,
        "date": time.strftime("%Y-%m-%d"),
    }
    found = {
        "machine": machine,
        "replay_of_100000_layers_seconds": time.perf_counter() - started,
        "rows": rows,
    }
    write_text(chosen.output, json.dumps(found, indent=1))
    write_text(chosen.output.with_suffix(".md"), rendered(found))


def rendered(found: dict[str, Any]) -> str:
    lines = [
        "# How long the methods take",
        "",
        ", ".join(f"{key} {value}" for key, value in found["machine"].items()) + ": "
        "`python -m benchmarks.paper.solver_speed`. Random chains; the best of three, compiled.",
        "",
        "| method | layers | seconds | ratio to half as many | limit |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        ratio = "–" if row["ratio_to_half"] is None else f"{row['ratio_to_half']:.2f}"
        limit = "–" if row["limit_seconds"] is None else f"{row['limit_seconds']:.0f}"
        lines.append(f"| {row['method']} | {row['layers']:,} | {row['seconds']:.3f} | {ratio} | {limit} |")
    replayed = found["replay_of_100000_layers_seconds"]
    return "\n".join([*lines, "", f"The referee replays a plan of 100,000 layers in {replayed:.1f} s.", ""])


if __name__ == "__main__":
    main()
