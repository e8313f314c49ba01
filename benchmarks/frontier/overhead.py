"""What does running a model as a planned graph cost when nothing is recomputed? On a CPU, in small.

    python -m benchmarks.frontier.overhead -o overhead-DATE-cpu.md --commit HASH [--rounds 9]

Each network of the zoo is trained by turns as it is and, in a copy, under a plan that keeps everything. Small
steps of many ops are the hard case: the kernels hide nothing. Wall time and processor time are medians; the
latter says more on a machine that others use too.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.paper.report import heading, percent, table
from benchmarks.shared.machines import machine
from lowtide import zoo
from lowtide.planner.ops import StepBudget
from lowtide.text.documents import write_text
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import training_step

NETWORKS: dict[str, zoo.Sizes] = {
    "alexnet": zoo.Sizes(batch=4, image=96, classes=10),
    "vgg16_bn": zoo.Sizes(batch=2, image=32, classes=10),
    "resnet18": zoo.Sizes(batch=4, image=64),
    "resnet50": zoo.Sizes(batch=4, image=64),
    "densenet121": zoo.Sizes(batch=2, image=64),
    "preresnet56": zoo.Sizes(batch=8),
    "unet": zoo.Sizes(batch=1, image=64, width=16),
    "mlp": zoo.Sizes(batch=64, width=512),
    "lstm": zoo.Sizes(batch=16, tokens=24, width=64),
    "gpt": zoo.Sizes(batch=2, tokens=64, layers=4, width=128, heads=4, vocab=1000),
    "vit": zoo.Sizes(batch=4, image=64, layers=4, width=128, heads=4),
}
EVERYTHING_FITS = 1 << 50
WARM_UP = 2
ENOUGH_SECONDS = 1.0  # short steps are run more often
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    rows = []
    for name in NETWORKS:
        rows.append(row(name, chosen.rounds))
        print(
            f"{name:14s} wall {rows[-1]['wall_ratio']:.3f}  processor {rows[-1]['processor_ratio']:.3f}",
            flush=True,
        )
    document = {"machine": machine(chosen.commit), "rounds": chosen.rounds, "rows": rows}
    write_text(chosen.output.with_suffix(".json"), json.dumps(document, indent=1))
    write_text(chosen.output, "\n".join(rendered(document)).rstrip() + "\n")


def row(name: str, rounds: int) -> Json:
    torch.manual_seed(0)
    work = zoo.workload(name, NETWORKS[name])
    planned = copy.deepcopy(work.model)
    budget = StepBudget(StepSpec(planned, work.args, work.loss, profile=False, name=name))
    solution = budget.solve("auto", EVERYTHING_FITS)
    lowtide.apply(planned, solution, on_new_inputs="error")
    models = (work.model, planned)
    steps = [training_step(model, work.args, work.loss) for model in models]
    walls: tuple[list[float], list[float]] = ([], [])
    processors: tuple[list[float], list[float]] = ([], [])
    for turn in count(-WARM_UP):
        for which in (0, 1) if turn % 2 else (1, 0):
            models[which].zero_grad(set_to_none=True)
            wall, processor = seconds_of(steps[which])
            if turn >= 0:
                walls[which].append(wall)
                processors[which].append(processor)
        if turn + 1 >= rounds and sum(walls[0]) >= ENOUGH_SECONDS:
            break
    lowtide.remove(planned)
    torch._dynamo.reset()
    return {
        "name": name,
        "ops": len(budget.graph.ops),
        "rounds": len(walls[0]),
        "eager_seconds": statistics.median(walls[0]),
        "planned_seconds": statistics.median(walls[1]),
        "wall_ratio": ratio(walls),
        "processor_ratio": ratio(processors),
        "least_wall_ratio": min(walls[1]) / min(walls[0]),
    }


def seconds_of(step: Callable[[], object]) -> tuple[float, float]:
    """Of the wall clock, and of the processors."""
    wall, processor = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - processor


def ratio(seconds: tuple[Sequence[float], Sequence[float]]) -> float:
    """Planned against plain."""
    plain, planned = seconds
    return statistics.median(planned) / statistics.median(plain)


def mean_ratio(rows: Sequence[Json], of: str) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(found[of]) for found in rows))


def rendered(document: Json) -> Iterator[str]:
    rows = document["rows"]
    yield "# What a planned graph costs when nothing is recomputed"
    yield ""
    yield from heading(document)
    yield (
        f"Small training steps, by turns as they are and under a plan that keeps everything; medians of "
        f"{document['rounds']} or more. In the geometric mean a step takes "
        f"**{percent(mean_ratio(rows, 'wall_ratio') - 1)}** wall time and "
        f"**{percent(mean_ratio(rows, 'processor_ratio') - 1)}** processor time against eager's; the fastest "
        f"of the steps compare as {percent(mean_ratio(rows, 'least_wall_ratio') - 1)}."
    )
    yield ""
    head = ["network", "ops", "eager ms", "planned ms", "wall time", "processor time", "fastest steps"]
    ratios = ("wall_ratio", "processor_ratio", "least_wall_ratio")
    yield from table(
        head,
        [
            [
                found["name"],
                str(found["ops"]),
                f"{1e3 * found['eager_seconds']:.1f}",
                f"{1e3 * found['planned_seconds']:.1f}",
                *[percent(found[of] - 1) for of in ratios],
            ]
            for found in rows
        ],
    )


if __name__ == "__main__":
    main()
