"""Private names of other libraries are used, and their code is replaced, in `lowtide.compat` alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lowtide
from tests.compat.test_private import DECLARED

PACKAGE = Path(lowtide.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = [file for file in FILES if PACKAGE / "compat" not in file.parents]
INSIDE = [file for file in FILES if file not in OUTSIDE]

PYTHONS = {"_getframe", "_replace"}  # Python's own, and documented
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
FOREIGN_TEXT = re.compile(r"(torch|transformers|lightning|accelerate)(\.\w+)*\._[a-zA-Z][\w.]*")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


class Uses(ast.NodeVisitor):
    """Private names of others in a source: their full names, or '._name' where it is not known whose it is.

    A private name is lowtide's own where it belongs to `self`, `cls` or `super()`, or the file defines it.
    """

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.found: list[tuple[int, str]] = []
        self.replaced: list[tuple[int, str]] = []  # what is assigned to or deleted
        self._others: dict[str, str] = {}
        self._own = PYTHONS | set(_defined(tree))
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._bind(node, alias.asname or alias.name.partition(".")[0], alias.name, alias.asname is None)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and node.module is not None:
            for alias in node.names:
                self._bind(node, alias.asname or alias.name, f"{node.module}.{alias.name}", False)

    def _bind(self, node: ast.stmt, name: str, full: str, top: bool) -> None:
        if full.partition(".")[0] == "lowtide":
            return
        self._others[name] = full.partition(".")[0] if top else full
        if any(map(is_private, full.split("."))):
            self.found.append((node.lineno, full))
        if full.startswith("unittest.mock"):
            self.replaced.append((node.lineno, full))

    def visit_Assign(self, node: ast.Assign) -> None:
        full = self._full(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name) and full is not None:
                self._others[target.id] = full
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        full = self._full(node)
        if isinstance(node.ctx, ast.Store | ast.Del) and (full is not None or node.attr == "cell_contents"):
            self.replaced.append((node.lineno, full or f".{node.attr}"))
        if full is None:
            self._belongs(node, node.value, node.attr)
            self.visit(node.value)
        elif any(is_private(part) and part not in self._own for part in full.split(".")):
            self.found.append((node.lineno, full))

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called == "Private":
            return
        if called in BY_NAME and isinstance(node.args[1], ast.Constant):
            self._belongs(node, node.args[0], str(node.args[1].value))
        if called in ("setattr", "delattr") and (full := self._full(node.args[0])) is not None:
            self.replaced.append((node.lineno, full))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and FOREIGN_TEXT.fullmatch(node.value):
            self.found.append((node.lineno, node.value))

    def _belongs(self, node: ast.expr, owner: ast.expr, name: str) -> None:
        itself = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        itself = itself or (isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super")
        if is_private(name) and name not in self._own and not itself:
            self.found.append((node.lineno, f".{name}"))

    def _full(self, node: ast.expr) -> str | None:
        """'torch.nn.functional' for `F`, if that is what was imported; None for what is not another's."""
        if isinstance(node, ast.Name):
            return self._others.get(node.id)
        owner = self._full(node.value) if isinstance(node, ast.Attribute) else None
        return f"{owner}.{node.attr}" if owner is not None and isinstance(node, ast.Attribute) else None


def _defined(tree: ast.AST) -> Iterator[str]:
    """The attributes that a source gives to its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            fields = (field for field in node.body if isinstance(field, ast.AnnAssign))
            yield from (field.target.id for field in fields if isinstance(field.target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if getattr(node.value, "id", "") == "self" else []


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@pytest.mark.parametrize("file", OUTSIDE, ids=name_of)
def test_a_module_uses_no_private_name_of_another_library(file: Path) -> None:
    uses = Uses(file.read_text(encoding="utf-8"))
    told = "give it a name in lowtide.compat, with what it is for"
    assert uses.found == [], f"{name_of(file)} uses private names: {told}"


@pytest.mark.parametrize("file", OUTSIDE, ids=name_of)
def test_a_module_replaces_nothing_of_another_library(file: Path) -> None:
    uses = Uses(file.read_text(encoding="utf-8"))
    assert uses.replaced == [], f"{name_of(file)} replaces foreign code: use lowtide.compat.patches.patched"


@pytest.mark.parametrize("file", INSIDE, ids=name_of)
def test_compat_declares_what_it_uses_where_it_uses_it(file: Path) -> None:
    declared = [private.name for module, private in DECLARED if module == file.stem]
    for line, use in Uses(file.read_text(encoding="utf-8")).found:
        suits = [
            name for name in declared if f"{name}.".startswith(f"{use}.") or name.endswith(use) or name in use
        ]
        assert suits, f"{name_of(file)}:{line} uses {use} and does not say so in PRIVATE"


@pytest.mark.parametrize("file", INSIDE, ids=name_of)
def test_compat_uses_what_it_declares(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    without = re.sub(r"^PRIVATE = \(.*?^\)$", "", source, flags=re.DOTALL | re.MULTILINE)
    unused = [
        private.name
        for module, private in DECLARED
        if module == file.stem and private.name.rpartition(".")[2] not in without
    ]
    assert unused == []


# The finder itself ----------------------------------------------------------------------------------

HIDDEN = '''
import torch, logging
import torch._dynamo
import torch.nn.functional as F
from torch.utils._pytree import tree_map
from unittest.mock import patch
from lowtide.compat import _theirs
aten = torch.ops.aten
class A:
    _field: int
    def __init__(self, other, module):
        self._mine = other._mine + other._field + self._inherited + super()._above
        self._mine._cdata = 1
        module.weight.untyped_storage()._cdata
    def _method(self, other):
        """Says `python -m torch.cuda._memory_viz`."""
        other._method()
        sys._getframe(1)
        return getattr(other, "_schema", None), hasattr(self, "_own"), other._replace(a=1)
def later(x):
    torch._C._call(aten._private_op.default)
    logging.getLogger("torch._subclasses.fake_tensor")
    F.dropout = x
    torch.UntypedStorage.resize_ = x
    x.cell_contents = 1
    x.local = 2
    setattr(torch, "get_rng_state", x)
'''


def test_private_names_are_found_wherever_they_hide() -> None:
    assert [name for _, name in sorted(Uses(HIDDEN).found)] == [
        "torch._dynamo",
        "torch.utils._pytree.tree_map",
        "._cdata",
        "._cdata",
        "._schema",
        "torch._C._call",
        "torch.ops.aten._private_op.default",
        "torch._subclasses.fake_tensor",
    ]


def test_replacements_are_found_wherever_they_hide() -> None:
    assert [name for _, name in sorted(Uses(HIDDEN).replaced)] == [
        "unittest.mock.patch",
        "torch.nn.functional.dropout",
        "torch.UntypedStorage.resize_",
        ".cell_contents",
        "torch",
    ]
