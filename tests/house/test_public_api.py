"""The front door: what `import lowtide` offers, and what it does not bring along."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

SOURCE = Path(lowtide.__file__).parent


def test_every_public_name_can_be_had_and_is_what_its_module_defines() -> None:
    for name, module in lowtide._MODULE_OF_NAME.items():
        found = getattr(lowtide, name)
        assert found is getattr(sys.modules[f"lowtide.{module}"], name)
        assert found.__module__ == f"lowtide.{module}", f"{name} is defined elsewhere"


def test_all_lists_the_lazy_names_and_the_version_and_nothing_else() -> None:
    assert lowtide.__all__ == sorted({*lowtide._MODULE_OF_NAME, "__version__"})


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module or "").removeprefix("lowtide."): tuple(sorted(alias.name for alias in node.names))
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert seen == lowtide._NAMES_OF_MODULE


def test_no_public_name_is_hidden_by_a_module_of_the_same_name() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")} | {
        path.parent.name for path in SOURCE.glob("*/*.py")
    }
    assert not modules & set(lowtide.__all__)


@pytest.mark.parametrize("name", [name for name in lowtide.__all__ if name != "__version__"])
def test_every_public_function_and_class_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(lowtide, name))


def test_dir_shows_names_that_have_not_been_used_yet() -> None:
    assert set(lowtide.__all__) <= set(dir(lowtide))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lowtide' has no attribute 'optimise'"):
        lowtide.optimise  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("lowtide.__version__", "False"),
        ("lowtide.parse_bytes('1KiB')", "False"),
        ("lowtide.simulate, lowtide.Graph, lowtide.load_graph, lowtide.MissingExtra", "False"),
        ("lowtide.solve, lowtide.methods(), lowtide.Chain, lowtide.Plan, lowtide.load_solution", "False"),
        ("lowtide.schedulers(), lowtide.frontier, lowtide.GraphSolution", "False"),
        ("lowtide.dry_run", "True"),
        ("lowtide.compare", "True"),
    ],
)
def test_torch_is_imported_by_the_names_that_need_it_only(use: str, expected: str) -> None:
    code = f"import sys, lowtide; {use}; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == expected
