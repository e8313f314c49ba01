"""How much more than it hands out does the allocator reserve, by segments, pages and planned offsets?

    python -m benchmarks.card.replay -o benchmarks/card/results/replay-DATE.md --commit HASH [--only vgg,gpt]

Nothing is measured: training steps of the zoo with AdamW are captured for a GPU without one, planned, and
replayed by the rules of PyTorch's allocator, from the first step on (`lowtide.ir.training_reserve`). Three
ways to hand memory out:

    segments    what PyTorch does unless told
    expandable  expandable segments
    offsets     one block for all that the step makes, kernels' workspaces included, laid out by
                `lowtide.lay_out`; what is there between steps beside it

and for expandable segments also the least memory, in parts of what is handed out at once, on which the whole
training runs: PyTorch gives pages back when it is told that there is no more. JSON is written beside the
Markdown after each step; steps that are there for the same commit are not replayed again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.paper.report import heading, mib, table
from benchmarks.shared.machines import machine
from lowtide import zoo
from lowtide.arena.layout import lay_out
from lowtide.errors import InfeasibleBudget
from lowtide.ir.graph import Graph, Role, Value
from lowtide.ir.schedule import Compute, Free, Schedule, Step
from lowtide.ir.training_reserve import AllocatedRun, TrainingReserve
from lowtide.planner.on_card import Training
from lowtide.planner.ops import StepBudget
from lowtide.text.documents import write_text
from lowtide.trace.spec import StepSpec

Json = dict[str, Any]
SIZES: dict[str, dict[str, int]] = {
    "vgg19": {"batch": 128},
    "alexnet": {"batch": 1024},
    "resnet50": {"batch": 192},
    "unet": {"batch": 32, "image": 256},
    "vit": {"batch": 64},
    "gpt": {"batch": 8, "tokens": 1024},
    "inception_v3": {"batch": 128},
}
BUDGETS = ("plain", "60%", "min")
GOAL = 1.02
STEADY = 4  # stages: loading, and three steps
_PARTS = range(1000, 1401, 5)  # of what is handed out, in thousandths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--only", help="these models, by their names: vgg19,gpt")
    chosen = parser.parse_args()
    path = chosen.output.with_suffix(".json")
    document = json.loads(path.read_text()) if path.exists() else {}
    if document.get("machine", {}).get("commit") != chosen.commit:
        document = {"machine": machine(chosen.commit), "rows": []}
    there = {row["model"] for row in document["rows"]}
    for name in chosen.only.split(",") if chosen.only else SIZES:
        if name not in there:
            document["rows"] += rows_of(name, SIZES[name])
            write_text(path, json.dumps(document, indent=1))
    write_text(chosen.output, "\n".join(render(document)) + "\n")


def rows_of(name: str, sizes: dict[str, int]) -> Iterator[Json]:
    """A row for the step as it is written, and for each plan."""
    with torch.device("meta"):
        work = zoo.workload(name, zoo.Sizes(**sizes))
    example = work.args or work.kwargs
    step = StepBudget(StepSpec(work.model, example, work.loss, "adamw", device="cuda", name=name))
    plain = AllocatedRun(step.plain.graph, step.plain.schedule)
    for budget in BUDGETS:
        if budget == "plain":
            row = reserves(Training(plain))
        else:
            try:
                planned = step.solve("auto", budget)
            except InfeasibleBudget:
                continue  # the lowest is above that
            run = AllocatedRun(planned.graph, planned.schedule)
            row = {**reserves(Training(run, plain)), "offsets_bytes": offsets_bytes(run)}
        print(name, budget, {key: round(value / 2**20) for key, value in row.items() if value > 2**20})
        yield {"model": name, "sizes": sizes, "step": budget, **row}


def reserves(training: Training) -> Json:
    """What is handed out and reserved, in the first three steps and in the whole training."""
    segments = training.within(None, expandable=False)
    pages = training.within(None, expandable=True)
    return {
        "allocated_bytes": pages.allocated_bytes,
        "steps_allocated_bytes": max(stage.allocated_bytes for stage in pages.stages[:STEADY]),
        "segments_bytes": steps_reserved(segments),
        "expandable_bytes": steps_reserved(pages),
        "segments_training_bytes": segments.reserved_bytes,
        "expandable_training_bytes": pages.reserved_bytes,
        "least_part": least_part(training, pages.allocated_bytes),
    }


def steps_reserved(found: TrainingReserve) -> int:
    """What was reserved by the end of the third step."""
    return found.stages[STEADY - 1].reserved_bytes


def least_part(training: Training, allocated_bytes: int) -> float | None:
    """On how little the training runs, in parts of what it holds at once, with pages given back."""
    for part in _PARTS:
        if training.within(allocated_bytes * part // 1000, expandable=True).failed is None:
            return part / 1000
    return None


def offsets_bytes(run: AllocatedRun) -> int:
    """What is there all the time, and one block for the rest."""
    graph, schedule = with_workspaces(run.graph, run.schedule)
    resident = sum(map(graph.counted_bytes, graph.resident))
    return resident + lay_out(graph, schedule, in_place=False).arena_bytes


def with_workspaces(graph: Graph, schedule: Schedule) -> tuple[Graph, Schedule]:
    """With what kernels take while they run as values of the graph, gone when the op is."""
    values, ops = list(graph.values), list(graph.ops)
    taken: dict[int, int] = {}
    for op in graph.ops:
        if op.workspace_bytes > 0:
            taken[op.id] = len(values)
            name = f"workspace of {op.label}"
            values.append(Value(len(values), op.workspace_bytes, Role.INTERMEDIATE, name, "", graph.device))
            ops[op.id] = replace(op, workspace_bytes=0, creates=(*op.creates, taken[op.id]))
    steps: list[Step] = []
    for step in schedule:
        steps.append(step)
        if isinstance(step, Compute) and step.op in taken:
            steps.append(Free(taken[step.op]))
    return replace(graph, values=tuple(values), ops=tuple(ops)), Schedule(tuple(steps))


def render(document: Json) -> Iterator[str]:
    """The rows as a page."""
    rows = document["rows"]
    yield "# Reserved beyond allocated, replayed"
    yield ""
    yield from heading(document)
    yield (
        "AdamW, float32. *Held* is the most that the allocator hands out at once. Reserves are parts of it: "
        "in the first three steps, and over a training with validation passes and a smaller last batch. "
        "*Least* is the least memory on which that training runs with expandable segments, pages being given "
        "back when there is no more. *Offsets* are those of the step alone, beside what is always there."
    )
    yield ""
    head = ["step", "", "held MiB", "segments", "expandable", "offsets"]
    head += ["segments, training", "expandable, training", "least"]
    yield from table(head, [cells(row) for row in rows])
    planned = [row for row in rows if row["step"] != "plain"]
    kept = {
        "expandable, three steps": [part(row, "expandable_bytes") for row in planned],
        "expandable, a training": [part(row, "expandable_training_bytes") for row in planned],
        "offsets": [part(row, "offsets_bytes") for row in planned],
        "expandable, on a card that has no more": [row["least_part"] or 9 for row in planned],
    }
    for title, parts in kept.items():
        within = sum(each <= GOAL for each in parts)
        yield f"- {title}: {within} of {len(parts)} plans reserve at most {GOAL} of what they hold"


def cells(row: Json) -> list[str]:
    """One row of the table."""
    keys = ("segments_bytes", "expandable_bytes", "offsets_bytes")
    over = ("segments_training_bytes", "expandable_training_bytes")
    least = row["least_part"]
    return [
        row["model"],
        row["step"],
        mib(row["allocated_bytes"]),
        *(f"{part(row, key):.3f}" if key in row else "–" for key in keys),
        *(f"{part(row, key):.3f}" for key in over),
        "more than 1.4" if least is None else f"{least:.3f}",
    ]


def part(row: Json, key: str) -> float:
    """A reserve in parts of what was handed out at once while it came to be."""
    of = "allocated_bytes" if "training" in key else "steps_allocated_bytes"
    return float(row[key] / row[of])


if __name__ == "__main__":
    main()
