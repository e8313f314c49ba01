"""The tables of the standing benchmark, from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.report import heading, table
from lowtide.text.documents import write_text

Json = dict[str, Any]

CHUNKED = "chunked"  # in the name of a way that only language models have
EAGER = "eager"
CHECKPOINTED = "own checkpointing"
CHECKPOINTED_CHUNKED = f"own checkpointing, {CHUNKED} loss"
COMPILED = "torch.compile"
COMPILED_HALF = "torch.compile, budget 0.5"
COMPILED_CHUNKED = f"torch.compile, own checkpointing, {CHUNKED} loss"
KEPT = "lowtide, nothing recomputed"
SAME_PEAK = "lowtide, within own checkpointing's peak"
LOWEST = "lowtide, lowest"

LOWTIDE = (KEPT, SAME_PEAK, LOWEST)
WAYS = (
    EAGER,
    CHECKPOINTED,
    CHECKPOINTED_CHUNKED,
    COMPILED,
    COMPILED_HALF,
    COMPILED_CHUNKED,
    *LOWTIDE,
)
MEANINGS = {
    CHECKPOINTED: "`gradient_checkpointing_enable`, timm's `set_grad_checkpointing` (torchvision: a "
    "checkpoint around every block), √n segments of ResNet's blocks",
    f"{CHUNKED} loss": "the head and the loss in chunks of 2,048 tokens with gradients made in the forward, "
    "as Liger and cut cross entropy do",
    "budget 0.5": "`torch._functorch.config.activation_memory_budget`",
    "lowtide": 'plans of ops, with PyTorch\'s own kernels; `lowest` is `budget="min"`',
}
EARLIER = (
    "† of an earlier run, in the same way on the same kind of machine, at commit 69bf53f; rounded, for only "
    "the figures were kept."
)


def report(document: Json, output: Path) -> None:
    """Write the Markdown."""
    lines = [
        "# Where lowtide stands against what people use",
        "",
        *heading(document),
        "One training step: forward, loss, backward, gradients from None, no optimizer. MiB are the most "
        "that PyTorch's allocator held, weights and batch included, and what it reserved; ms the median of "
        "7 steps after 3. Each way in a process of its own, lowtide's three in one.",
        "",
        *(f"- {what}: {meaning}" for what, meaning in MEANINGS.items()),
        "",
        *overview(document["rows"], document.get("earlier", [])),
        *(f"- {note}" for note in document.get("notes", [])),
        "",
    ]
    for name in names(document["rows"]):
        lines += details(name, [row for row in document["rows"] if row["subject"] == name])
    write_text(output, "\n".join(lines).rstrip() + "\n")
    print(output)


def names(rows: Sequence[Json]) -> list[str]:
    """The models, in the order in which they were measured."""
    return list(dict.fromkeys(row["subject"] for row in rows))


def overview(rows: Sequence[Json], earlier: Sequence[Json] = ()) -> Iterator[str]:
    """MiB / ms of every way, a column for each model; what is of an `earlier` run has a mark."""
    found = {(row["subject"], row["label"]): cell(row) for row in rows}
    found |= {(row["subject"], row["label"]): f"{cell(row)} †" for row in earlier}
    columns = names(rows)
    yield from table(
        ["MiB / ms", *columns],
        [[way, *(found.get((name, way), "–") for name in columns)] for way in WAYS],
    )
    if earlier:
        yield EARLIER
        yield ""


def cell(row: Json) -> str:
    """`7,840 / 411`; a word where there is no such figure."""
    if "error" in row:
        return {"InfeasibleBudget": "does not fit", "OutOfMemoryError": "out of memory"}.get(
            row["failure"], "failed"
        )
    return f"{row['peak_bytes'] / 2**20:,.0f} / {row['ms']:,.0f}"


def details(name: str, rows: Sequence[Json]) -> Iterator[str]:
    """One model's table, and what went wrong."""
    yield f"## {name}"
    yield ""
    library = next((row["library"] for row in rows if "library" in row), None)
    if library:
        yield f"The model is of {library}."
        yield ""
    head = ["", "MiB", "reserved", "ms", "predicted MiB", "ops again", "planning s", "first step s", "commit"]
    measured = sorted((row for row in rows if "peak_bytes" in row), key=lambda row: WAYS.index(row["label"]))
    yield from table(head, [cells(row) for row in measured])
    failed = [row for row in rows if "error" in row]
    yield from (f"- {row['label']}: {' '.join(row['error'].split())}" for row in failed)
    if failed:
        yield ""


def cells(row: Json) -> list[str]:
    planned = "predicted_bytes" in row
    return [
        row["label"],
        _mib(row["peak_bytes"]),
        _mib(row["reserved_bytes"]) if "reserved_bytes" in row else "–",
        f"{row['ms']:,.1f}",
        _mib(row["predicted_bytes"]) if planned else "–",
        str(row["recomputed_ops"]) if planned else "–",
        f"{row['planning_seconds']:.1f}" if planned else "–",
        f"{row['first_seconds']:.1f}" if "first_seconds" in row else "–",
        row["commit"],
    ]


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"
