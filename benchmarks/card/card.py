"""Does training stay on the card? Batches named for cards of 8 to 40 GiB, trained where no more is to be had.

    python -m benchmarks.card.card name --rows FILE.json --commit HASH      anywhere, before: it takes minutes
    python -m benchmarks.card.card measure --rows FILE.json --commit HASH   on the machine with the GPU
    python -m benchmarks.card.card table --rows FILE.json                   Markdown beside it

A card is made of a larger one: PyTorch may reserve what the card would leave it
(`set_per_process_memory_fraction`), beside the CUDA context that lowtide counts. For each model and card
batches are named as `lowtide batch --card` does, plain and planned, without a GPU; with it each is trained
for twenty steps with AdamW in processes of different history, and a batch that is 5 % larger in one. That
should fail where the step is plain; where it is planned, lowtide should refuse it or it should fail.

Tasks are done in turns, the first history of every model and card before the second: whenever the seconds are
over, what is there says something of all. A task that is there for the same commit is not done again.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.card.subjects import OnCard, subjects
from benchmarks.frontier.frontier import Rows, guarded
from benchmarks.paper.report import heading, mib, table
from benchmarks.shared.machines import again, device
from lowtide.cost.cuda_rules import CONTEXT_BYTES
from lowtide.planner.on_card import Beside, expand_segments
from lowtide.text.card import Card
from lowtide.text.documents import write_text

Json = dict[str, Any]
CAPS = (8, 12, 16, 24, 40)
STEPS = 20
WAYS = ("plain", "planned")
HISTORIES = ("fresh", "after another model", "cudnn.benchmark", "after another model, cudnn.benchmark")
MORE = "5 % more"
NAMED = "named"
_LARGER = 1.05
_FULL = 0.97  # of the card, at the least


@dataclass(frozen=True, order=True)
class Task:
    """One process: batches named, or one of them trained. They are sorted by turn."""

    turn: int
    gib: int
    subject: str
    way: str
    history: str

    @property
    def label(self) -> str:
        """What it is called among the rows of its subject."""
        return f"{self.gib} GiB, {self.way}, {self.history}"


def tasks(keys: Sequence[str], caps: Sequence[int]) -> Iterator[Task]:
    """Everything there is to do, in order."""
    for gib in caps:
        for key in keys:
            yield Task(0, gib, key, NAMED, NAMED)
            for way in WAYS:
                yield Task(1, gib, key, way, HISTORIES[0])
                yield Task(2, gib, key, way, MORE)
                yield from (Task(3 + turn, gib, key, way, each) for turn, each in enumerate(HISTORIES[1:]))


def larger(batch: int) -> int:
    """A batch that is 5 % larger, by one at the least."""
    return max(batch + 1, int(batch * _LARGER))


def fraction(gib: int, device_bytes: int) -> float:
    """What PyTorch may reserve on a card of that size, as a part of the card that there is."""
    return Beside().left_bytes(Card(gib << 30)) / device_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("name", "measure"):
        working = commands.add_parser(name)
        working.add_argument("--rows", type=Path, required=True, help="where they are written")
        working.add_argument("--commit", default="unknown", help="of the code, to be written down")
        working.add_argument("--seconds", type=float, default=540, help="after that no new task begins")
        working.add_argument("--row-seconds", type=float, default=300, help="a task that takes longer failed")
        working.add_argument("--caps", default=",".join(map(str, CAPS)), help="cards, in GiB")
        working.add_argument("--subjects", help="those whose names hold one of these: gpt2,unet")
        working.add_argument("--alone", metavar="TASK", help="this one, in this process")
    tabling = commands.add_parser("table")
    tabling.add_argument("--rows", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.command == "table":
        document = json.loads(chosen.rows.read_text())
        write_text(chosen.rows.with_suffix(".md"), "\n".join(render(document)) + "\n")
    elif chosen.alone is not None:
        measure_alone(chosen, Task(**json.loads(chosen.alone)))
    else:
        measure_all(chosen)


# Tasks ------------------------------------------------------------------------------------------------------


def measure_all(chosen: argparse.Namespace) -> None:
    """Every task in a process of its own, until time is over."""
    deadline = time.monotonic() + chosen.seconds
    words = chosen.subjects.split(",") if chosen.subjects else [""]
    keys = [each.key for each in subjects() if any(word in each.key for word in words)]
    for task in sorted(tasks(keys, [int(gib) for gib in chosen.caps.split(",")])):
        rows = Rows(chosen.rows, chosen.commit)
        if (task.way == NAMED) != (chosen.command == "name") or not is_due(rows, task):
            continue
        if deadline < time.monotonic():
            print("out of time; call again to go on", file=sys.stderr)
            return
        subprocess.run(again("--alone", json.dumps(task.__dict__)), check=False)


def is_due(rows: Rows, task: Task) -> bool:
    """Whether it is still to be done, and there is a batch to train."""
    if rows.find(task.subject, task.label) is not None:
        return False
    return task.way == NAMED or batch_of(rows, task) is not None


def batch_of(rows: Rows, task: Task) -> int | None:
    """The batch that was named for a task."""
    named = rows.find(task.subject, Task(0, task.gib, task.subject, NAMED, NAMED).label) or {}
    found: int | None = (named.get(task.way) or {}).get("batch")
    return found if found is None or task.history != MORE else larger(found)


def measure_alone(chosen: argparse.Namespace, task: Task) -> None:
    """One task, and its row."""
    rows = Rows(chosen.rows, chosen.commit)
    subject = next(each for each in subjects() if each.key == task.subject)
    work = (lambda: named(subject, task)) if task.way == NAMED else (lambda: trained(rows, subject, task))
    row = guarded(work, chosen.row_seconds)
    rows.put({"subject": task.subject, "label": task.label, **task.__dict__, **row})
    shown = ("batch", "steps", "failure", "reserved_bytes")
    told = {key: value for key, value in row.items() if key in shown}
    print(task.subject, task.label, told, file=sys.stderr)


def named(subject: OnCard, task: Task) -> Json:
    """The batches that are named for a card, without a GPU being asked for anything but the costs of ops."""
    with torch.device("meta"):
        model = subject.model()
    with subject.precision("cuda"):
        answer = lowtide.largest_batch(
            model,
            lambda count: lowtide.Batch(_on_meta(subject, count), subject.loss),
            memory=Card(task.gib << 30),
            optimizer="adamw",
            device="cuda",
        )
    reached = {"plain": answer.plain, "planned": answer.planned}
    return {way: found and found.to_json() for way, found in reached.items()}


def _on_meta(subject: OnCard, count: int) -> Any:
    with torch.device("meta"):
        return subject.batch(count)


def trained(rows: Rows, subject: OnCard, task: Task) -> Json:
    """Twenty steps under the cap, and what was reserved of it."""
    batch = batch_of(rows, task)
    assert batch is not None, "a task that is due has a batch"
    where = device()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    expand_segments(stacklevel=1)
    torch.cuda.set_per_process_memory_fraction(fraction(task.gib, total_bytes))
    torch.backends.cudnn.benchmark = "cudnn.benchmark" in task.history
    if "another" in task.history:
        _another_model(where)
    torch.cuda.reset_peak_memory_stats()
    counted: list[int] = []
    error = None
    try:
        counted.extend(steps(subject, batch, task, where))
    except (torch.OutOfMemoryError, lowtide.InfeasibleBudget) as failed:
        error = type(failed).__name__
    return {
        "batch": batch,
        "steps": len(counted),
        "stopped_by": error,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "taken_part": (torch.cuda.max_memory_reserved() + CONTEXT_BYTES) / (task.gib << 30),
    }


def steps(subject: OnCard, batch: int, task: Task, where: str) -> Iterator[int]:
    """Train, and count the steps. Each has a batch of its own, as from a loader."""
    torch.manual_seed(0)
    with torch.device(where):
        model = subject.model()
    optimizer = torch.optim.AdamW(model.parameters())
    if task.way == "planned":
        with torch.device(where):
            example = subject.batch(batch)
        with subject.precision(where):
            lowtide.optimize(
                model,
                example,
                loss=subject.loss,
                optimizer=optimizer,
                budget=Card(task.gib << 30),
                device=where,
            )
        del example
    for step in range(STEPS):
        with torch.device(where):
            given = subject.batch(batch)
        optimizer.zero_grad(set_to_none=True)
        with subject.precision(where):
            output = model(**given) if isinstance(given, dict) else model(*given)  # type: ignore[misc]
            loss = output if subject.loss is None else subject.loss(output)
        loss.backward()
        optimizer.step()
        del output
        torch.cuda.synchronize()
        yield step + 1


def _another_model(where: str) -> None:
    """Leave the cache as another model's training leaves it."""
    with torch.device(where):
        model = torch.nn.Sequential(*(torch.nn.Conv2d(3 + 61 * (i > 0), 64, 3) for i in range(6)))
        for size in (64, 97, 33):
            model(torch.rand(16, 3, size, size)).sum().backward()
    del model
    gc.collect()


