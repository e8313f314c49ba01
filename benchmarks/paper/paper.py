"""The paper's experiment: which layers to recompute, by every method, predicted and measured.

    python -m benchmarks.paper.paper measure -o paper.json              every method on the paper's networks
    python -m benchmarks.paper.paper measure -o paper.json --small      in small, for a CPU
    python -m benchmarks.paper.paper runs -o runs.json                  epochs, varying batches, varying paths
    python -m benchmarks.paper.paper table paper.json runs.json -o paper-DATE.md

Each network is measured in a process of its own: the plain step is traced and profiled, each method plans,
each distinct plan is tried out by a dry run and then by real steps, whose times are taken by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.paper.report import render
from benchmarks.shared.machines import device, machine
from benchmarks.shared.subjects import LARGE, SMALL, Made, Subject
from lowtide import zoo
from lowtide.chain.plan import Plan
from lowtide.chain.unroll import replay
from lowtide.cost.measure import growth, measure, record_cpu, seconds_of
from lowtide.errors import InfeasibleBudget
from lowtide.execute.apply import apply, remove
from lowtide.planner.api import optimize
from lowtide.planner.compare import compare
from lowtide.planner.layers import Rehearsal
from lowtide.solvers import solve
from lowtide.solvers.solution import Solution, Status
from lowtide.text.documents import write_text
from lowtide.trace.step import training_step

BUDGETS = (0.75, 0.5, 0.25, 0.1)  # how much of what can be saved at all is left unsaved
TIMELINES = {  # and the checkpoints of the paper's figure, where it names some
    "vgg19, batch 64×224²": (3, 11, 24),
    "alexnet, batch 1024×224²": (),
    "vgg19, batch 8×96²": (3, 11, 24),
}
POINTS = 1500  # of a timeline, to be drawn
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "runs"):
        command = commands.add_parser(name)
        command.add_argument("-o", "--output", type=Path, required=True)
        command.add_argument("--small", action="store_true", help="sizes for a CPU")
        command.add_argument("--rows", help="these only, by number: 0,1,4")
        command.add_argument("--alone", type=int, help="this row, in this process")
        command.add_argument("--commit", default="unknown", help="of the code, to be written down")
    table = commands.add_parser("table")
    table.add_argument("files", nargs="+", type=Path)
    table.add_argument("-o", "--output", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.command == "table":
        render([json.loads(path.read_text()) for path in chosen.files], chosen.output)
    elif chosen.command == "runs":
        write_text(
            chosen.output,
            json.dumps({"machine": machine(chosen.commit), "runs": runs(chosen.small)}, indent=1),
        )
    elif chosen.alone is not None:
        print(json.dumps(row(subjects(chosen)[chosen.alone])))
    else:
        measure_all(chosen)


def subjects(chosen: argparse.Namespace) -> tuple[Subject, ...]:
    return SMALL if chosen.small else LARGE


def measure_all(chosen: argparse.Namespace) -> None:
    """Each row in its own process; what is there is written after each, so that nothing is lost."""
    wanted = range(len(subjects(chosen))) if chosen.rows is None else map(int, chosen.rows.split(","))
    rows = []
    for index in wanted:
        command = [
            sys.executable,
            "-m",
            "benchmarks.paper.paper",
            "measure",
            "-o",
            "-",
            "--alone",
            str(index),
        ]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, *(["--small"] if chosen.small else [])], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"row {index} ({subjects(chosen)[index].name}) failed")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{rows[-1]['name']:32s} {time.perf_counter() - started:6.1f} s", file=sys.stderr, flush=True)
        write_text(chosen.output, json.dumps({"machine": machine(chosen.commit), "rows": rows}, indent=1))


# One network ----------------------------------------------------------------------------------------------


def row(subject: Subject) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(device()):
        made = subject.build()
    rehearsal = Rehearsal(made.model, made.example, made.loss, name=subject.name)
    started = time.perf_counter()
    plain = rehearsal.plain
    prepared = time.perf_counter() - started
    return {
        "name": subject.name,
        "resident_bytes": plain.timeline.resident_bytes,
        "traced_and_profiled_seconds": prepared,
        "comparisons": {
            granularity: compare(rehearsal, granularity=granularity, measure=True, repeats=ROUNDS).to_json()
            for granularity in subject.granularities
        },
        "budgets": budgets(rehearsal, subject.granularities[0]),
        "library_checkpointing": library_checkpointing(made, rehearsal),
        "timelines": list(timelines(subject, rehearsal)),
    }


def budgets(rehearsal: Rehearsal, granularity: str) -> dict[str, Any]:
    """One level against nested recomputation, within the same bytes."""
    least = rehearsal.solve(rehearsal.chain(granularity), "rotor").confirmation
    assert least is not None
    spread = least.plain_peak_bytes - least.peak_bytes
    return {
        str(part): compare(
            rehearsal,
            methods=["hong-linear", "rotor"],
            granularity=granularity,
            budget=least.peak_bytes + int(part * spread),
            measure=True,
            repeats=ROUNDS,
        ).to_json()
        for part in BUDGETS
    }


def library_checkpointing(made: Made, rehearsal: Rehearsal) -> dict[str, Any] | None:
    """What the model's own library offers: a checkpoint around every block."""
    if made.checkpoint is None:
        return None
    made.checkpoint(True)
    predicted = Rehearsal(made.model, made.example, made.loss).plain.peak_bytes
    step = training_step(made.model, made.example, made.loss)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    peak = fresh_peak(made.model, step, rehearsal)
    for _ in range(ROUNDS):
        for on in (True, False):
            made.checkpoint(on)
            made.model.zero_grad(set_to_none=True)
            seconds[on].append(seconds_of(step, torch.device(device())))
    return {
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": peak,
        "measured_seconds_ratio": statistics.median(seconds[True]) / statistics.median(seconds[False]),
    }


