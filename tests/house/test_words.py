"""One word, one meaning: no two classes share a name, a leading underscore or not."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import lowtide

PACKAGE = Path(lowtide.__file__).parent
# The same idea in two places, each of which has to call it so.
SAME = {
    "BasicBlock": "the block of a residual network, as its paper calls it: two networks have one",
    "Bottleneck": "the same",
    "LowtideCallback": "the callback, of one trainer and of the other",
    "UnknownModel": "the zoo's own, which users outside of lowtide catch as a ValueError",
}
# A vocabulary of its own, which nothing else uses: the compiler's.
APART = ("solvers/jit",)


def classes() -> dict[str, list[str]]:
    """Where the classes of a name are, by the name without its underscore."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(path)
    return found


def test_no_two_classes_share_a_name() -> None:
    outside = {
        name: [path for path in paths if not path.startswith(APART)] for name, paths in classes().items()
    }
    shared = {name: paths for name, paths in outside.items() if len(paths) > 1 and name not in SAME}
    assert not shared


def test_what_may_share_a_name_does() -> None:
    found = classes()
    assert [name for name in SAME if len(found[name]) < 2] == []


def test_the_glossary_speaks_of_classes_that_exist() -> None:
    text = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = text.partition("one meaning each:\n\n")[2].partition("\n\n")[0].splitlines()
    named = [line.split("`")[1] for line in lines]
    assert len(named) >= 12
    assert [name for name in named if name not in classes()] == []
