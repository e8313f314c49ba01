"""Under DDP and FSDP2, does every rank hold what was predicted, and what does the plan cost?

    torchrun --nproc-per-node 2 -m benchmarks.engines.engines -o engines-DATE.md --commit HASH
             [--layers 24 --width 1024 --heads 16 --tokens 1024 --batch 8 --vocab 50257] [--budgets 60% 45%]

A GPT is trained with AdamW by PyTorch's engine as it is and under plans, one after another, on one GPU a rank
over NCCL, or on a CPU over gloo, with PyTorch's deterministic kernels. Peaks are those of the rank that holds
most. On CUDA they are the allocator's; on a CPU what is there before a step is summed up (DDP says itself how
large its buckets are) and the step's growth is the allocator's. `compile` is torch.compile with our
backend, the loss compiled with the model. On a CPU that does not know of the optimizer's states, so they are
taken off its budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from benchmarks.paper.report import heading, percent, table
from benchmarks.shared.machines import machine
from lowtide.backend import lowtide as backend
from lowtide.backend import plans_of
from lowtide.cost.measure import seconds_of
from lowtide.distributed import Engine, Replicated, Sharded, plan
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.budget import Budget
from lowtide.text.documents import write_text
from lowtide.zoo.gpt import GPT

SIZES = {"layers": 8, "width": 128, "heads": 4, "tokens": 128, "batch": 8, "vocab": 1000}
WARM_UP = 3
TIMED = 7
SETTLING_SECONDS = 1  # a thread of NCCL's looks now and then which collectives are done
COMPILED = "compile"
BUCKET_MIB = 200  # Dynamo cuts graphs where buckets end, and what passes from one to the next has to be kept
METHODS = {"ddp": ("rotor", "auto", COMPILED), "fsdp2": ("rotor",)}
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--budgets", nargs="+", default=["60%", "45%"], help="of each engine's plain peak")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what determinism asks for
    torch.use_deterministic_algorithms(True)
    # What nobody reads need not be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rows: list[Json] = []
    for engine, method, budget in ways(chosen.budgets):
        plain = next((row for row in rows if row["engine"] == engine), None)
        allowed = None if plain is None else Budget.parse(budget).bytes_of(plain["predicted_bytes"])
        found = Training(chosen, device, engine).row(method, allowed)
        torch._dynamo.reset()
        gc.collect()  # before the next collective, which is when NCCL lets go of what the last ones read
        everyones: list[Json] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyones, found)
        rows.append({**found, "measured_bytes": max(other["measured_bytes"] for other in everyones)})
        rows[-1]["same_plan"] = len({other["plan"] for other in everyones}) == 1
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
            write(rows, chosen)  # all that there is, should the time not suffice for the rest
    dist.destroy_process_group()


def write(rows: Sequence[Json], chosen: argparse.Namespace) -> None:
    document = {
        "machine": machine(chosen.commit),
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "sizes": {name: getattr(chosen, name) for name in SIZES},
        "rows": rows,
    }
    write_text(chosen.output.with_suffix(".json"), json.dumps(document, indent=1))
    write_text(chosen.output, "\n".join(rendered(document)).rstrip() + "\n")


def ways(budgets: Sequence[str]) -> Iterator[tuple[str, str | None, str | None]]:
    """What is trained with: an engine as it is, then with every method within every budget."""
    for engine, methods in METHODS.items():
        yield engine, None, None
        yield from ((engine, method, budget) for method in methods for budget in budgets)


class Scored(nn.Module):
    """A model that gives out its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(tokens))


