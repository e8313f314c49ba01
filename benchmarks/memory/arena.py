"""A training step in planned memory against PyTorch's own allocator: bytes held, allocations, time.

    python -m benchmarks.memory.arena measure --rows FILE.json --commit HASH      on the machine with the GPU
    python -m benchmarks.memory.arena measure --rows FILE.json --small            in small, for a CPU
    python -m benchmarks.memory.arena report --rows FILE.json                     Markdown

Ways to run the same step, forward, loss and backward, from gradients None, without an optimizer:

    eager                        plain training
    expandable segments          the same, with that setting of the caching allocator, in a process of its own
    …, expandable                the others there
    direct, naive, pool, static  the captured step in lowtide's executor, by where results get their memory
    static, recorded             the arena, replayed as one CUDA graph
    static, 60 %, static, min    the arena, with a recomputation plan
    applied, 60 %                a plan applied to the model, in the caching allocator

`held` is the most that was allocated, `reserved` the most that the caching allocator took from the device.
Milliseconds are the median of 7 steps after 3. Gradients are compared with an eager step's, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.frontier.frontier import Rows, guarded
from benchmarks.memory.report import report
from benchmarks.shared.machines import again, device
from benchmarks.shared.subjects import FRONTIER, FRONTIER_SMALL, Made, Subject
from lowtide.cost.measure import growth, record_cpu, seconds_of
from lowtide.execute.arena_step import ArenaStep
from lowtide.execute.memory import Memory
from lowtide.ir.schedule import Schedule, straight
from lowtide.planner.ops import StepBudget
from lowtide.trace.inputs import named_inputs
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import training_step

NETWORKS = ("vgg19", "resnet50", "gpt2-medium")
WARM_UP, STEPS = 3, 7
SEED = 0
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--rows", type=Path, required=True, help="where they are written")
    measuring.add_argument("--commit", default="unknown", help="of the code, to be written down")
    measuring.add_argument("--only", help="these networks: vgg19,resnet50")
    measuring.add_argument("--ways", help="these ways, by words in their labels")
    measuring.add_argument("--small", action="store_true", help="sizes for a CPU")
    measuring.add_argument("--row-seconds", type=float, default=150, help="a row that takes longer failed")
    measuring.add_argument("--alone", help="this network, in this process")
    reporting = commands.add_parser("report")
    reporting.add_argument("--rows", type=Path, required=True)
    reporting.add_argument("-o", "--output", type=Path, help="benchmarks/memory/results/arena-DATE.md")
    chosen = parser.parse_args()
    if chosen.command == "report":
        report(json.loads(chosen.rows.read_text()), chosen.output)
    elif chosen.alone is not None:
        del sys.argv[sys.argv.index("--alone") :]  # the command, to be written down as it was given
        measure_alone(chosen)
    else:
        measure_all(chosen)


def subjects(chosen: argparse.Namespace) -> dict[str, Subject]:
    """The networks that are asked for."""
    if chosen.small:
        found = {subject.key: subject for subject in FRONTIER_SMALL}
    else:
        found = {subject.key: subject for subject in FRONTIER if subject.key in NETWORKS}
    return found if chosen.only is None else {key: found[key] for key in chosen.only.split(",")}


def measure_all(chosen: argparse.Namespace) -> None:
    """Each network in two processes: the allocator's setting is read when it starts."""
    for key in subjects(chosen):
        for setting in ("", "expandable_segments:True") if device() == "cuda" else ("",):
            environment = {**os.environ, EXPANDABLE: setting} if setting else dict(os.environ)
            subprocess.run(again("--alone", key), check=False, env=environment)


def measure_alone(chosen: argparse.Namespace) -> None:
    """Every way to run one network that there is no row for yet."""
    subject = subjects(chosen)[chosen.alone]
    rows = Rows(chosen.rows, chosen.commit)
    torch.manual_seed(SEED)
    with torch.device(device()):
        made = subject.build()
    trial = Trial(subject.name, made)
    for label, work in trial.ways():
        wanted = chosen.ways is None or any(word in label for word in chosen.ways.split(","))
        if not wanted or rows.find(subject.name, label) is not None:
            continue
        trial.clean_up()
        row = guarded(work, chosen.row_seconds)
        rows.put({"subject": subject.name, "label": label, **row})
        told = row.get("error") or {k: v for k, v in row.items() if k not in ("moves", "tally")}
        print(f"{subject.key:12s} {label:22s} {told}", file=sys.stderr, flush=True)


