"""What one of several ranks does in the tests of distributed training; torchrun starts it on each.

    torchrun --nproc-per-node 2 tests/ranks.py FOLDER CASE…

Every case trains for some steps and leaves FOLDER/CASE.RANK.json behind.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import lowtide.backend
from lowtide.distributed import Replicated, Sharded, optimize, plan
from lowtide.distributed.agreement import TIMEOUT_SECONDS, largest
from lowtide.errors import LowtideError
from lowtide.integrations.accelerate import prepare
from lowtide.integrations.transformers import LowtideCallback
from lowtide.solvers.files import save_solution
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.zoo.gpt import GPT

STEPS = 3
Step = Callable[[], torch.Tensor]


def gpt(layers: int = 6, width: int = 64) -> nn.Module:
    """A transformer with dropout: random streams matter, and are a rank's own."""
    torch.manual_seed(0)
    return GPT(layers=layers, width=width, heads=4, vocab=300, context=64, dropout=0.1)


def convolutions() -> nn.Module:
    """Buffers that a forward changes, and that DDP broadcasts."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
        for _ in range(6)
    ]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.Flatten(), nn.LazyLinear(10)).train()


class Batch:
    """This rank's batch: other numbers on each, of the same shape."""

    def __init__(self, rank: int, kind: str) -> None:
        torch.manual_seed(100 + rank)
        if kind == "gpt":
            self.inputs = torch.randint(300, (8, 64))
            self.labels = torch.randint(300, (8 * 64,))
        else:
            self.inputs = torch.randn(16, 3, 18, 18)
            self.labels = torch.randint(10, (16,))

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.reshape(len(self.labels), -1), self.labels)


class Scored(nn.Module):
    """A model that gives out its loss, so that what compiles the model sees the whole of a step."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.model, self.batch = model, batch

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.batch.loss(self.model(inputs))


def trained(
    model: Callable[..., torch.Tensor], plain: nn.Module, batch: Batch, rank: int, buckets: Callable[[], int]
) -> dict[str, Any]:
    """Train `model`, which wraps `plain`: losses, weights, gradients, what was held and gathered."""
    optimizer = torch.optim.AdamW(plain.parameters())
    torch.manual_seed(7 + rank)

    def step() -> torch.Tensor:
        output = model(batch.inputs)
        loss = batch.loss(output) if output.ndim else output
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step()))
    gradients = digest(local(parameter.grad) for parameter in plain.parameters())
    optimizer.zero_grad()
    gc.collect()
    states = [thing for state in optimizer.state.values() for thing in state.values()]
    resident = held([*plain.parameters(), *plain.buffers(), *states, batch.inputs, batch.labels])
    reading = lowtide.measure(step)
    optimizer.zero_grad()
    with profile() as recording:
        step()
    gathers = sum(event.count for event in recording.key_averages() if event.key == "c10d::_allgather_base_")
    return {
        "losses": losses,
        "weights": digest(map(local, (*plain.parameters(), *plain.buffers()))),
        "gradients": gradients,
        "measured_bytes": resident + buckets() + reading.growth_bytes,
        "states_bytes": held(states),
        "gathers": gathers,
    }


def local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor."""
    found: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found.detach()


def held(tensors: Iterable[Any]) -> int:
    storages = {local(tensor).untyped_storage() for tensor in tensors}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The same for the same bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def told(solution: Solution | GraphSolution, folder: Path) -> dict[str, Any]:
    """What a plan promises, and what tells it from others."""
    path = folder / f"plan.{dist.get_rank()}.json"
    save_solution(solution, path)
    confirmed = solution.peak_bytes
    if isinstance(solution, Solution) and solution.confirmation is not None:
        confirmed = solution.confirmation.peak_bytes
    return {
        "plan": hashlib.sha256(path.read_bytes()).hexdigest(),
        "predicted_bytes": confirmed,
        "budget_bytes": solution.budget_bytes,
    }


# Cases ------------------------------------------------------------------------------------------------


def ddp(folder: Path, rank: int, kind: str, how: str, as_views: bool, unused: bool) -> dict[str, Any]:
    model, batch = gpt() if kind == "gpt" else convolutions(), Batch(rank, kind)
    if kind != "gpt":
        model(batch.inputs)  # the lazy layer
    found: dict[str, Any] = {}
    if how in ("layers", "ops"):
        solution = plan(
            model,
            batch.inputs,
            engine=Replicated(as_views, unused),
            loss=batch.loss,
            optimizer="adamw",
            budget="60%",
            method="rotor" if how == "layers" else None,
        )
        found = told(solution, folder)
        lowtide.apply(model, solution)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_views, find_unused_parameters=unused)
    return {**trained(wrapped, model, batch, rank, lambda: buckets_bytes(wrapped)), **found}


