"""What do DDP's buckets cost the compiled backend, which sees a graph for each of them?

    python -m benchmarks.engines.cuts -o cuts-DATE-cpu.md --commit HASH [--buckets 25 4 2 1]

A GPT is trained by torch.compile with our backend at the lowest peak that it finds, inside a DDP of one rank
over gloo, with buckets of up to so many MiB. Dynamo cuts the model where they end. Predicted and measured are
the peaks of a step once it is planned: parameters, buckets, the batch and what the step makes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowtide
from benchmarks.engines.engines import Scored
from benchmarks.paper.report import heading, percent, table
from benchmarks.shared.machines import machine
from lowtide.backend import lowtide as backend
from lowtide.backend import plans_of
from lowtide.text.documents import write_text
from lowtide.zoo.gpt import GPT

LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS, BATCH = 8, 256, 4, 512, 256, 8
STEPS = 3  # the first is watched, in the second DDP makes its buckets anew, the third is measured
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--buckets", type=float, nargs="+", default=[25, 4, 2, 1], help="MiB, at least 1")
    chosen = parser.parse_args()
    store = dist.HashStore()  # type: ignore[attr-defined] # its stub forgets it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    rows = []
    for bucket_mib in chosen.buckets:
        rows.append(trained(bucket_mib))
        print(json.dumps(rows[-1]), flush=True)
        torch._dynamo.reset()
    dist.destroy_process_group()
    document = {"machine": machine(chosen.commit), "rows": rows}
    write_text(chosen.output.with_suffix(".json"), json.dumps(document, indent=1))
    write_text(chosen.output, "\n".join(rendered(document)).rstrip() + "\n")


def trained(bucket_mib: float) -> Json:
    torch.manual_seed(0)
    model = GPT(LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS, dropout=0.1)
    words, targets = torch.randint(VOCABULARY, (2, BATCH, TOKENS))

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    replica = DistributedDataParallel(Scored(model, loss), bucket_cap_mb=bucket_mib)
    options: Any = {"budget": "min"}
    running: Any = torch.compile(replica, backend=backend, options=options, dynamic=False)

    def step() -> None:
        running(words).backward()

    for _ in range(STEPS - 1):
        model.zero_grad()
        step()
    model.zero_grad()
    growth = lowtide.measure(step, device="cpu").growth_bytes
    (plan,) = plans_of(options)
    sizes = str(replica._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(", ")
    there = sum(tensor.nbytes for tensor in (*model.parameters(), words, targets)) + sum(map(int, sizes))
    return {
        "bucket_mib": bucket_mib,
        "graphs": len({op.section for op in plan.graph.ops if op.section >= 0}),
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": there + growth,
    }


def rendered(document: Json) -> Iterator[str]:
    yield "# The lowest peak of the compiled backend, by the size of DDP's buckets"
    yield ""
    yield from heading(document)
    sizes = f"layers {LAYERS}, width {WIDTH}, tokens {TOKENS}, batch {BATCH}"
    yield f"A GPT ({sizes}; dropout 0.1), one rank over gloo."
    yield ""
    yield from table(
        ["buckets MiB", "graphs", "predicted MiB", "measured MiB", "off"],
        [
            [
                f"{row['bucket_mib']:g}",
                str(row["graphs"]),
                f"{row['predicted_bytes'] / 2**20:.1f}",
                f"{row['measured_bytes'] / 2**20:.1f}",
                percent(row["predicted_bytes"] / row["measured_bytes"] - 1),
            ]
            for row in document["rows"]
        ],
    )


if __name__ == "__main__":
    main()
