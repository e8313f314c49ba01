"""Which package may import which: one table. The inner ones do not know that torch exists."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowtide

PACKAGE = Path(lowtide.__file__).parent


# Package → the packages it may import. Everybody may import `errors` and `_version`; the root and the surface
# may import everything. CONTRIBUTING shows the same table.
MAY_IMPORT = {
    "text": "",
    "compat": "",
    "ir": "text",
    "autodiff": "ir",
    "arena": "ir",
    "tiles": "ir",
    "fusion": "ir tiles",
    "chain": "text ir",
    "solvers": "text ir tiles fusion chain",
    "lesson": "ir autodiff arena",
    "cost": "compat ir",
    "trace": "compat text ir cost",
    "rehearsal": "compat text ir cost trace",
    "aot": "compat ir fusion cost trace",
    "inductor": "compat text ir fusion solvers cost aot",
    "execute": "compat text ir arena chain solvers cost trace aot inductor",
    "planner": "compat text ir tiles fusion chain solvers cost trace aot inductor execute",
    "distributed": "compat text ir chain solvers cost trace aot execute planner",
    "backend": "compat text ir fusion solvers cost trace aot inductor execute planner distributed",
}
WITHOUT_TORCH = {"errors", "text", "ir", "autodiff", "arena", "tiles", "fusion", "chain", "solvers", "lesson"}
SURFACE = {"cli", "integrations", "report", "zoo"}
ROOT = {"__init__", "__main__", "_version", "errors", "expressions", "testing"}
# What brings torch along with it.
TORCH = {"functorch", "timm", "torch", "torchgen", "torchvision", "transformers"}


def part_of(name: str) -> str | None:
    """'solvers' for 'lowtide.solvers.chains.chen', '' for the front door; None for what is not lowtide's."""
    top, *rest = name.split(".")
    if top != "lowtide":
        return None
    part = rest[0] if rest else ""
    return part if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists() else ""


def module_name(file: Path) -> str:
    parts = ("lowtide", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a module imports: anywhere in it, under any condition.

    `from a import b` gives 'a.b', for b may be a module. `import_module("a")` counts if the name is
    written out.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - is_package
                package = module.split(".")[: len(module.split(".")) - up]
                base = ".".join([*package, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def is_torch(name: str) -> bool:
    return name.partition(".")[0] in TORCH


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=[module_name(file) for file in FILES])
def test_a_module_imports_what_its_package_may(file: Path) -> None:
    module = module_name(file)
    mine = part_of(module)
    assert mine is not None
    allowed = {mine, "errors", "_version", *MAY_IMPORT.get(mine, "").split()}
    for line, name in imported(file.read_text(encoding="utf-8"), module, file.name == "__init__.py"):
        where = f"{file.relative_to(PACKAGE.parent)}:{line}: {mine} imports {name}"
        assert mine not in WITHOUT_TORCH or not is_torch(name), where
        part = part_of(name)
        if mine in MAY_IMPORT and part is not None:
            assert part in allowed, where


def test_every_package_is_in_the_table_and_nothing_else_lies_beside_them() -> None:
    packages = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert packages == {*MAY_IMPORT, *SURFACE}
    assert {file.stem for file in PACKAGE.glob("*.py")} == ROOT


def test_the_table_has_no_circles() -> None:
    order = list(MAY_IMPORT)  # innermost first
    for package, inner in MAY_IMPORT.items():
        assert set(inner.split()) <= set(order[: order.index(package)]), package


@pytest.mark.parametrize("name", ["lowtide", "lowtide.cli"])
def test_importing_it_does_not_import_torch(name: str) -> None:
    code = f"import sys, {name}; print(sorted({TORCH!r} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


# The finder itself ----------------------------------------------------------------------------------

HIDDEN = """
import os, lowtide.cli as c
from torch import nn
from . import tracing
from .simulation import simulate
from .. import report
from ..report import table
def later():
    import torch.nn.functional as F
if TYPE_CHECKING:
    from torch import Tensor
class A:
    def b(self):
        try:
            from lowtide.cost import profile
        except ImportError:
            profile = importlib.import_module("lowtide.zoo")
x = __import__("torch")
y = import_module(name)
"""


def test_imports_are_found_wherever_they_hide() -> None:
    names = [name for _, name in sorted(imported(HIDDEN, "lowtide.solvers.chen", is_package=False))]
    assert names == [
        "lowtide.cli",
        "os",
        "torch.nn",
        "lowtide.solvers.tracing",
        "lowtide.solvers.simulation.simulate",
        "lowtide.report",
        "lowtide.report.table",
        "torch.nn.functional",
        "torch.Tensor",
        "lowtide.cost.profile",
        "lowtide.zoo",
        "torch",
    ]


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    found = imported(
        "from . import a\nfrom .b import c\nfrom .. import d", "lowtide.solvers", is_package=True
    )
    assert [name for _, name in found] == ["lowtide.solvers.a", "lowtide.solvers.b.c", "lowtide.d"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("lowtide", ""),
        ("lowtide.plan", ""),  # no such module: a name from the front door
        ("lowtide.ir", "ir"),
        ("lowtide.ir.graph.Graph", "ir"),
        ("lowtide.errors.BadRequest", "errors"),
        ("lowtide.zoo.vgg", "zoo"),
        ("lowtideish.ir", None),
        ("numpy", None),
    ],
)
def test_an_imported_name_is_placed_in_its_package(name: str, part: str | None) -> None:
    assert part_of(name) == part


def test_contributing_shows_the_table() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("| ")][1:]
    assert {name.strip(): rest[-1].strip().strip("–") for name, *rest in rows} == MAY_IMPORT
