"""What is left in memory of models that were planned, trained and dropped?

    python -m benchmarks.memory.dropped -o benchmarks/memory/results/dropped-DATE.json --commit HASH

One model after another is made, wrapped in a class that is local to a function (whose methods close over
it), planned in every way, trained for two steps under bf16 autocast, and dropped; then memory is collected
and what is still allocated is noted. convnext_base and swin_base of timm where that is installed, else two
of the zoo. On a CPU, where the allocator does not tell, those of all tensors that are alive are.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from benchmarks.shared.machines import device, machine
from lowtide import zoo
from lowtide.text.documents import write_text

BATCH, SIDE, CLASSES, TIMES = 8, 224, 10, 3
TIMM = ("convnext_base", "swin_base_patch4_window7_224")
ZOO = ("resnet18", "vit")

Batch = tuple[torch.Tensor, torch.Tensor]


def made(name: str) -> nn.Module:
    """The network, inside of a model whose class closes over it."""
    if name in ZOO:
        net = zoo.workload(name, zoo.Sizes(batch=BATCH, image=SIDE, classes=CLASSES)).model
    else:
        net = import_module("timm").create_model(name, num_classes=CLASSES)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device(), dtype=torch.bfloat16):
                return F.cross_entropy(net(images), labels)

    return WithLoss().to(device())


def planned_by_op(model: nn.Module, batch: Batch) -> nn.Module:
    """`plan` and `apply`, op by op."""
    solution = lowtide.plan(model, batch, budget="min", effort="quick", method="auto")
    lowtide.apply(model, solution)
    return model


def planned_by_layer(model: nn.Module, batch: Batch) -> nn.Module:
    """`plan` and `apply`, layer by layer."""
    lowtide.apply(model, lowtide.plan(model, batch, method="chen-sqrt"))
    return model


def optimized(model: nn.Module, batch: Batch) -> nn.Module:
    """`optimize`, to the lowest peak."""
    return lowtide.optimize(model, batch, budget="min", effort="quick")


WAYS: dict[str, Callable[[nn.Module, Batch], nn.Module]] = {
    "not planned": lambda model, batch: model,
    "plan and apply, by op": planned_by_op,
    "plan and apply, by layer": planned_by_layer,
    "optimize": optimized,
}


def trained_and_dropped(name: str, way: str) -> None:
    """One model, from its making to its end."""
    torch.manual_seed(0)
    model = made(name)
    batch = (
        torch.randn(BATCH, 3, SIDE, SIDE, device=device()),
        torch.randint(CLASSES, (BATCH,), device=device()),
    )
    model = WAYS[way](model, batch)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(*batch).backward()


def held_bytes() -> int:
    """What is allocated, after whatever can go has gone."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {storage._cdata: storage for each in tensors if (storage := each.untyped_storage())}
    return sum(storage.nbytes() for storage in storages.values() if storage.device.type == "cpu")


def rows(names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """For every network and way, what is held after each of several models."""
    for name in names:
        for way in WAYS:
            row: dict[str, Any] = {"model": name, "way": way, "before_bytes": held_bytes()}
            row["after_bytes"] = []
            for _ in range(TIMES):
                trained_and_dropped(name, way)
                row["after_bytes"].append(held_bytes())
            print(row, flush=True)
            yield row


def table(document: dict[str, Any]) -> str:
    """The same as Markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in document["machine"].items() if key != "command")
    lines = [
        "# What is left of models that were planned, trained and dropped",
        "",
        facts,
        "",
        f"`{document['machine']['command']}`",
        "",
        "Under bf16 autocast, the class local to a function; MiB that are allocated after each model has "
        "gone, beside what was there before the first of its row. Not planned: what the libraries keep for "
        "themselves, cuBLAS's workspaces above all.",
        "",
        "| model | way | " + " | ".join(f"after {n + 1}" for n in range(TIMES)) + " |",
        "|---|---|" + "---:|" * TIMES,
    ]
    for row in document["rows"]:
        more = [f"{(after - row['before_bytes']) / 2**20:.1f}" for after in row["after_bytes"]]
        lines.append(f"| {row['model']} | {row['way']} | {' | '.join(more)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--models", default=",".join(TIMM if find_spec("timm") else ZOO))
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    document: dict[str, Any] = {"machine": machine(chosen.commit), "rows": []}
    for row in rows(tuple(chosen.models.split(","))):
        document["rows"].append(row)
        write_text(chosen.output, json.dumps(document, indent=1))
    write_text(chosen.output.with_suffix(".md"), table(document))


if __name__ == "__main__":
    main()