def fresh_peak(model: nn.Module, step: Callable[[], object], rehearsal: Rehearsal) -> int:
    """Of a step that begins without gradients, after two that let libraries set themselves up."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step()
    model.zero_grad(set_to_none=True)
    reading = measure(step, device=device())
    resident = rehearsal.plain.timeline.resident_bytes
    return reading.peak_bytes if device() == "cuda" else resident + reading.growth_bytes


# Timelines ------------------------------------------------------------------------------------------------


def timelines(subject: Subject, rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    """Live bytes over the step, predicted and as PyTorch recorded them, for the paper's figures 3 to 5."""
    if subject.name not in TIMELINES:
        return
    chain = rehearsal.chain("layer")
    plans = {"keep all": Plan(), "optimum": solve(chain, "hong-linear").plan}
    if TIMELINES[subject.name]:
        plans["checkpoints {3, 11, 24}"] = Plan.at(TIMELINES[subject.name])
    step = training_step(rehearsal.model, rehearsal.example, rehearsal.loss)
    for label, plan in plans.items():
        peak = replay(chain, plan).peak_bytes
        solution = Solution(chain, label, plan, Status.FEASIBLE, peak, 0, 0.0, 0.0)
        trace = rehearsal.under(solution)
        apply(rehearsal.model, solution)
        rehearsal.model.zero_grad(set_to_none=True)
        step()
        rehearsal.model.zero_grad(set_to_none=True)
        recorded = recorded_bytes(step)
        remove(rehearsal.model)
        resident = trace.timeline.resident_bytes
        yield {
            "plan": label,
            "checkpoints": list(plan.checkpoints),
            "chain_peak_bytes": peak,
            "predicted_peak_bytes": trace.peak_bytes,
            "recorded_peak_bytes": resident + max(recorded),
            "predicted": thinned(predicted_bytes(trace.timeline.live_bytes.tolist(), resident)),
            "recorded": thinned(recorded),
        }


def predicted_bytes(live: Sequence[int], resident: int) -> list[int]:
    return [count - resident for count in live]


def recorded_bytes(step: Callable[[], object]) -> list[int]:
    """What the step holds beyond what was there before, after each of the allocator's events."""
    if device() == "cpu":
        return list(growth(record_cpu(step)[0]))
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
    step()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    return list(accumulate(signs[e["action"]] * e["size"] for e in events if e["action"] in signs))