def compiled_ddp(folder: Path, rank: int) -> dict[str, Any]:
    """The backend inside a DDP with a bucket, and so a graph, for each block or so."""
    model, batch = gpt(), Batch(rank, "gpt")
    options: Any = {"budget": "9MiB"}
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 17):
        wrapped = DistributedDataParallel(Scored(model, batch), bucket_cap_mb=1 / 8)
        running: Any = torch.compile(wrapped, dynamic=False, backend=lowtide.backend.lowtide, options=options)
        training = trained(running, model, batch, rank, lambda: buckets_bytes(wrapped))
    (solution,) = lowtide.backend.plans_of(options)
    assert len({op.section for op in solution.graph.ops}) > 6
    found = told(solution, folder)
    for what in ("predicted_bytes", "budget_bytes"):  # on a CPU a backend does not know of them
        found[what] += training["states_bytes"]
    return {**training, **found}


def buckets_bytes(wrapped: DistributedDataParallel) -> int:
    """What DDP says of its buckets. Where it looks for unused parameters it makes none anew."""
    said = wrapped._get_ddp_logging_data()
    sizes = said["bucket_sizes" if wrapped.find_unused_parameters else "rebuilt_bucket_sizes"]
    return sum(int(size) for size in str(sizes).split(", "))


def reductions(rank: int, how: str) -> dict[str, Any]:
    """How often ranks reduce something in each step."""
    model, batch = gpt(), Batch(rank, "gpt")
    if how in ("layers", "ops"):
        method = "rotor" if how == "layers" else None
        optimize(
            model,
            batch.inputs,
            engine=Replicated(),
            loss=batch.loss,
            budget="60%",
            method=method,
            profile=False,
        )
    running: Any = DistributedDataParallel(model)
    if how == "backend":
        options: Any = {"budget": "1GiB", "profile": False}
        running = torch.compile(running, dynamic=False, backend=lowtide.backend.lowtide, options=options)
    counts = []
    for _ in range(4):
        model.zero_grad()
        with profile() as recording:
            batch.loss(running(batch.inputs)).backward()
        events = recording.key_averages()
        counts.append(sum(event.count for event in events if event.key == "c10d::allreduce_"))
    return {"counts": counts}


def fsdp(folder: Path, rank: int, budget: str | None) -> dict[str, Any]:
    model, batch = gpt(), Batch(rank, "gpt")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(model: nn.Module) -> nn.Module:
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    found: dict[str, Any] = {}
    if budget is not None:
        solution = plan(
            model,
            batch.inputs,
            engine=Sharded(shard),
            loss=batch.loss,
            optimizer="adamw",
            budget=budget,
        )
        found = told(solution, folder)
        lowtide.apply(model, solution)
    return {**trained(shard(model), model, batch, rank, lambda: 0), **found}


def accelerated(rank: int, budget: str | None) -> dict[str, Any]:
    """Accelerate's DDP, whose model is planned when the first batch comes."""
    accelerator, batch = Accelerator(cpu=True), Batch(rank, "gpt")
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    if budget is None:
        wrapped, updates = accelerator.prepare(model, optimizer)
    else:
        wrapped, updates = prepare(
            accelerator, model, optimizer, budget=budget, loss=batch.loss, progress=False
        )
    torch.manual_seed(7 + rank)
    losses, readings = [], []

    def step() -> None:
        loss = batch.loss(wrapped(batch.inputs))
        accelerator.backward(loss)
        updates.step()
        losses.append(loss.item())

    for _ in range(STEPS):
        updates.zero_grad()
        readings.append(lowtide.measure(step).growth_bytes)
    return {
        "losses": losses,
        "weights": digest(map(local, model.parameters())),
        "gradients": digest(local(parameter.grad) for parameter in model.parameters()),
        "measured_bytes": readings[-1],
    }


