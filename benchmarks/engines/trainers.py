"""In the trainers that people use, on a GPU: is the budget kept, and what does the plan cost?

    python -m benchmarks.engines.trainers -o trainers-DATE.md --commit HASH
           [--layers 12 --width 768 --heads 12 --tokens 512 --batch 8 --vocab 50257 --budget 70%]

A GPT-2 of transformers with random weights is trained by Hugging Face's Trainer, by Lightning and in a loop
with Accelerate, as it is and within a budget, in single precision and with bf16 autocast. A peak is the
allocator's, over a whole step, once optimizer states are there; a time is the median of the steps after it.
Launched by torchrun, all three wrap the model in DDP.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as lightning
import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, Dataset

import lowtide
from benchmarks.paper.report import heading, mib, percent, table
from benchmarks.shared.machines import machine
from lowtide.integrations.accelerate import prepare
from lowtide.integrations.lightning import LowtideCallback as ForLightning
from lowtide.integrations.transformers import LowtideCallback as ForTransformers
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.documents import write_text

STEPS = 10
WARM_UP = 3  # the plan is made, kernels are chosen and optimizers make their states
SIZES = {"layers": 12, "width": 768, "heads": 12, "tokens": 512, "batch": 8, "vocab": 50257}
Json = dict[str, Any]
Plans = Sequence[Solution | GraphSolution]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--budget", default="70%")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows: list[Json] = []
    for name, train in {
        "transformers": with_transformers,
        "lightning": with_lightning,
        "accelerate": with_accelerate,
    }.items():
        for precision in ("no", "bf16"):
            for budget in (None, chosen.budget):
                watch = Watch()
                plans = train(chosen, precision, budget, watch)
                rows.append({"trainer": name, "precision": precision, **watch.row(plans)})
                print(json.dumps(rows[-1]), flush=True)
                torch._dynamo.reset()
                gc.collect()
    document = {
        "machine": machine(chosen.commit),
        "ddp": dist.is_initialized(),
        "sizes": {name: getattr(chosen, name) for name in SIZES},
        "rows": rows,
    }
    write_text(chosen.output.with_suffix(".json"), json.dumps(document, indent=1))
    write_text(chosen.output, "\n".join(rendered(document)).rstrip() + "\n")


class Watch:
    """The peaks, times and losses of a training, told when a step begins and ends."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.seconds: list[float] = []
        self._began = 0.0

    def begin(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def end(self, loss: float | None = None) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._began)
        self.peaks.append(torch.cuda.max_memory_allocated())
        if loss is not None:
            self.losses.append(loss)

    def row(self, plans: Plans) -> Json:
        return {
            "budget_bytes": plans[0].budget_bytes if plans else None,
            "predicted_bytes": plans[0].peak_bytes if plans else None,
            "measured_bytes": max(self.peaks[WARM_UP:]),
            "seconds": statistics.median(self.seconds[WARM_UP:]),
            "first_step_seconds": self.seconds[0],
            "losses": self.losses,
        }


class Texts(Dataset[Any]):
    """Random words, always the same."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(chosen.vocab, (STEPS * chosen.batch, chosen.tokens), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


def gpt(chosen: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=chosen.layers,
            n_embd=chosen.width,
            n_head=chosen.heads,
            n_positions=chosen.tokens,
            vocab_size=chosen.vocab,
            use_cache=False,
        )
    )


# The trainers: each trains, and gives back what was planned -------------------------------------------------


def with_transformers(chosen: argparse.Namespace, precision: str, budget: str | None, watch: Watch) -> Plans:
    class Watching(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.end()

        def on_log(self, _: Any, __: Any, ___: Any, logs: Json, **others: Any) -> None:
            if "loss" in logs:
                watch.losses.append(float(logs["loss"]))

    planner = None if budget is None else ForTransformers(budget, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=chosen.batch,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=precision == "bf16",
        )
        trainer = transformers.Trainer(
            gpt(chosen),
            arguments,
            train_dataset=Texts(chosen),
            callbacks=[Watching(), *([] if planner is None else [planner])],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return () if planner is None else planner.plans


def with_lightning(chosen: argparse.Namespace, precision: str, budget: str | None, watch: Watch) -> Plans:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gpt = gpt(chosen)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.gpt(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 5e-5)

    class Watching(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            watch.begin()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            watch.end(float(outputs["loss"]))

    planner = None if budget is None else ForLightning(budget, progress=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(
        max_epochs=1,
        accelerator="gpu",
        devices=1,
        precision="32-true" if precision == "no" else "bf16-mixed",
        callbacks=[Watching(), *([] if planner is None else [planner])],
        enable_model_summary=False,
        **quiet,
    ).fit(Module(), DataLoader(Texts(chosen), batch_size=chosen.batch))
    return () if planner is None else planner.plans


def with_accelerate(chosen: argparse.Namespace, precision: str, budget: str | None, watch: Watch) -> Plans:
    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(mixed_precision=precision)
    made = gpt(chosen)
    things = (
        made,
        torch.optim.AdamW(made.parameters(), 5e-5),
        DataLoader(Texts(chosen), batch_size=chosen.batch),
    )
    if budget is None:
        model, optimizer, data = accelerator.prepare(*things)
    else:
        model, optimizer, data = prepare(accelerator, *things, budget=budget, progress=False)
    torch.manual_seed(1)
    for batch in data:
        watch.begin()
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        watch.end(float(loss.detach()))
    return lowtide.plans_of(accelerator.unwrap_model(model))


# The report -------------------------------------------------------------------------------------------------


def rendered(document: Json) -> Iterator[str]:
    sizes = ", ".join(f"{name} {size}" for name, size in document["sizes"].items())
    yield "# A GPT-2 in Hugging Face's Trainer, Lightning and Accelerate, within a budget"
    yield ""
    yield from heading(document)
    under = ", under DDP" if document["ddp"] else ""
    yield (
        f"GPT-2 with random weights ({sizes}), AdamW, {STEPS} steps{under}. "
        "Losses are compared with those of the same trainer without a plan: bit for bit, or by how much the "
        "farthest is off."
    )
    yield ""
    head = ["trainer", "autocast", "budget MiB", "predicted", "measured", "kept", "step ms", "time", "losses"]
    yield from table(head, [rendered_row(row, document["rows"]) for row in document["rows"]])


def rendered_row(row: Json, rows: Sequence[Json]) -> list[str]:
    plain = next(
        other
        for other in rows
        if (other["trainer"], other["precision"]) == (row["trainer"], row["precision"])
        and other["budget_bytes"] is None
    )
    planned = row is not plain
    return [
        row["trainer"],
        row["precision"],
        mib(row["budget_bytes"]),
        mib(row["predicted_bytes"]),
        mib(row["measured_bytes"]),
        "–" if not planned else "yes" if row["measured_bytes"] <= row["budget_bytes"] else "no",
        f"{1e3 * row['seconds']:.1f}",
        "–" if not planned else percent(row["seconds"] / plain["seconds"] - 1),
        "–" if not planned else compared(row["losses"], plain["losses"]),
    ]


def compared(losses: Sequence[float], expected: Sequence[float]) -> str:
    if losses == expected:
        return "equal"
    off = max(abs(mine / its - 1) for mine, its in zip(losses, expected, strict=True))
    return f"within {off:.0e}"


if __name__ == "__main__":
    main()
