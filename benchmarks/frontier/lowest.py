"""How low does the peak of a step go, and what does it cost? On a CPU, where measuring is exact.

    python -m benchmarks.frontier.lowest -o lowest-DATE-cpu.md --commit HASH [--only U-Net,VGG]

Each model is planned within parts of what a plain step holds beyond what is resident, and for the lowest
peak. Then the 12-block GPT on which PyTorch's own knob was tried, over many budgets. JSON is written beside
the Markdown, after each model; models that are there for the same commit are not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from benchmarks.frontier.flops import flops_ratio
from benchmarks.frontier.lowest_models import MODELS, built, gpt_of_12
from benchmarks.paper.report import heading, mib, table
from benchmarks.shared.machines import machine
from benchmarks.shared.subjects import Made
from lowtide.cost.measure import measure
from lowtide.errors import InfeasibleBudget
from lowtide.ir.graph import Graph, Role
from lowtide.planner.ops import StepBudget
from lowtide.solvers.refereed import extra_seconds
from lowtide.solvers.solution import GraphSolution
from lowtide.text.budget import LOWEST
from lowtide.text.documents import write_text
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import training_step

PARTS: dict[str, tuple[float, ...]] = {"GPT-2, 8 layers": (0.75, 0.45, 0.24)}
USUAL_PARTS = (0.75, 0.45, 0.25)
KNOB = "12-block GPT"
KNOB_MIB = (48, 40, 32, 24, 20, 16, 14.3, 12, 10, 9, 8, 7, 6, 5, 4)
# torch._functorch.config.activation_memory_budget on the same step, torch 2.13: the peak in MiB.
PYTORCH_KNOB = {
    1.0: 55.7,
    0.7: 34.1,
    0.5: 32.8,
    0.3: 23.3,
    0.2: 19.2,
    0.1: 14.5,
    0.05: 14.3,
    0.02: 37.0,
    0.0: 52.4,
}
EVERYTHING_FITS = 1 << 50
NOT_COUNTED = (Role.PARAMETER, Role.GRADIENT)
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--only", help="these models, by words in their names: U-Net,VGG")
    chosen = parser.parse_args()
    path = chosen.output.with_suffix(".json")
    document = json.loads(path.read_text()) if path.exists() else {}
    if document.get("machine", {}).get("commit") != chosen.commit:
        document = {}
    found: dict[str, Json] = document.get("models", {})
    for name in [*MODELS, KNOB]:
        if name in found or not wanted(name, chosen.only):
            continue
        started = time.perf_counter()
        found[name] = knob() if name == KNOB else lowered(name)
        print(f"{name:20s} {time.perf_counter() - started:6.1f} s", flush=True)
        document = {"machine": machine(chosen.commit), "models": found}
        write_text(path, json.dumps(document, indent=1))
        write_text(chosen.output, "\n".join(rendered(document)).rstrip() + "\n")


def wanted(name: str, only: str | None) -> bool:
    return only is None or any(word in name for word in only.split(","))


# Measuring ------------------------------------------------------------------------------------------------


class Step:
    """The step of one model, run for real. Without the first run, libraries would set themselves up in it."""

    def __init__(self, made: Made) -> None:
        self.model = made.model
        self._step = training_step(made.model, made.example, made.loss)

    def gradients(self) -> list[torch.Tensor]:
        """Of a step that begins with the same random numbers each time."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        self._step()
        found = [
            parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None
        ]
        self.model.zero_grad(set_to_none=True)
        return found

    def growth_bytes(self) -> int:
        """The most that it holds beyond what is there before it begins."""
        self.model.zero_grad(set_to_none=True)
        reading = measure(self._step, device="cpu")
        self.model.zero_grad(set_to_none=True)
        return reading.growth_bytes

    def under(self, solution: GraphSolution, eager: Sequence[torch.Tensor]) -> Json:
        """What it does under a plan."""
        lowtide.apply(self.model, solution, on_new_inputs="error")
        try:
            equal = [torch.equal(*pair) for pair in zip(self.gradients(), eager, strict=True)]
            return {"measured_bytes": self.growth_bytes(), "gradients_equal": all(equal)}
        finally:
            lowtide.remove(self.model)
            torch._dynamo.reset()


def lowered(name: str) -> Json:
    """One model within several budgets."""
    made = built(MODELS[name])
    step = Step(made)
    eager = step.gradients()
    growth_bytes = step.growth_bytes()
    budget = StepBudget(StepSpec(made.model, made.example, made.loss, name=name))
    resident_bytes, graph = budget.plain.timeline.resident_bytes, budget.graph
    asked: dict[str, str | int] = {
        f"{100 * part:.0f} %": resident_bytes + int(part * growth_bytes)
        for part in PARTS.get(name, USUAL_PARTS)
    }
    rows = {}
    for label, budget_bytes in {"all kept": EVERYTHING_FITS, **asked, "min": LOWEST}.items():
        rows[label] = budgeted(budget, budget_bytes, lambda found: step.under(found, eager))
    return {
        "ops": len(graph.ops),
        "parameters_bytes": parameters_bytes(made.model),
        "resident_bytes": resident_bytes,
        "eager_bytes": growth_bytes,
        "predicted_eager_bytes": budget.plain_peak_bytes - resident_bytes,
        "least_bytes": lowtide.solve(graph, "auto", EVERYTHING_FITS).lower_bound_bytes - resident_bytes,
        "rows": rows,
    }


