"""How well is the peak of a training step predicted before it runs?

    python -m benchmarks.prediction.prediction measure -o measured.json     on the machine with the GPU
    python -m benchmarks.prediction.prediction predict -o predicted.json    on a machine without one
    python -m benchmarks.prediction.prediction table measured.json predicted.json -o prediction-DATE.md

`measure` runs each row in a process of its own: dry run, profile, then two real steps and a third under
the allocator's statistics. `predict` does the dry run alone, for CUDA, by lowtide's device rules.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.machines import machine
from benchmarks.shared.rows import ROWS, Made, Row
from lowtide.cost.measure import measure
from lowtide.ir.cuda_allocator import cached
from lowtide.text.documents import write_text
from lowtide.trace.dry_run import Trace, dry_run
from lowtide.trace.profile import profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "predict"):
        command = commands.add_parser(name)
        command.add_argument("-o", "--output", type=Path, required=True)
        command.add_argument("--row", type=int, help="this row only, in this process")
        command.add_argument("--cache", type=Path, help="where profiled costs are kept")
        command.add_argument("--commit", default="unknown", help="of the code, to be written down")
    table = commands.add_parser("table")
    table.add_argument("files", nargs=2, type=Path)
    table.add_argument("-o", "--output", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.command == "table":
        measured, predicted = (json.loads(path.read_text()) for path in chosen.files)
        write_text(chosen.output, render(measured, predicted))
        draw(measured, predicted, chosen.output.with_suffix(".png"))
    elif chosen.row is not None:
        work = measured_row if chosen.command == "measure" else predicted_row
        print(json.dumps(work(ROWS[chosen.row], chosen.cache)))
    else:
        rows = [row_in_own_process(chosen, index) for index in range(len(ROWS))]
        write_text(chosen.output, json.dumps({"machine": machine(chosen.commit), "rows": rows}, indent=1))


def row_in_own_process(chosen: argparse.Namespace, index: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.prediction.prediction",
        chosen.command,
        "-o",
        "-",
        "--row",
        str(index),
    ]
    command += ["--cache", str(chosen.cache)] if chosen.cache else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"row {index} ({ROWS[index].name}) failed")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{found['name']:32s} "
        + " ".join(
            f"{key} {value / 2**20:,.1f}" for key, value in found.items() if key.endswith("_bytes") and value
        ),
        file=sys.stderr,
    )
    return found


def measured_row(row: Row, cache: Path | None) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = row.build()
    start = time.perf_counter()
    trace = traced(made)
    dry = time.perf_counter()
    bare = trace.peak_bytes
    trace = profile(trace, cache=cache)
    profiled = time.perf_counter()
    torch.cuda.empty_cache()
    for _ in range(2):
        again(made)
    reading = measure(made.step)
    drop_gradients(made)
    seconds = measure(made.step, timed=3).seconds
    return {
        **described(row, trace),
        "measured_bytes": reading.peak_bytes,
        "measured_resident_bytes": reading.resident_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "without_workspace_bytes": bare,
        "step_seconds": seconds,
        "op_seconds": sum(op.seconds for op in trace.graph.ops),
        "dry_run_seconds": dry - start,
        "profile_seconds": profiled - dry,
    }


def traced(made: Made, device: str | None = None) -> Trace:
    """The dry run, of the second step where an optimizer makes its state in the first."""
    warmup = 0 if made.optimizer is None else 1
    return dry_run(made.step, model=made.model, optimizer=made.optimizer, device=device, warmup=warmup)


def again(made: Made) -> None:
    made.step()
    drop_gradients(made)


def drop_gradients(made: Made) -> None:
    """A step without an optimizer begins with no gradients; one with an optimizer drops them itself."""
    if made.optimizer is None:
        made.model.zero_grad(set_to_none=True)


def predicted_row(row: Row, cache: Path | None) -> dict[str, Any]:
    from lowtide.cost.cuda_rules import price

    with torch.device("meta"):
        made = row.build()
    start = time.perf_counter()
    trace = traced(made, device="cuda")
    trace = replace(trace, graph=price(trace.graph))
    return {**described(row, trace), "dry_run_seconds": time.perf_counter() - start}


def described(row: Row, trace: Trace) -> dict[str, Any]:
    timeline = trace.timeline
    assert timeline.peak_op is not None
    cache = cached(trace.graph, trace.schedule)
    return {
        "name": row.name,
        "held_out": row.held_out,
        "ops": len(trace.graph.ops),
        "predicted_bytes": cache.allocated_bytes,
        "predicted_reserved_bytes": cache.reserved_bytes,
        "referee_bytes": timeline.peak_bytes,
        "predicted_resident_bytes": timeline.resident_bytes,
        "peak_op": timeline.peak_op.label,
        "peak_workspace_bytes": timeline.peak_op.workspace_bytes,
        "categories": {str(category): size for category, size in timeline.categories.items()},
        "notes": list(trace.graph.notes),
    }


def render(measured: dict[str, Any], predicted: dict[str, Any]) -> str:
    """The two runs as a Markdown table. Errors are of the part that is not resident."""
    there, here = measured["machine"], predicted["machine"]
    lines = [
        f"# Predicted against measured peak, {there['date']}",
        "",
        f"Measured on one {there['device']}, torch {there['torch']}, Python {there['python']}. "
        "Predicted *there* with a profile taken on it, and *elsewhere* on a machine without any GPU "
        f"(torch {here['torch']}).",
        "One training step in eager PyTorch, everything kept, gradients from None, no optimizer. MiB. "
        "Errors are in per cent of the part that is not resident.",
        "",
        "| step | ops | measured | predicted there | error | predicted elsewhere | error "
        "| reserved | predicted there | op at the peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    there_errors, here_errors = errors(measured, measured), errors(measured, predicted)
    for row, (real, guess) in enumerate(zip(measured["rows"], predicted["rows"], strict=True)):
        cells = [
            real["name"] + (" †" if real["held_out"] else ""),
            str(real["ops"]),
            mib(real["measured_bytes"]),
        ]
        cells += [mib(real["predicted_bytes"]), f"{there_errors[row]:+.2f} %"]
        cells += [mib(guess["predicted_bytes"]), f"{here_errors[row]:+.2f} %"]
        cells += [mib(real["reserved_bytes"]), mib(real["predicted_reserved_bytes"]), real["peak_op"]]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "† played no part in finding the rules for CUDA that predict without a GPU."]
    return "\n".join(lines) + "\n"


def errors(measured: dict[str, Any], found: dict[str, Any]) -> list[float]:
    """Per cent of the part that is not resident, row by row."""
    return [
        100
        * (guess["predicted_bytes"] - real["measured_bytes"])
        / (real["measured_bytes"] - real["measured_resident_bytes"])
        for real, guess in zip(measured["rows"], found["rows"], strict=True)
    ]


def draw(measured: dict[str, Any], predicted: dict[str, Any], path: Path) -> None:
    """The errors as a picture: one line a step, a mark for each way of predicting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [row["name"] for row in measured["rows"]]
    figure, axes = pyplot.subplots(figsize=(11, 0.32 * len(names) + 1.4), layout="constrained")
    lines = range(len(names))
    axes.axvspan(-1, 1, color="0.93", label="within 1 %")
    axes.axvline(0, color="0.4", linewidth=1)
    axes.plot(errors(measured, predicted), lines, "o", color="#d55e00", label="predicted without any GPU")
    axes.plot(errors(measured, measured), lines, "D", color="#0072b2", label="predicted with a profile")
    axes.set_yticks(lines, names)
    axes.invert_yaxis()
    axes.set_xlabel("error of the predicted peak, per cent of what is not resident")
    axes.set_title(f"Predicted against measured, {measured['machine']['device']}", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


if __name__ == "__main__":
    main()
