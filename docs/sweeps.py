"""What the page on model families repeats of the newest sweep over them."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parent.parent / "benchmarks" / "families" / "results"


def newest() -> Path:
    """The newest sweep."""
    return max(RESULTS.glob("families-*.md"), key=lambda path: path.stem)


def filled(heading: str) -> str:
    """What stands in it under that heading; under the first, also from which run it is."""
    before, *sections = newest().read_text(encoding="utf-8").split("\n## ")
    found = {
        title.lower().replace(" ", "-"): text
        for title, _, text in (each.partition("\n") for each in sections)
    }
    if heading != next(iter(found)):
        return found[heading].strip()
    where = before.strip().splitlines()[2].partition(": `")[0]
    path = newest().relative_to(RESULTS.parents[2])
    return f"{found[heading].strip()}\n\n{where}: `{path}`."