class Sentences(torch.utils.data.Dataset[Any]):
    """Random words: a batch for each rank and step."""

    def __len__(self) -> int:
        return 2 * 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 400, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def in_a_trainer(folder: Path, rank: int, budget: str | None) -> dict[str, Any]:
    """Hugging Face's Trainer, whose DDP looks for unused parameters, with a model that gives out scores."""
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 400, "n_positions": 32}
    words = {"bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **words))
    args = transformers.TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    callback = None if budget is None else LowtideCallback(budget, progress=False)
    trainer = transformers.Trainer(
        model, args, train_dataset=Sentences(), callbacks=[] if callback is None else [callback]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    step, losses, readings = trainer.training_step, [], []

    def measured(*given: Any, **named: Any) -> Any:
        results: list[Any] = []
        readings.append(lowtide.measure(lambda: results.append(step(*given, **named))).growth_bytes)
        losses.append(float(results[0]))
        return results[0]

    trainer.training_step = measured
    trainer.train()
    found = {
        "losses": losses,
        "weights": digest(map(local, model.parameters())),
        "gradients": "gone",
        "measured_bytes": readings[-1],
    }
    if callback is not None:
        (solution,) = callback.plans
        assert solution.budget_bytes is not None
        found["budget_bytes"] = solution.budget_bytes - solution.timeline.resident_bytes
    return found


def new_shapes(rank: int) -> dict[str, Any]:
    """All ranks meet a smaller batch, and plan for it together."""
    model, batch = gpt(), Batch(rank, "gpt")
    smaller = Batch(rank, "gpt")
    smaller.inputs, smaller.labels = batch.inputs[:4], batch.labels[: 4 * 64]
    now = batch
    engine = Replicated()
    optimize(
        model,
        engine=engine,
        loss=lambda output: now.loss(output),
        budget="60%",
        method="rotor",
    )
    wrapped = DistributedDataParallel(model)
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for now in (batch, smaller, batch):
            loss = now.loss(wrapped(now.inputs))
            loss.backward()
            losses.append(float(loss))
    return {"losses": losses, "warnings": [str(warning.message) for warning in caught]}


def quarrels(rank: int) -> dict[str, Any]:
    """What each rank is told where they cannot agree."""
    model, batch = gpt(), Batch(rank, "gpt")
    other = GPT(layers=2 + rank, width=64, heads=4, vocab=300, context=64)
    odd = batch.inputs[: 8 - rank]

    def told_by(model: nn.Module, inputs: torch.Tensor, **request: Any) -> list[str]:
        try:
            plan(model, inputs, engine=Replicated(), loss=torch.sum, **request)
        except LowtideError as error:
            return [type(error).__name__, str(error)]
        return []

    return {
        "another model": told_by(other, batch.inputs, budget="60%"),
        "an unequal batch": told_by(model, odd, budget="60%"),
        "another budget": told_by(model, batch.inputs, budget=f"{60 + rank}%"),
        "the largest number": [str(largest(10 * rank, TIMEOUT_SECONDS))],
        "an impossible budget": told_by(model, batch.inputs, budget="1KiB", method="rotor"),
    }


def alone(rank: int) -> dict[str, Any]:
    """Rank 1 meets a new shape alone, in the middle of its training."""
    model, batch = gpt(layers=1, width=16), Batch(rank, "gpt")
    optimize(
        model,
        batch.inputs,
        engine=Replicated(),
        loss=torch.sum,
        method="chen-sqrt",
        profile=False,
        timeout_seconds=30,  # within which the plan is made as well, which takes one
    )
    wrapped = DistributedDataParallel(model)
    told = []
    for rows in (8, 8 - rank):
        try:
            wrapped(batch.inputs[:rows]).sum().backward()
        except (
            RuntimeError,
            LowtideError,
        ) as error:  # of the process group, on the rank that is left waiting
            told.append(f"{type(error).__name__}: {error}")
    return {"told": told}


def left(rank: int, gone: int) -> dict[str, Any]:
    """One rank has gone before the others plan."""
    if rank == gone:
        os._exit(3)
    try:
        plan(gpt(), Batch(rank, "gpt").inputs, engine=Replicated(), loss=torch.sum, timeout_seconds=3)
    except LowtideError as error:
        return {"told": [f"{type(error).__name__}: {error}"]}
    return {"told": []}


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gc.collect()
    gc.freeze()  # what modules hold stays, and would be looked through again and again
    for case in cases:
        engine, *details = case.split("-")
        match engine:
            case "ddp" if "backend" in details:
                found = compiled_ddp(folder, rank)
            case "ddp":
                found = ddp(folder, rank, details[0], details[1], "views" in details, "unused" in details)
            case "reductions":
                found = reductions(rank, details[0])
            case "fsdp":
                found = fsdp(folder, rank, None if details[0] == "plain" else f"{details[0]}%")
            case "accelerate":
                found = accelerated(rank, None if details[0] == "plain" else f"{details[0]}%")
            case "trainer":
                found = in_a_trainer(folder, rank, None if details[0] == "plain" else f"{details[0]}%")
            case "shapes":
                found = new_shapes(rank)
            case "quarrels":
                found = quarrels(rank)
            case "alone":
                found = alone(rank)
            case _:
                found = left(rank, int(details[0]))
        (folder / f"{case}.{rank}.json").write_text(json.dumps(found))
        gc.collect()
    if not cases[-1].startswith(("alone", "left")):  # what is broken cannot be taken down in good order
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
