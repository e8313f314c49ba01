"""Tables, goals and pictures of the frontier benchmark, from its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.report import heading, mib, percent, table
from lowtide.text.documents import write_text

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
MOST_ERROR = 0.01  # of what is not resident
MOST_OVERHEAD = 0.05

# torch.compile at activation_memory_budget 1.0, 0.5, 0.2, 0.0, measured before in the same way on the same
# kind of machine (one H200, torch 2.11.0, 2026-11), one process a row: MiB and ms. Used where there are no
# such rows.
COMPILED_BEFORE = {
    "vgg19, batch 128×224²": {1.0: (9164, 72), 0.5: (6118, 78), 0.2: (7937, 83), 0.0: (9115, 92)},
    "resnet50, batch 192×224²": {1.0: (15905, 54), 0.5: (8866, 61), 0.2: (8764, 65), 0.0: (15885, 69)},
    "gpt2-medium, 8×1024": {1.0: (17353, 474)},
}


@dataclass(frozen=True)
class Goal:
    """Something that has to hold: what was found, and whether that is good enough."""

    name: str
    found: str
    met: bool | None  # None: there are no rows to tell

    @property
    def verdict(self) -> str:
        return {True: "met", False: "**missed**", None: "not measured"}[self.met]


@dataclass(frozen=True)
class Subject:
    """The rows of one network."""

    name: str
    rows: Sequence[Json]

    def kind(self, *kinds: str) -> list[Json]:
        """Those of these kinds that were measured."""
        return [row for row in self.rows if row["kind"] in kinds and "peak_bytes" in row]

    @property
    def prepared(self) -> Json | None:
        """What was known of the step before it was planned."""
        return next((row for row in self.rows if row["kind"] == "prepared" and "ops" in row), None)

    def labelled(self, label: str) -> Json | None:
        return next((row for row in self.rows if row["label"] == label and "peak_bytes" in row), None)

    @property
    def eager_ms(self) -> float | None:
        """The mean of the first and the last time that it was measured."""
        found = [row["ms"] for row in self.kind("eager")]
        return sum(found) / len(found) if found else None

    @property
    def compiled(self) -> list[tuple[str, int, float]]:
        """Inductor's rows: label, bytes and milliseconds."""
        rows = self.kind("compiled")
        if rows:
            return [(row["label"], row["peak_bytes"], row["ms"]) for row in rows]
        before = COMPILED_BEFORE.get(self.name, {})
        return [(f"torch.compile {key} †", size << 20, ms) for key, (size, ms) in before.items()]

    def ratio(self, ms: float) -> float | None:
        return ms / self.eager_ms - 1 if self.eager_ms else None


def report(document: Json, output: Path | None) -> None:
    """Write Markdown, JSON and pictures."""
    output = output or RESULTS / f"frontier-{document['machine']['date']}.md"
    commit = document["machine"]["commit"]
    rows = [row for row in document["rows"] if row["commit"] == commit]
    names = list(dict.fromkeys(row["subject"] for row in rows))
    subjects = [Subject(name, [row for row in rows if row["subject"] == name]) for name in names]
    lines = [
        "# Memory against time: op-level plans and what a user picks today",
        "",
        *heading(document),
        "One training step: forward, loss, backward, gradients from None, no optimizer. `peak` is the most "
        "that PyTorch's allocator held, weights and batch included; `ms` the median of 7 steps after 3. "
        "Errors are in per cent of the part of the peak that is not resident. Extra time is against eager's.",
        "",
        *summary(subjects),
    ]
    for subject in subjects:
        lines += [*details(subject, output)]
        draw(subject, picture(output, subject))
    write_text(output, "\n".join(lines).rstrip() + "\n")
    write_text(output.with_suffix(".json"), json.dumps({**document, "rows": rows}, indent=1))
    print(output)


# Goals ----------------------------------------------------------------------------------------------------


def goals(subject: Subject) -> list[Goal]:
    return [
        predicted(subject),
        budget_kept(subject),
        *[as_fast(subject, peer) for peer in subject.kind("peer")],
        lowest(subject),
        overhead(subject),
    ]


