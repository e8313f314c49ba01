"""Fills in what pages repeat of the code, so that none of them can be out of date.

    <!-- fill: facts rotor -->    between a line like this
    <!-- filled -->               and one like this stands what the code says of the method rotor

`python docs/fill.py` rewrites the pages; tests/test_docs.py fails if that would change one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click
import peers
import stands
import sweeps
from click.testing import CliRunner
from example import BUDGET, WITHIN_A_BUDGET, shown

import lowtide
from lowtide.cli import main as command_line

PAGES = Path(__file__).parent
README = PAGES.parent / "README.md"

_BETWEEN = re.compile(r"(<!-- fill: (\w+) ?([\w-]*) -->\n).*?(<!-- filled -->)", re.DOTALL)
_WIDTH = "80"  # of --help, as in most terminals

# What each topic of the Python page is about, and the modules whose names belong to it.
_TOPICS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Will it fit?": (
        "What a step will hold, predicted without running it, and what it really held.",
        (
            "planner.fit",
            "planner.batch",
            "planner.batch_search",
            "planner.batch_steps",
            "planner.worst",
            "planner.shape_classes",
            "planner.lengths",
            "trace.dry_run",
            "cost.measure",
            "rehearsal.on_card",
            "rehearsal.outcome",
            "trace.saved_report",
            "trace.saved",
        ),
    ),
    "Make it fit": (
        "Plan what to recompute, put the plan to work, take it off again, keep it in a file.",
        (
            "planner.api",
            "planner.layers",
            "execute.apply",
            "execute.ops_forward",
            "execute.padding",
            "planner.compare",
            "planner.peers",
            "inductor.partitioner",
            "solvers.solution",
            "chain.cuts",
        ),
    ),
    "Methods": (
        "Solve chains and graphs directly.",
        ("solvers.registry", "solvers.frontier", "chain.chain", "chain.plan"),
    ),
    "Graphs and the referee": (
        "What a step is, the order in which it runs, and what that holds.",
        ("aot.capture", "trace.profile", "ir.graph", "ir.validate", "ir.schedule", "ir.simulate"),
    ),
    "Gradients, layouts and running them": (
        "Extend a graph by its backward, place its values in one arena, run it there.",
        (
            "autodiff.reverse",
            "arena.batch_norm",
            "arena.tags",
            "arena.layout",
            "execute.executor",
            "execute.memory",
            "execute.arena_step",
        ),
    ),
    "Files and sizes": (
        "Save and load, read and write bytes.",
        ("solvers.files", "text.units", "text.sizes", "text.card"),
    ),
    "Errors": (
        "All are `LowtideError`; [Troubleshooting](troubleshooting.md) says what to do about each.",
        ("errors",),
    ),
}


def filled(text: str) -> str:
    """A page with everything in it that the code says now."""

    def fill(found: re.Match[str]) -> str:
        begin, kind, about, end = found.groups()
        return f"{begin}\n{_FILLERS[kind](about).strip()}\n\n{end}"

    return _BETWEEN.sub(fill, text)


def main() -> None:
    """Rewrite every page."""
    for page in (README, *sorted(PAGES.rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if (now := filled(text)) != text:
            page.write_text(now, encoding="utf-8")
            print(f"{page.relative_to(PAGES.parent)} is now up to date")


# The command line -------------------------------------------------------------------------------------


def _commands(_: str) -> str:
    """Every command with its help, the whole first."""
    names = command_line.list_commands(click.Context(command_line))
    return "\n".join([_help(), *(f"## lowtide {name}\n\n{_help(name)}" for name in names)])


def _help(*command: str) -> str:
    runner = CliRunner(env={"COLUMNS": _WIDTH})
    result = runner.invoke(command_line, [*command, "--help"], prog_name="lowtide", catch_exceptions=False)
    lines = (line.rstrip() for line in result.output.splitlines())
    return "```text\n" + "\n".join(lines) + "\n```\n"


# The public names -------------------------------------------------------------------------------------


def _names(_: str) -> str:
    """Every public name with the first line of its documentation, by topic."""
    placed = {module for _, modules in _TOPICS.values() for module in modules}
    if missing := lowtide._NAMES_OF_MODULE.keys() - placed:
        raise SystemExit(f"docs/fill.py: put {', '.join(sorted(missing))} under one of its topics")
    return "\n".join(
        "\n".join([f"## {topic}\n\n{about}\n", *(_entry(name) for module in modules for name in _of(module))])
        for topic, (about, modules) in _TOPICS.items()
    )


def _of(module: str) -> tuple[str, ...]:
    return lowtide._NAMES_OF_MODULE[module]


def _entry(name: str) -> str:
    thing = getattr(lowtide, name)
    first = (inspect.getdoc(thing) or "").splitlines()[0]
    return f"`lowtide.{name}{_arguments(thing)}`\n:   {first}\n"


def _arguments(thing: object) -> str:
    """What a function is called with: names, and an ellipsis for what has a default."""
    if not inspect.isfunction(thing):
        return ""
    return f"({', '.join(_argument_list(inspect.signature(thing)))})"


def _argument_list(signature: inspect.Signature) -> Iterator[str]:
    starred = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield parameter.name if parameter.default is parameter.empty else f"{parameter.name}=…"


# The methods ------------------------------------------------------------------------------------------


def _facts(name: str) -> str:
    """What `lowtide solvers` says of a method, and its picture."""
    about = {**lowtide.methods(), **lowtide.schedulers()}[name]
    rows = [
        ("minimises", about.minimises),
        ("takes", "a captured graph, op by op" if name in lowtide.schedulers() else "a chain of layers"),
        ("a budget", "yes" if about.takes_budget else "no"),
        ("time", about.complexity),
        ("proven best", about.proves or "never"),
        ("from", about.reference),
    ]
    return "\n".join(
        ["| | |", "|---|---|", *(f"| **{what}** | {said} |" for what, said in rows), "", _picture(name)]
    )


def _picture(name: str) -> str:
    within = f", within {BUDGET} of the plain peak" if name in WITHIN_A_BUDGET else ""
    return f"![{name} on twelve layers{within}](../pictures/{name}.svg)"


def _methods(_: str) -> str:
    """What every method minimises, and when it proves that."""
    rows = ["| method | minimises | proven best | from |", "|---|---|---|---|"]
    for name, about in {**lowtide.schedulers(), **lowtide.methods()}.items():
        rows.append(
            f"| [{name}]({name}.md) | {about.minimises} | {about.proves or '–'} | {about.reference} |"
        )
    return "\n".join(rows)


def _table(_: str) -> str:
    """Every method on the twelve layers."""
    rows = ["| method | peak | added | runs again |", "|---|--:|--:|---|"]
    for name in (*lowtide.methods(), *lowtide.schedulers()):
        found = shown(name)
        star = " \\*" if name in WITHIN_A_BUDGET else ""
        peak, added = lowtide.format_bytes(found.solution.peak_bytes), f"{found.solution.extra_seconds:g} s"
        words = f"`{found.words}`" if isinstance(found.solution, lowtide.Solution) else found.words
        rows.append(f"| [{name}]({name}.md){star} | {peak} | {added} | {words} |")
    return "\n".join(rows)


_FILLERS: Mapping[str, Callable[[str], str]] = {
    "commands": _commands,
    "names": _names,
    "facts": _facts,
    "families": sweeps.filled,
    "methods": _methods,
    "peers": peers.filled,
    "standing": stands.filled,
    "table": _table,
}


if __name__ == "__main__":
    main()