# The page ---------------------------------------------------------------------------------------------------


def verdict(row: Json) -> str:
    """Whether a row is as it should be."""
    ran = row.get("steps") == STEPS
    if "error" in row:
        return f"failed: {row['failure']}"
    if row["history"] == MORE:
        return "**fits**" if ran else f"does not fit ({row['stopped_by']})"
    if not ran:
        return f"**{row['stopped_by']} after {row['steps']} steps**"
    return "trains" if row["taken_part"] >= _FULL else f"trains, **{row['taken_part']:.1%} used**"


def render(document: Json) -> Iterator[str]:
    """The rows as a page."""
    rows = [row for row in document["rows"] if row["way"] != NAMED]
    yield "# Batches named for cards, trained on them"
    yield ""
    yield from heading(document)
    yield f"{STEPS} steps with AdamW each; used is what was reserved and the CUDA context, of the card."
    yield ""
    head = ["model", "card", "step", "history", "batch", "peak MiB", "reserved MiB", "used", ""]
    yield from table(head, [cells(row) for row in rows])
    kept = [row for row in rows if row["history"] != MORE and "error" not in row]
    full = [row for row in kept if row["steps"] == STEPS]
    used = [row for row in full if row["taken_part"] >= _FULL]
    more = [row for row in rows if row["history"] == MORE and "error" not in row]
    over = [row for row in more if row["steps"] < STEPS]
    yield f"- {len(full)} of {len(kept)} named batches train {STEPS} steps"
    yield f"- {len(used)} of these use {_FULL:.0%} of the card or more"
    yield f"- {len(over)} of {len(more)} batches that are 5 % larger do not fit"


def cells(row: Json) -> list[str]:
    """One row of the table."""
    about = [row["subject"], f"{row['gib']} GiB", row["way"], row["history"]]
    if "error" in row:
        return [*about, *[""] * 4, verdict(row)]
    held = [mib(row["peak_bytes"]), mib(row["reserved_bytes"])]
    figures = [str(row["batch"]), *held, f"{row['taken_part']:.1%}"]
    return [*about, *figures, verdict(row)]


if __name__ == "__main__":
    main()
