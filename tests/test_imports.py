"""Imports go inwards only: core ← torch edge ← surface. The core does not know that torch exists."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import pytest

import lowtide

PACKAGE = Path(lowtide.__file__).parent


class Ring(StrEnum):
    CORE = "core"
    EDGE = "torch edge"
    SURFACE = "surface"


# Modules and packages directly under lowtide; what is inside a package belongs to the package's ring.
CORE = {
    "_version",
    "alive",
    "allocator",
    "autodiff",
    "bounds",
    "caching",
    "calling",
    "chain",
    "cutting",
    "derivatives",
    "documents",
    "errors",
    "excerpts",
    "explaining",
    "expressions",
    "files",
    "functions",
    "gathering",
    "graph",
    "growing",
    "guarding",
    "inplace",
    "keeping",
    "layout",
    "lesson",
    "classics",
    "lifetimes",
    "naming",
    "normalising",
    "notation",
    "packing",
    "parsing",
    "phrasing",
    "placing",
    "repeating",
    "plans",
    "rounding",
    "savedvalues",
    "scaling",
    "schedule",
    "searching",
    "segmenting",
    "sharing",
    "shortening",
    "simulation",
    "sizing",
    "solution",
    "solvers",
    "striding",
    "tabulating",
    "units",
    "unrolling",
    "validation",
}
SURFACE = {
    "__init__",  # the front door: re-exports, lazily
    "__main__",
    "cli",
    "integrations",
    "report",
    "zoo",
}
EDGE_PACKAGES: set[str] = set()
# What brings torch along with it.
TORCH = {"functorch", "timm", "torch", "torchgen", "torchvision", "transformers"}


def ring_of(part: str, is_package: bool) -> Ring:
    """The ring of a module or package directly under lowtide. Single modules are edge unless listed."""
    if part in CORE:
        return Ring.CORE
    if part in SURFACE:
        return Ring.SURFACE
    if is_package and part not in EDGE_PACKAGES:
        pytest.fail(
            f"lowtide.{part} is a new package: say which ring it belongs to, "
            f"in CORE, SURFACE or EDGE_PACKAGES of {Path(__file__).name}"
        )
    return Ring.EDGE


def part_of(file: Path) -> str:
    """'solvers' for solvers/chen.py, 'graph' for graph.py, '__init__' for the package itself."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


def ring_of_import(name: str) -> Ring | None:
    """The ring of an imported name; None for what is not lowtide's. The bare package is its front door."""
    top, *rest = name.split(".")
    if top != "lowtide":
        return None
    part = rest[0] if rest else "__init__"
    if (PACKAGE / part).is_dir():
        return ring_of(part, is_package=True)
    return ring_of(part if (PACKAGE / f"{part}.py").exists() else "__init__", is_package=False)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=[module_name(file) for file in FILES])
def test_a_module_imports_inwards_only(file: Path) -> None:
    mine = ring_of(part_of(file), is_package=file.parent != PACKAGE)
    forbidden = {
        Ring.CORE: {Ring.EDGE, Ring.SURFACE},
        Ring.EDGE: {Ring.SURFACE},
        Ring.SURFACE: set[Ring](),
    }[mine]
    found = imported(file.read_text(encoding="utf-8"), module_name(file), file.name == "__init__.py")
    wrong = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {mine} imports {name}"
        for line, name in found
        if (mine is Ring.CORE and is_torch(name)) or ring_of_import(name) in forbidden
    ]
    assert not wrong, "\n".join([*wrong, f"(a new core module is listed in CORE of {Path(__file__).name})"])


def test_every_module_belongs_to_exactly_one_ring() -> None:
    assert not CORE & SURFACE
    assert not EDGE_PACKAGES & (CORE | SURFACE)
    rings = {part_of(file): ring_of(part_of(file), is_package=file.parent != PACKAGE) for file in FILES}
    assert rings["graph"] is rings["simulation"] is rings["files"] is Ring.CORE
    assert rings["__init__"] is Ring.SURFACE


@pytest.mark.parametrize("name", ["lowtide", "lowtide.cli"])
def test_importing_it_does_not_import_torch(name: str) -> None:
    if name == "lowtide.cli" and not ((PACKAGE / "cli").is_dir() or (PACKAGE / "cli.py").exists()):
        pytest.skip("lowtide.cli is not written yet")
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
            from lowtide import profiling
        except ImportError:
            profiling = importlib.import_module("lowtide.zoo")
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
        "lowtide.profiling",
        "lowtide.zoo",
        "torch",
    ]


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    found = imported(
        "from . import a\nfrom .b import c\nfrom .. import d", "lowtide.solvers", is_package=True
    )
    assert [name for _, name in found] == ["lowtide.solvers.a", "lowtide.solvers.b.c", "lowtide.d"]


@pytest.mark.parametrize(
    ("name", "ring"),
    [
        ("lowtide", Ring.SURFACE),
        ("lowtide.plan", Ring.SURFACE),  # no such module: a name from the front door
        ("lowtide.graph", Ring.CORE),
        ("lowtide.graph.Graph", Ring.CORE),
        ("lowtide.zoo", Ring.SURFACE),
        ("lowtide.zoo.vgg", Ring.SURFACE),
        ("lowtideish.graph", None),
        ("numpy", None),
    ],
)
def test_an_imported_name_is_placed_in_its_ring(name: str, ring: Ring | None) -> None:
    assert ring_of_import(name) is ring


def test_a_package_that_was_never_placed_fails_with_advice() -> None:
    assert ring_of("tracing", is_package=False) is Ring.EDGE
    with pytest.raises(pytest.fail.Exception, match=r"lowtide\.gadgets is a new package: say which ring"):
        ring_of("gadgets", is_package=True)