class Trial:
    """One network, and every way to run a step of it."""

    def __init__(self, name: str, made: Made) -> None:
        self.name = name
        self.made = made
        self.where = torch.device(device())
        self.buffers = {name: buffer.clone() for name, buffer in made.model.named_buffers()}

    @cached_property
    def budget(self) -> StepBudget:
        """Traced, captured and profiled once."""
        return StepBudget(StepSpec(self.made.model, self.made.example, self.made.loss, name=self.name))

    @cached_property
    def expected(self) -> dict[str, torch.Tensor]:
        """What an eager step makes of a seed, on the CPU: gradients, and buffers afterwards."""
        return self.eager_step()

    @cached_property
    def unstable(self) -> list[str]:
        """What differs between two eager steps: kernels that add up in no fixed order."""
        again = self.eager_step()
        return [name for name, tensor in self.expected.items() if not torch.equal(tensor, again[name])]

    def eager_step(self) -> dict[str, torch.Tensor]:
        """Gradients and buffers after one step."""
        self.start_again()
        training_step(self.made.model, self.made.example, self.made.loss)()
        return self.made_by_step()

    def start_again(self) -> None:
        """As before the first step: no gradients, buffers and random numbers as they were."""
        self.made.model.zero_grad(set_to_none=True)
        for name, buffer in self.made.model.named_buffers():
            buffer.copy_(self.buffers[name])
        torch.manual_seed(SEED)

    def made_by_step(self) -> dict[str, torch.Tensor]:
        """The gradients and buffers as they are now, on the CPU."""
        model = self.made.model
        gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
        found = {f"{name}.grad": grad.cpu().clone() for name, grad in gradients if grad is not None}
        return found | {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}

    def ways(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Labels, and what to do."""
        if os.environ.get(EXPANDABLE):
            yield "expandable segments", self.eager
            yield "static, expandable", partial(self.executed, Memory.STATIC, None)
            yield "static, min, expandable", partial(self.executed, Memory.STATIC, "min")
            yield "applied, 60 %, expandable", partial(self.applied, "60%")
            yield "applied, min, expandable", partial(self.applied, "min")
            return
        yield "eager", self.eager
        for memory in (Memory.DIRECT, Memory.STATIC, Memory.POOL, Memory.NAIVE):
            yield memory.value, partial(self.executed, memory, None)
        if self.where.type == "cuda":
            yield "static, recorded", partial(self.executed, Memory.STATIC, None, recorded=True)
        for wanted in ("60%", "min"):
            yield f"static, {wanted.replace('%', ' %')}", partial(self.executed, Memory.STATIC, wanted)
        yield "applied, 60 %", partial(self.applied, "60%")

    def eager(self) -> dict[str, Any]:
        """Plain training."""
        return self.measured(training_step(self.made.model, self.made.example, self.made.loss))

    def applied(self, wanted: str) -> dict[str, Any]:
        """A plan, applied to the model."""
        solution = self.budget.solve("auto", wanted)
        lowtide.apply(self.made.model, solution, on_new_inputs="error")
        try:
            return self.measured(training_step(self.made.model, self.made.example, self.made.loss))
        finally:
            lowtide.remove(self.made.model)

    def executed(self, memory: Memory, wanted: str | None, *, recorded: bool = False) -> dict[str, Any]:
        """The captured step, in lowtide's executor."""
        expected, unstable = self.expected, self.unstable
        self.clean_up()
        graph = self.budget.graph
        schedule: Schedule = straight(graph) if wanted is None else self.budget.solve("auto", wanted).schedule
        started = time.perf_counter()
        inputs = named_inputs(self.made.model, self.made.example, self.made.loss)
        step = ArenaStep(self.made.model, graph, schedule, inputs, memory)
        planning_seconds = time.perf_counter() - started
        self.start_again()
        step()
        found = self.made_by_step()
        unequal = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
        if recorded:
            self.made.model.zero_grad(set_to_none=True)
            step.record()
        executor = step.executor
        measured = self.measured(step)
        report = step.report
        return {
            **measured,
            "planning_seconds": planning_seconds,
            "unequal": unequal,
            "unstable": unstable,
            "predicted_resident_bytes": report.resident_bytes,
            "arena_bytes": report.arena_bytes,
            "lower_bound_bytes": report.lower_bound_bytes,
            "extra_bytes": report.extra_bytes,
            "kept_bytes": executor.kept_bytes,
            "predicted_bytes": report.held_bytes if memory is Memory.STATIC else executor.timeline.peak_bytes,
            "moves": [vars(moves) for moves in report.moves],
            "tally": vars(executor.tally),
        }

    def clean_up(self) -> None:
        """As little as possible left of the last way."""
        self.made.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.where.type == "cuda":
            torch.cuda.empty_cache()

    def measured(self, step: Callable[[], object]) -> dict[str, Any]:
        """Steps, timed; what is held; how often the allocator is asked; whether that grows."""

        def fresh_step() -> float:
            self.made.model.zero_grad(set_to_none=True)
            return seconds_of(step, self.where)

        for _ in range(WARM_UP):
            fresh_step()
        if self.where.type != "cuda":
            self.made.model.zero_grad(set_to_none=True)
            blocks, _ = record_cpu(step)
            seconds = [fresh_step() for _ in range(STEPS)]
            return {
                "ms": 1e3 * statistics.median(seconds),
                "growth_bytes": max(growth(blocks)),
                "allocations": sum(block.bytes > 0 for block in blocks),
            }
        torch.cuda.reset_peak_memory_stats()
        reserved, before = torch.cuda.memory_reserved(), torch.cuda.memory_stats()
        seconds = [fresh_step() for _ in range(STEPS)]
        stats = torch.cuda.memory_stats()
        count = stats["allocation.all.allocated"] - before["allocation.all.allocated"]
        return {
            "ms": 1e3 * statistics.median(seconds),
            "held_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "grown_bytes": torch.cuda.memory_reserved() - reserved,
            "device_allocations": stats["num_device_alloc"] - before["num_device_alloc"],
            "allocations": count / STEPS,
            "allocated_between_bytes": torch.cuda.memory_allocated(),
        }


if __name__ == "__main__":
    main()