def error_of(row: Json) -> float:
    error: float = (row["predicted_bytes"] - row["peak_bytes"]) / (row["peak_bytes"] - row["resident_bytes"])
    return error


def predicted(subject: Subject) -> Goal:
    name = "predicted within 1 %"
    errors = [error_of(row) for row in subject.kind("planned")]
    if not errors:
        return Goal(name, "–", None)
    worst = max(errors, key=abs)
    return Goal(name, f"worst {100 * worst:+.2f} % of {len(errors)} plans", abs(worst) <= MOST_ERROR)


def budget_kept(subject: Subject) -> Goal:
    name = "budget kept"
    asked = [row for row in subject.kind("planned") if row["budget_bytes"] is not None]
    if not asked:
        return Goal(name, "–", None)
    most = max(asked, key=lambda row: row["peak_bytes"] - row["budget_bytes"])
    excess = most["peak_bytes"] - most["budget_bytes"]
    where = f"{mib(abs(excess))} MiB {'over' if excess > 0 else 'below'}, {most['label']}"
    return Goal(name, f"{where}; {len(asked)} budgets", excess <= 0)


def as_fast(subject: Subject, peer: Json) -> Goal:
    """Within the peer's own peak, in at most its time."""
    name = f"as fast as {peer['label']} at its peak"
    label = f"planned at {peer['label']}"
    ours = subject.labelled(label)
    if ours is None:
        failed = [row for row in subject.rows if row["label"] == label]
        return Goal(name, first_sentence(failed[0]["error"]) if failed else "–", False if failed else None)
    found = (
        f"{ours['ms']:.1f} ms in {mib(ours['peak_bytes'])} MiB, {peer['ms']:.1f} in {mib(peer['peak_bytes'])}"
    )
    return Goal(name, f"{found}: {percent(ours['ms'] / peer['ms'] - 1)}", ours["ms"] <= peer["ms"])


def lowest(subject: Subject) -> Goal:
    """The lowest peak against the lowest that any peer reached."""
    name = "lowest peak below every peer's"
    peers = [(row["label"], row["peak_bytes"]) for row in subject.kind("peer", "eager")]
    peers += [(label, peak) for label, peak, _ in subject.compiled]
    ours = [row["peak_bytes"] for row in subject.kind("planned")]
    if not peers or not ours:
        return Goal(name, "–", None)
    label, best = min(peers, key=lambda peer: peer[1])
    found = f"{mib(min(ours))} MiB, {label} {mib(best)}: {percent(min(ours) / best - 1)}"
    return Goal(name, found, min(ours) < best)


def overhead(subject: Subject) -> Goal:
    name = "nothing recomputed: at most 5 % slower than eager"
    row = subject.labelled("planned, everything kept")
    ratio = None if row is None else subject.ratio(row["ms"])
    if row is None or ratio is None:
        return Goal(name, "–", None)
    found = f"{percent(ratio)}, {row['ms']:.1f} ms against {subject.eager_ms:.1f}"
    return Goal(name, found, ratio <= MOST_OVERHEAD)


# Tables ---------------------------------------------------------------------------------------------------


def summary(subjects: Sequence[Subject]) -> Iterator[str]:
    found = [(subject, goal) for subject in subjects for goal in goals(subject)]
    told = [goal for _, goal in found if goal.met is not None]
    yield f"## Goals: {sum(bool(goal.met) for goal in told)} of {len(told)} met"
    yield ""
    rows = [[subject.name, goal.name, goal.verdict, goal.found] for subject, goal in found]
    yield from table(["network", "goal", "", "found"], rows)


