"""An epoch of many lengths under one budget: as it is written, a plan for each length, and plans for classes.

    python -m benchmarks.lengths.lengths -o FILE.json --commit HASH      writes FILE.md too

A small GPT on the CPU, the same batches in the same order for each way. The first epoch plans where it must;
the second one only trains, and says how fast. Then a step of each length is measured: what is always there,
the batch, and what PyTorch's allocator held beside. All ways run one after the other in one process, so
ratios between them are of one run. Seconds are those of the processor for this process, of one thread: what
else the machine does counts little.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from benchmarks.paper.report import heading, table
from benchmarks.shared.machines import machine
from lowtide.text.documents import write_text
from lowtide.zoo.gpt import GPT

_VOCABULARY, _LONGEST, _ROUND = 256, 256, 8
_BUDGET_PART = 0.7
_CLASSES = 4
_NOTHING = -100  # labels that a loss leaves out
_MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """How much there is to do."""

    batches: int = 150
    batch: int = 4
    layers: int = 4
    width: int = 128


class Writer(GPT):
    """A GPT that returns its loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(ids).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=_NOTHING)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="FILE.json; FILE.md beside it")
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--batches", type=int, default=Sizes.batches, help="in an epoch")
    chosen = parser.parse_args()
    document = {"machine": machine(chosen.commit), **epoch(Sizes(batches=chosen.batches))}
    chosen.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    write_text(chosen.output.with_suffix(".md"), report(document))


def epoch(sizes: Sizes) -> dict[str, Any]:
    """Every way to train on the same batches."""
    lengths = drawn(sizes.batches)
    found = lowtide.worst(gpt(sizes), lengths, partial(texts, sizes), optimizer="sgd")
    budget = int(_BUDGET_PART * found.worst.peak_bytes)
    classes = lowtide.best_classes(Counter(lengths), _CLASSES)
    rows = []
    for name, ready in ways(sizes, lengths, budget, classes).items():
        rows.append(trained(name, ready, sizes, lengths))
        print(json.dumps(rows[-1]))
    return {
        "sizes": vars(sizes),
        "lengths": dict(sorted(Counter(lengths).items())),
        "classes": classes,
        "budget_bytes": budget,
        "worst": found.to_json(),
        "rows": rows,
    }


@dataclass(frozen=True)
class Way:
    """A way to train: the model made ready, and what it is given in place of a batch."""

    model: Callable[[], nn.Module]
    given: Callable[[int], tuple[Tensor, Tensor]]


def ways(sizes: Sizes, lengths: Sequence[int], budget: int, classes: Sequence[int]) -> dict[str, Way]:
    """By name."""
    request = {"budget": budget, "optimizer": "sgd", "effort": "quick"}
    given = partial(texts, sizes)

    def padded(length: int) -> tuple[Tensor, Tensor]:
        ids, labels = lowtide.padded(texts(sizes, length), classes, (0, _NOTHING))
        return ids, labels

    def planned(**more: Any) -> nn.Module:
        return lowtide.optimize(gpt(sizes), **{**request, **more})

    by_classes = partial(planned, example=given, lengths=lengths, classes=classes)
    return {
        "plain": Way(partial(gpt, sizes), given),
        "a plan for each length": Way(planned, given),
        "plans of classes, followed": Way(by_classes, given),
        "plans of classes, padded to": Way(by_classes, padded),
    }


def trained(name: str, way: Way, sizes: Sizes, lengths: Sequence[int]) -> dict[str, Any]:
    """Two epochs, and then a measured step of each length."""
    torch.manual_seed(0)
    begun = time.process_time()
    model = way.model()
    known = len(lowtide.plans_of(model))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    seconds = []
    for _ in range(2):
        for length in lengths:
            step(model, optimizer, way.given(length))
        seconds.append(time.process_time() - begun)
        begun = time.process_time()
    plans = len(lowtide.plans_of(model))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    peaks = [weights + measured(model, optimizer, way.given(length)) for length in sorted(set(lengths))]
    found = {
        "way": name,
        "peak_bytes": max(peaks),
        "searched": known or (plans if name != "plain" else 0),
        "plans": plans,
        "first_epoch_seconds": seconds[0],
        "planning_seconds": seconds[0] - seconds[1],
        "samples_per_second": sizes.batch * len(lengths) / seconds[1],
    }
    torch._dynamo.reset()
    return found


def measured(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> int:
    """What a step on this batch holds, beside the weights."""
    reading = lowtide.measure(partial(step, model, optimizer, batch))
    return sum(part.nbytes for part in batch) + reading.growth_bytes


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """Forward, loss, backward, update."""
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def gpt(sizes: Sizes) -> Writer:
    torch.manual_seed(0)
    return Writer(sizes.layers, sizes.width, heads=4, vocab=_VOCABULARY, context=_LONGEST)


def drawn(batches: int) -> list[int]:
    """Random lengths, many short ones and few long ones, as those of texts are."""
    source = random.Random(0)
    return [min(_LONGEST, _ROUND * max(2, round(source.lognormvariate(2.4, 0.6)))) for _ in range(batches)]


def texts(sizes: Sizes, length: int) -> tuple[Tensor, Tensor]:
    """A batch of that length, with labels."""
    generator = torch.Generator().manual_seed(length)
    stream = torch.randint(_VOCABULARY, (sizes.batch, length + 1), generator=generator)
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def report(document: dict[str, Any]) -> str:
    """The rows as Markdown."""
    plain, *_ = rows = document["rows"]
    sizes, counts = document["sizes"], document["lengths"]
    budget = document["budget_bytes"]
    classes = ", ".join(map(str, document["classes"]))
    cells = [
        [
            row["way"],
            f"{row['peak_bytes'] / _MIB:.2f}",
            "–" if row is plain else ("yes" if row["peak_bytes"] <= budget else "**no**"),
            str(row["searched"]),
            str(row["plans"] - row["searched"] if row is not plain else 0),
            "–" if row is plain else f"{row['planning_seconds']:.0f}",
            f"{row['samples_per_second'] / plain['samples_per_second']:.2f}",
        ]
        for row in rows
    ]
    head = ["", "peak MiB", "within budget", "searched", "followed", "planning s", "samples/s, of plain"]
    lines = [
        "# An epoch of many lengths",
        "",
        *heading(document),
        f"A GPT of {sizes['layers']} layers, {sizes['width']} wide, on {sizes['batches']} batches of "
        f"{sizes['batch']} texts, of {len(counts)} lengths from {min(map(int, counts))} to "
        f"{max(map(int, counts))} tokens in random order, within {budget / _MIB:.2f} MiB. SGD. Classes: "
        f"{classes}. *Searched* are plans that a search made, *followed* those that took a class's schedule. "
        "*Planning* is what the first epoch, and getting ready, took longer than the second, in seconds of "
        "the processor, and samples per second are those of the second epoch, padding not counted.",
        "",
        *table(head, cells),
        "",
        f"Told before the first step: length {document['worst']['worst']['length']} is the worst, with "
        f"{document['worst']['worst']['predicted_peak_bytes'] / _MIB:.2f} MiB as it is written.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lowtide: the model meets inputs without a plan")
        main()
