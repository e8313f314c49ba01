"""Does lowtide work with the models that people have? A sweep over families that others wrote.

    python -m benchmarks.families.families sweep --rows FILE.json --commit HASH [--jobs 4] [--sample 150]
    python -m benchmarks.families.families sweep --rows FILE.json --only hf:llama,timm:resnet18
    python -m benchmarks.families.families table --rows FILE.json [MORE.json]           dated Markdown

Swept are the model types of transformers, and the models of timm and torchvision where these are installed: a
small member of each, random weights, a random batch, on CUDA where there is one. Nothing is downloaded. For
each: does a dry run predict the plain peak; does a plan keep 70 % of it, or the lowest peak; does training
under both do what plain training does; is the peak what was promised?

Each family has a process of its own, with a limit of time and memory. A row is written as soon as it is
there, with the commit that it was made at; one that is there for the same commit is not made again: the next
call goes on. With `--mend` only those of another commit that were not as they should be are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.families.processes import Limits, rows_of
from benchmarks.families.report import as_it_should_be, report, verdict
from benchmarks.families.subjects import families
from benchmarks.families.trial import LOWEST, PART, Wanted
from benchmarks.shared.machines import device, machine
from lowtide.text.documents import write_text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sweeping = commands.add_parser("sweep")
    sweeping.add_argument("--rows", type=Path, required=True, help="where they are written")
    sweeping.add_argument("--commit", default="unknown", help="of the code, to be written down")
    sweeping.add_argument("--jobs", type=int, default=1, help="families at a time")
    sweeping.add_argument("--sample", type=int, help="so many families, the same every time")
    sweeping.add_argument("--only", help="these: hf:llama,timm:resnet18")
    sweeping.add_argument("--seconds", type=float, default=1e9, help="after that no new family begins")
    sweeping.add_argument("--family-seconds", type=float, default=120, help="of the processor, for each")
    sweeping.add_argument("--family-gib", type=float, default=4, help="what one family may hold")
    sweeping.add_argument("--layers", type=int, default=2, help="of the small members")
    sweeping.add_argument("--budgets", default=f"{PART},{LOWEST}", help=f"{PART} alone is quicker")
    sweeping.add_argument("--deterministic", action="store_true", help="kernels, where there are such")
    sweeping.add_argument("--mend", action="store_true", help="rows of other commits only if they failed")
    tabling = commands.add_parser("table")
    tabling.add_argument("--rows", type=Path, nargs="+", required=True, help="of a family, the last is taken")
    tabling.add_argument("-o", "--output", type=Path, help="FILE.md beside the last of them, unless told")
    chosen = parser.parse_args()
    if chosen.command == "table":
        report(together(chosen.rows), chosen.output or chosen.rows[-1].with_suffix(".md"))
    else:
        sweep(chosen)


def sweep(chosen: argparse.Namespace) -> None:
    """Every family that was chosen and has no row yet."""
    document = _document(chosen)
    rows: dict[str, Any] = document["rows"]
    names = chosen.only.split(",") if chosen.only else families()[: chosen.sample]
    missing = [name for name in names if name not in rows or _again(rows[name], chosen)]
    wanted = Wanted(device(), chosen.layers, tuple(chosen.budgets.split(",")), chosen.deterministic)
    limits = Limits(chosen.family_seconds, chosen.family_gib)
    deadline = time.monotonic() + chosen.seconds
    for row in rows_of(missing, chosen.jobs, wanted, limits, lambda: time.monotonic() < deadline):
        rows[row["family"]] = row | {"commit": chosen.commit}
        write_text(chosen.rows, json.dumps(document, indent=1))
        print(f"{len(rows):4d} {row['family']:32s} {verdict(row)}", flush=True)


def together(files: Sequence[Path]) -> dict[str, Any]:
    """The rows of several sweeps as one document, which is said to come from the last of them."""
    documents = [json.loads(file.read_text()) for file in files]
    rows = {family: row for document in documents for family, row in document["rows"].items()}
    return {"machine": documents[-1]["machine"], "rows": rows}


def _again(row: dict[str, Any], chosen: argparse.Namespace) -> bool:
    """Whether a row that is there is to be made again."""
    return row["commit"] != chosen.commit and not (chosen.mend and as_it_should_be(row))


def _document(chosen: argparse.Namespace) -> dict[str, Any]:
    """The rows that are there, and where and how the last of them were made."""
    rows = json.loads(chosen.rows.read_text())["rows"] if chosen.rows.exists() else {}
    libraries = {name: _version(name) for name in ("transformers", "timm", "torchvision")}
    return {"machine": machine(chosen.commit) | libraries, "rows": rows}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
