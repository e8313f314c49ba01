"""How much time does lowtide itself take?

    python -m benchmarks.prediction.speed [-o FILE.json]

Prints, as counts and ratios within one run: what the dry run adds to the cost of fake tensors per op,
what capture takes per op, and what the referee takes for 10,000 ops. Medians of three, interleaved.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import zoo
from lowtide.aot.capture import capture
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.text.documents import write_text
from lowtide.trace.dry_run import dry_run

STEPS = {
    "densenet201": zoo.Sizes(batch=4, image=64),
    "lstm": zoo.Sizes(batch=4, tokens=150, width=32),
    "resnet152": zoo.Sizes(batch=4, image=64),
    "gpt": zoo.Sizes(batch=2, tokens=64),
}


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def step_of(name: str) -> tuple[nn.Module, Callable[[], None]]:
    work = zoo.workload(name, STEPS[name])
    loss = work.loss
    assert loss is not None
    return work.model, lambda: loss(work.model(*work.args)).backward()


def dry_run_row(name: str) -> dict[str, Any]:
    """Compared with fake tensors alone: the model made of them, the step under their mode, not recorded."""

    def fakes_alone() -> None:
        with FakeTensorMode():
            _, step = step_of(name)
            step()

    with torch.device("meta"):
        model, step = step_of(name)
    ops = len(dry_run(step, model=model).graph.ops)
    ours, fakes = [], []
    for _ in range(3):
        ours.append(timed(lambda: dry_run(step, model=model)))
        fakes.append(timed(fakes_alone))
    added = statistics.median(ours) - statistics.median(fakes)
    return {
        "what": f"dry run of {name}",
        "ops": ops,
        "seconds": statistics.median(ours),
        "ratio to fake tensors alone": statistics.median(ours) / statistics.median(fakes),
        "added ms an op": 1e3 * added / ops,
    }


def capture_row() -> dict[str, Any]:
    with torch.device("meta"):
        work = zoo.workload("lstm", STEPS["lstm"])
    start = time.perf_counter()
    graph = capture(work.model, work.args, work.loss)
    seconds = time.perf_counter() - start
    return {
        "what": "capture of lstm",
        "ops": len(graph.ops),
        "seconds": seconds,
        "ms an op": 1e3 * seconds / len(graph.ops),
    }


def referee_row() -> dict[str, Any]:
    with torch.device("meta"):
        model, step = step_of("lstm")
    trace = dry_run(step, model=model)
    schedule = straight(trace.graph)
    seconds = statistics.median(timed(lambda: simulate(trace.graph, schedule)) for _ in range(3))
    ops = len(trace.graph.ops)
    return {"what": "referee", "ops": ops, "seconds": seconds, "seconds per 10,000 ops": 1e4 * seconds / ops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    rows = [*(dry_run_row(name) for name in STEPS), capture_row(), referee_row()]
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    machine = {
        "device": f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if chosen.output:
        write_text(chosen.output, json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