def details(subject: Subject, output: Path) -> Iterator[str]:
    yield f"## {subject.name}"
    yield ""
    prepared = subject.prepared
    if prepared:
        resident, least = prepared["predicted_resident_bytes"], prepared["lower_bound_bytes"]
        yield (
            f"Captured as {prepared['ops']:,} ops. Traced in {prepared['traced_seconds']:.1f} s, captured "
            f"and profiled in {prepared['captured_seconds']:.1f} s. Resident {mib(resident)} MiB; no "
            f"schedule of these ops peaks below {mib(least)} MiB."
        )
        yield ""
    head = ["", "budget", "predicted", "peak", "error", "kept", "reserved", "ms", "extra", "predicted extra"]
    yield from table([*head, "ops again", "planning s"], [*measured_rows(subject)])
    failed = [row for row in subject.rows if "error" in row]
    yield from (f"- {row['label']}: {first_sentence(row['error'])}" for row in failed)
    if failed:
        yield ""
    if subject.compiled and not subject.kind("compiled"):
        yield "† measured before, see `frontier_report.py`."
        yield ""
    yield f"![{subject.name}: peak against time]({picture(output, subject).name})"
    yield ""


def first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0]


def measured_rows(subject: Subject) -> Iterator[list[str]]:
    measured = subject.kind("eager", "peer", "planned", "compiled")
    for row in sorted(measured, key=lambda row: (KINDS.index(row["kind"]), -row["peak_bytes"])):
        yield cells(subject, row)
    if not subject.kind("compiled"):
        for label, peak, ms in subject.compiled:
            extra = percent(subject.ratio(ms))
            yield [label, "–", "–", mib(peak), "–", "–", "–", f"{ms:.1f}", extra, "–", "–", "–"]


def cells(subject: Subject, row: Json) -> list[str]:
    planned = row["kind"] == "planned"
    if row["kind"] == "eager" and subject.prepared:
        row = {**row, "predicted_bytes": subject.prepared["predicted_bytes"]}
    kept = row.get("kept_within_budget")
    return [
        row["label"],
        mib(row.get("budget_bytes")),
        mib(row.get("predicted_bytes")),
        mib(row["peak_bytes"]),
        f"{100 * error_of(row):+.2f} %" if "predicted_bytes" in row else "–",
        "–" if kept is None else "yes" if kept else "**no**",
        mib(row.get("reserved_bytes")),
        f"{row['ms']:.1f}",
        percent(subject.ratio(row["ms"])),
        percent(row.get("extra_seconds_ratio")),
        str(row["recomputed_ops"]) if planned else "–",
        f"{row['planning_seconds']:.1f}" if planned else "–",
    ]


# Pictures -------------------------------------------------------------------------------------------------

KINDS = ("eager", "peer", "planned", "compiled")
MARKS = {"eager": "s", "peer": "^", "compiled": "v"}
COLOURS = {"eager": "#555555", "peer": "#d1603d", "planned": "#1f6fb2", "compiled": "#8a6fb0"}
NAMES = {"eager": "eager", "peer": "eager, checkpointed", "planned": "lowtide", "compiled": "torch.compile"}


def picture(output: Path, subject: Subject) -> Path:
    return output.with_name(f"{output.stem}-{subject.name.partition(',')[0]}.png")


def draw(subject: Subject, path: Path) -> None:
    """Peak against time: plans as a line, everything else as marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = {
        kind: [(row["label"], row["peak_bytes"], row["ms"]) for row in subject.kind(kind)] for kind in KINDS
    }
    points["compiled"] = subject.compiled
    figure, axes = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
    for kind in (kind for kind in KINDS if points[kind]):
        found = sorted(points[kind], key=lambda point: point[1])
        line = "o-" if kind == "planned" else MARKS[kind]
        sizes, times = [point[1] / 2**20 for point in found], [point[2] for point in found]
        axes.plot(sizes, times, line, color=COLOURS[kind], label=NAMES[kind], markersize=6, linewidth=1.4)
        for label, size, ms in found:
            if label.startswith("planned at") or label == "eager again":
                continue  # beside the peer, and beside eager
            short = label.removeprefix("planned, ").removeprefix("torch.compile ")
            place: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "color": COLOURS[kind]}
            axes.annotate(short, (size / 2**20, ms), (5, -10 if kind == "planned" else 5), **place)
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_xlabel("peak of a training step, MiB")
    axes.set_ylabel("ms")
    axes.set_title(subject.name, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