class Training:
    """One model, made anew, and this rank's batch."""

    def __init__(self, chosen: argparse.Namespace, device: torch.device, engine: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = GPT(
            chosen.layers, chosen.width, chosen.heads, chosen.vocab, chosen.tokens, dropout=0.1
        ).to(device)
        torch.manual_seed(1 + dist.get_rank())
        self.tokens = torch.randint(chosen.vocab, (chosen.batch, chosen.tokens), device=device)
        self.targets = torch.randint(chosen.vocab, (chosen.batch * chosen.tokens,), device=device)
        self.device = device
        self.name = engine
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), self.targets)

    def shard(self, model: nn.Module) -> nn.Module:
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return model

    @property
    def engine(self) -> Engine:
        return Replicated() if self.name == "ddp" else Sharded(self.shard)

    def row(self, method: str | None, budget_bytes: int | None) -> Json:
        options: Json = {}
        solution = None
        if method != COMPILED:
            solution = plan(
                self.model,
                self.tokens,
                engine=self.engine,
                loss=self.loss,
                optimizer="adamw",
                method=method or "rotor",
                budget=budget_bytes or "100%",
            )
        if method is not None and solution is not None:
            lowtide.apply(self.model, solution)
        buckets: Callable[[], int] = int
        running: nn.Module
        if self.name == "ddp":
            given = Scored(self.model, self.loss) if method == COMPILED else self.model
            wrapped = running = DistributedDataParallel(given, bucket_cap_mb=BUCKET_MIB)
            if method == COMPILED:
                assert budget_bytes is not None
                options["budget"] = budget_bytes - self.unknown_bytes
                compiled: Any = torch.compile(wrapped, backend=backend, options=options, dynamic=False)
                running = compiled

            def buckets() -> int:
                sizes = str(wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"])
                return sum(map(int, sizes.split(", ")))
        else:
            running = self.shard(self.model)
        optimizer = torch.optim.AdamW(
            self.model.parameters(), foreach=True if self.device.type == "cuda" else None
        )
        torch.manual_seed(7 + dist.get_rank())

        def step() -> float:
            output = running(self.tokens)
            loss = output if method == COMPILED else self.loss(output)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        losses = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(WARM_UP):
            optimizer.zero_grad()
            losses.append(step())
        before = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        optimizer.zero_grad()
        gc.collect()
        time.sleep(SETTLING_SECONDS)
        dist.all_reduce(torch.zeros(1, device=self.device))  # which is when memory of those is given back
        reading = lowtide.measure(step, device=self.device)
        seconds = []
        for _ in range(TIMED):
            optimizer.zero_grad()
            seconds.append(seconds_of(step, self.device))
        if solution is None:
            (solution,) = plans_of(options)
        predicted = plain_bytes(solution) if method is None else peak_bytes(solution)
        return {
            "engine": self.name,
            "method": method,
            "budget_bytes": budget_bytes,
            "predicted_bytes": predicted + (self.unknown_bytes if method == COMPILED else 0),
            "measured_bytes": reading.peak_bytes
            if self.device.type == "cuda"
            else self.resident_bytes(optimizer) + buckets() + reading.growth_bytes,
            "first_steps_bytes": before,
            "seconds": statistics.median(seconds),
            "losses": losses,
            "plan": str(solution.plan) if isinstance(solution, Solution) else str(hash(solution.schedule)),
        }

    @property
    def unknown_bytes(self) -> int:
        """What a backend does not know of on a CPU: AdamW's states, two of each parameter, and its counts."""
        if self.device.type == "cuda":
            return 0
        return sum(2 * parameter.nbytes + 4 for parameter in self.model.parameters())

    def resident_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """What this rank holds of the model, its states and its batch when a step begins."""
        states = [thing for state in optimizer.state.values() for thing in state.values()]
        held = [*self.model.parameters(), *self.model.buffers(), *states, self.tokens, self.targets]
        storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in held]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_bytes(solution: Solution | GraphSolution) -> int:
    confirmation = solution.confirmation if isinstance(solution, Solution) else None
    return solution.peak_bytes if confirmation is None else confirmation.peak_bytes


def plain_bytes(solution: Solution | GraphSolution) -> int:
    assert isinstance(solution, Solution)
    assert solution.confirmation is not None
    return solution.confirmation.plain_peak_bytes


def rendered(document: Json) -> Iterator[str]:
    sizes = ", ".join(f"{name} {size}" for name, size in document["sizes"].items())
    yield "# A rank's peak under DDP and FSDP2, predicted and measured"
    yield ""
    yield from heading(document)
    yield f"A GPT ({sizes}; dropout 0.1), AdamW, {document['ranks']} rank(s) over {document['backend']}."
    yield f"DDP's buckets are of up to {BUCKET_MIB} MiB; in the second step it makes them anew."
    yield f"The highest peak of the first {WARM_UP} steps, given on CUDA, has to be within the budget too."
    yield f"Losses of {WARM_UP} steps are compared with those of the same engine without a plan, bit for bit."
    yield ""
    head = [
        "engine",
        "plan",
        "budget MiB",
        "predicted MiB",
        "measured MiB",
        "off",
        "first steps MiB",
        "step ms",
        "time",
        "losses",
        "kept",
    ]
    yield from table(head, [rendered_row(row, document["rows"]) for row in document["rows"]])


def rendered_row(row: Json, rows: list[Json]) -> list[str]:
    plain = next(other for other in rows if other["engine"] == row["engine"] and other["method"] is None)
    budget = row["budget_bytes"]
    return [
        row["engine"],
        row["method"] or "none",
        "–" if budget is None else f"{budget / 2**20:,.1f}",
        f"{row['predicted_bytes'] / 2**20:,.1f}",
        f"{row['measured_bytes'] / 2**20:,.1f}",
        percent(row["predicted_bytes"] / row["measured_bytes"] - 1),
        "–" if row["first_steps_bytes"] is None else f"{row['first_steps_bytes'] / 2**20:,.1f}",
        f"{1e3 * row['seconds']:.1f}",
        "–" if row is plain else percent(row["seconds"] / plain["seconds"] - 1),
        "equal" if row["losses"] == plain["losses"] else "differ",
        "–"
        if budget is None
        else "yes"
        if max(row["measured_bytes"], row["first_steps_bytes"] or 0) <= budget
        else "no",
    ]


if __name__ == "__main__":
    main()