def thinned(values: Sequence[int]) -> list[int]:
    """At most `POINTS` of them, each the largest of its stretch: no peak is lost."""
    stretch = max(1, -(-len(values) // POINTS))
    return [max(values[start : start + stretch]) for start in range(0, len(values), stretch)]


# Runs -----------------------------------------------------------------------------------------------------


def runs(small: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    return {"epochs": epochs(small), "batches": varying_batches(small), "paths": varying_paths(small)}


def epochs(small: bool) -> dict[str, Any]:
    """A few hundred steps over a small data set, plain and planned by turns: equal losses, and the time."""
    count, batch, image, passes = (64, 8, 32, 5) if small else (2048, 64, 128, 10)
    images = torch.randn(count, 3, image, image, device=device())
    labels = torch.randint(0, 10, (count,), device=device())
    found: dict[str, Any] = {"steps": passes * count // batch, "batch": batch, "image": image}
    for name in ("resnet18", "densenet121") if not small else ("resnet18",):
        found[name] = {}
        for label in ("plain", "plain again", "hong-linear", "rotor, least", "rotor, half"):
            torch.manual_seed(0)
            with torch.device(device()):
                model = zoo.workload(name, zoo.Sizes(batch=batch, image=image, classes=10)).model
            example = images[:batch]
            if not label.startswith("plain"):
                loss = partial(nn.functional.cross_entropy, target=labels[:batch])
                apply(model, planned(Rehearsal(model, example, loss), label))
            found[name][label] = trained(model, images, labels, batch, passes)
        plain = dict(found[name]["plain"])
        for run in found[name].values():
            differences = [abs(a - b) for a, b in zip(run["losses"], plain["losses"], strict=True)]
            run["equal_losses"] = not any(differences)
            run["largest_difference"] = max(differences)
            run["seconds_ratio"] = run["seconds"] / plain["seconds"]
            run["losses"] = [run["losses"][0], run["losses"][-1]]
    return found


def planned(rehearsal: Rehearsal, label: str) -> Solution:
    """By the method, at the least peak it reaches, or half-way from there to the plain one."""
    method, _, how = label.partition(", ")
    chain = rehearsal.chain("fine")
    least = rehearsal.solve(chain, method)
    reached = least.confirmation
    assert reached is not None
    if how != "half":
        return least
    return rehearsal.solve(chain, method, (reached.peak_bytes + reached.plain_peak_bytes) // 2)


def trained(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, batch: int, passes: int
) -> dict[str, Any]:
    torch.manual_seed(1)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    started = time.perf_counter()
    for _ in range(passes):
        order = torch.randperm(len(images)).split(batch)
        for chosen in order:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    numbers = [loss.item() for loss in losses]
    seconds = time.perf_counter() - started
    return {"losses": numbers, "seconds": seconds}


def varying_batches(small: bool) -> dict[str, Any]:
    """Batches of any size under one budget: planned anew when a size is met first."""
    sizes = [8, 6, 10, 4, 8, 10, 6, 40] if small else [64, 48, 80, 32, 64, 80, 48, 320]
    image = 64 if small else 224
    torch.manual_seed(0)
    with torch.device(device()):
        model = zoo.workload(
            "resnet18" if small else "resnet50", zoo.Sizes(batch=sizes[0], image=image)
        ).model
    batches = {size: (torch.randn(size, 3, image, image, device=device()),) for size in sizes}
    return under_budget(model, [batches[size] for size in sizes], 0.3, [f"batch {size}" for size in sizes])


class Depth(nn.Module):
    """A transformer that runs as many of its blocks as it is told to."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for block in self.blocks[:depth]:
            x = block(x)
        return x


def varying_paths(small: bool) -> dict[str, Any]:
    """A model whose graph changes from step to step."""
    blocks, width, shape = (6, 64, (4, 64)) if small else (12, 512, (32, 512))
    depths = [blocks, blocks // 2, blocks - 1, blocks, 2, blocks // 2, blocks - 1]
    torch.manual_seed(0)
    with torch.device(device()):
        model = Depth(blocks, width)
        x = torch.randn(*shape, width)
    return under_budget(model, [(x, depth) for depth in depths], 0.3, [f"{depth} blocks" for depth in depths])


def under_budget(
    model: nn.Module, batches: Sequence[tuple[Any, ...]], part: float, labels: Sequence[str]
) -> dict[str, Any]:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.float().square().mean()

    first = Rehearsal(model, batches[0], loss)
    least = first.solve(first.chain(), "rotor").confirmation
    assert least is not None
    budget_bytes = least.peak_bytes + int(part * (least.plain_peak_bytes - least.peak_bytes))
    optimize(model, batches[0], budget=budget_bytes, loss=loss)
    steps: list[dict[str, Any]] = []
    for label, batch in zip(labels, batches, strict=True):
        started = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                training_step(model, batch, loss)()  # the first meets new inputs, plans, and warms up
        except InfeasibleBudget as error:
            steps.append({"step": label, "refused": str(error)})
            continue
        planning = time.perf_counter() - started
        model.zero_grad(set_to_none=True)
        reading = measure(training_step(model, batch, loss), device=device())
        own = first.plain.timeline.resident_bytes - bytes_of(batches[0]) + bytes_of(batch)
        peak = own + reading.growth_bytes  # this process holds the other batches too
        model.zero_grad(set_to_none=True)
        steps.append({"step": label, "peak_bytes": peak, "seconds_with_planning": planning})
    return {"budget_bytes": budget_bytes, "plain_bytes": least.plain_peak_bytes, "steps": steps}


def bytes_of(batch: tuple[Any, ...]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in batch if isinstance(leaf, torch.Tensor))


if __name__ == "__main__":
    main()
