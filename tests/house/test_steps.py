"""Who may ask what kind of step it has before it: one place for each concern. All others walk."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lowtide

PACKAGE = Path(lowtide.__file__).parent
KINDS = {"Compute", "Free"}
MAY_ASK = {
    "aot/codegen.py",  # what a step does, as code
    "execute/executor.py",  # what a step does, called
    "ir/notation.py",  # how a step is written
}


def asked(source: str) -> Iterator[str]:
    """The kinds of steps that are asked for: by isinstance, by a pattern, by comparing types."""
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST] = []
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            parts = list(node.args[1:])
        elif isinstance(node, ast.MatchClass):
            parts = [node.cls]
        elif isinstance(node, ast.Compare) and any(
            isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) for op in node.ops
        ):
            parts = [
                each for each in (node.left, *node.comparators) if isinstance(each, ast.Name | ast.Attribute)
            ]
        for part in parts:
            for each in ast.walk(part):
                name = (
                    each.id
                    if isinstance(each, ast.Name)
                    else each.attr
                    if isinstance(each, ast.Attribute)
                    else ""
                )
                if name in KINDS:
                    yield name


def test_the_rule_sees_every_way_of_asking() -> None:
    assert list(asked("isinstance(step, Compute)")) == ["Compute"]
    assert list(asked("isinstance(step, (schedule.Free, int))")) == ["Free"]
    assert list(asked("isinstance(step, Compute | Free)")) == ["Compute", "Free"]
    assert list(asked("match step:\n  case Free(value):\n    pass")) == ["Free"]
    assert list(asked("type(step) is Compute")) == ["Compute"]
    assert list(asked("steps.append(Compute(3)); step == Compute(3); isinstance(step, Step)")) == []


def test_only_these_ask_what_kind_a_step_is() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    asking = {
        str(file.relative_to(PACKAGE)) for file in files if any(asked(file.read_text(encoding="utf-8")))
    }
    assert asking == MAY_ASK