def parameters_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def budgeted(budget: StepBudget, asked: str | int, measured: Callable[[GraphSolution], Json]) -> Json:
    """One plan: what is predicted of it, and what is measured under it."""
    started = time.perf_counter()
    try:
        solution = budget.solve("auto", asked)
    except InfeasibleBudget as error:
        return {"infeasible": str(error)}
    planning_seconds = time.perf_counter() - started
    return {
        "predicted_bytes": solution.peak_bytes - solution.timeline.resident_bytes,
        "seconds_ratio": 1 + solution.extra_seconds_ratio,
        "flops_ratio": flops_ratio(solution),
        "planning_seconds": planning_seconds,
        **measured(solution),
    }


# PyTorch's knob -------------------------------------------------------------------------------------------


def knob() -> Json:
    """Peaks without parameters and gradients, over budgets that mean the same."""
    made = built(gpt_of_12)
    step = Step(made)
    eager = step.gradients()
    budget = StepBudget(StepSpec(made.model, made.example, made.loss, name=KNOB))
    graph, applied = without_weights(budget.graph), budget.solve("auto", EVERYTHING_FITS)
    resident_bytes = applied.timeline.resident_bytes
    rows = []
    budgets: list[str | int] = [EVERYTHING_FITS, *[int(count * 2**20) for count in KNOB_MIB], LOWEST]
    for asked in budgets:
        started = time.perf_counter()
        try:
            found = lowtide.solve(graph, "auto", asked)
        except InfeasibleBudget:
            continue
        planning_seconds = time.perf_counter() - started
        whole = replace(
            applied,
            schedule=found.schedule,
            peak_bytes=lowtide.simulate(budget.graph, found.schedule).peak_bytes,
            extra_seconds=extra_seconds(budget.graph, found.schedule),
        )
        rows.append(
            {
                "budget_bytes": asked if isinstance(asked, int) and asked < EVERYTHING_FITS else None,
                "peak_bytes": found.peak_bytes,
                "predicted_bytes": whole.peak_bytes - resident_bytes,
                "seconds_ratio": 1 + whole.extra_seconds_ratio,
                "flops_ratio": flops_ratio(whole),
                "planning_seconds": planning_seconds,
                **step.under(whole, eager),
            }
        )
    return {"rows": rows}


def without_weights(graph: Graph) -> Graph:
    """The same step, counting neither parameters nor their gradients."""
    values = tuple(replace(value, bytes=0) if value.role in NOT_COUNTED else value for value in graph.values)
    return replace(graph, values=values)


# Markdown -------------------------------------------------------------------------------------------------


def rendered(document: Json) -> Iterator[str]:
    yield "# The lowest peaks, and what they cost"
    yield ""
    yield from heading(document)
    yield (
        "MiB beyond what is resident (weights, buffers and the batch), gradients included. Budgets are parts "
        "of what a plain step holds beyond that. Time is predicted from a profile of each op; FLOPs are "
        "PyTorch's count of matrix products, convolutions and attention. Both are ratios to a step that "
        "recomputes nothing. `least` is what a single op of the graph needs at once: no schedule of these "
        "ops peaks lower."
    )
    yield ""
    models = document["models"]
    head = ["model", "ops", "eager", "budget", "predicted", "measured", "of eager", "time ×", "FLOP ×"]
    head += ["gradients", "planning s"]
    lines = [cells for name in MODELS if name in models for cells in told(name, models[name])]
    yield from table(head, lines)
    if KNOB in models:
        yield from knob_told(models[KNOB]["rows"])


def told(name: str, found: Json) -> Iterator[list[str]]:
    begin = [f"{name}, least {mib(found['least_bytes'])}", str(found["ops"]), mib(found["eager_bytes"])]
    for label, row in found["rows"].items():
        if "infeasible" in row:
            yield [*begin, label, "none fits", *["–"] * 6]
        else:
            yield [*begin, label, mib(row["predicted_bytes"]), *reached(row, found["eager_bytes"])]
        begin = ["", "", ""]


def reached(row: Json, eager_bytes: int) -> list[str]:
    return [
        mib(row["measured_bytes"]),
        f"{row['measured_bytes'] / eager_bytes:.3f}",
        f"{row['seconds_ratio']:.3f}",
        f"{row['flops_ratio']:.3f}",
        "equal" if row["gradients_equal"] else "**differ**",
        f"{row['planning_seconds']:.1f}",
    ]


def knob_told(rows: Sequence[Json]) -> Iterator[str]:
    yield "## A budget that means the peak: 12 blocks of 64, 8×128 tokens"
    yield ""
    falling = all(after["peak_bytes"] <= row["peak_bytes"] for row, after in pairwise(rows))
    rising = all(after["seconds_ratio"] >= row["seconds_ratio"] for row, after in pairwise(rows))
    yield (
        "MiB, neither parameters nor their gradients counted, as the comparison counts them; the last two "
        "columns count gradients. As the budget falls, the peak "
        f"{'never rises' if falling else '**rises somewhere**'} and the time "
        f"{'never falls' if rising else '**falls somewhere**'}."
    )
    yield ""
    head = ["budget", "peak", "time ×", "FLOP ×", "planning s", "gradients"]
    yield from table(
        [*head, "with gradients: predicted", "measured"],
        [
            [
                "–" if row["budget_bytes"] is None else mib(row["budget_bytes"]),
                mib(row["peak_bytes"]),
                f"{row['seconds_ratio']:.3f}",
                f"{row['flops_ratio']:.3f}",
                f"{row['planning_seconds']:.1f}",
                "equal" if row["gradients_equal"] else "**differ**",
                mib(row["predicted_bytes"]),
                mib(row["measured_bytes"]),
            ]
            for row in rows
        ],
    )
    yield "PyTorch's `activation_memory_budget` on this step, measured before (eager 52.0):"
    yield ""
    yield from table(["value", *map(str, PYTORCH_KNOB)], [["peak", *map(str, PYTORCH_KNOB.values())]])


if __name__ == "__main__":
    main()
