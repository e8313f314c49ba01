"""Expressions from text: "exp(a*b+3)", or definitions in any order: "h = relu(x @ w); y = sum(h)".

The text is taken apart by Python's own parser, and nothing in it is run: only names, numbers, the operators
+ - * / ** @, calls of known functions and `.T` mean anything.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from lowtide.autodiff.expression import FUNCTIONS, Expression, var
from lowtide.errors import BadRequest, UnknownFunction
from lowtide.ir.graph import Role

Number: TypeAlias = int | float
Meaning: TypeAlias = "Expression | Number | tuple[Meaning, ...]"

_OPERATORS: Mapping[type[ast.operator], Callable[..., Expression | Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
}


def parse(
    text: str,
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    dtype: str = "float32",
    dtypes: Mapping[str, str] | None = None,
    parameters: Sequence[str] = (),
) -> tuple[Expression, ...]:
    """The expressions that `text` says: those of its definitions that no other one reads, in their order.

    Definitions stand on lines of their own or between semicolons, in any order; one without a name is
    allowed. Names that are not defined are variables: single numbers of `dtype`, unless `shapes` and
    `dtypes` say otherwise. `parameters` are those of them that are trained.

    Raises:
        UnknownFunction: a function is called that there is not; carries the nearest names.
        BadRequest: the text cannot be read, defines a name twice or in terms of itself, or `shapes` and the
            like name something that is no variable in it.
    """
    reader = _Parser(text, shapes or {}, dtype, dtypes or {}, parameters)
    try:
        found = reader.outputs()
    except RecursionError:
        raise BadRequest("the expression is nested too deeply. Give its parts names of their own.") from None
    reader.check_mentioned()
    return found


class _Parser:
    def __init__(
        self,
        text: str,
        shapes: Mapping[str, Sequence[int]],
        dtype: str,
        dtypes: Mapping[str, str],
        parameters: Sequence[str],
    ) -> None:
        self.text = text
        self.shapes = shapes
        self.dtype = dtype
        self.dtypes = dtypes
        self.parameters = parameters
        self.definitions, self.unnamed = _definitions(text)
        self.meanings: dict[str, Expression] = {}
        self.read: set[str] = set()  # definitions that another one reads
        self.under_way: list[str] = []

    def outputs(self) -> tuple[Expression, ...]:
        named = [self._definition(name) for name in self.definitions]
        unnamed = [self._expression(node) for node in self.unnamed]
        last = [each for name, each in zip(self.definitions, named, strict=True) if name not in self.read]
        return (*last, *unnamed)

    def check_mentioned(self) -> None:
        """Shapes and the like are for variables that are there."""
        variables = self.meanings.keys() - self.definitions.keys()
        for name in (*self.shapes, *self.dtypes, *self.parameters):
            if name not in variables:
                what = "is computed" if name in self.definitions else "does not occur"
                raise BadRequest(f"'{name}' is described as a variable, but {what} in '{self.text}'")

    def _definition(self, name: str) -> Expression:
        if name in self.under_way:
            chain = " -> ".join([*self.under_way[self.under_way.index(name) :], name])
            raise BadRequest(f"these definitions depend on each other: {chain}. Break the cycle.")
        if name not in self.meanings:
            self.under_way.append(name)
            self.meanings[name] = self._expression(self.definitions[name]).named(name)
            self.under_way.pop()
        return self.meanings[name]

    def _expression(self, node: ast.expr) -> Expression:
        found = self._meaning(node)
        if not isinstance(found, Expression):
            raise BadRequest(f"'{self._quoted(node)}' has no variable in it, so there is nothing to compute")
        return found

    def _meaning(self, node: ast.expr) -> Meaning:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            return node.value  # type: ignore[return-value]
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._operation(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            return self._sign(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._call(node, node.func.id)
        if isinstance(node, ast.Attribute) and node.attr == "T":
            return self._expression(node.value).T
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self._meaning(item) for item in node.elts)
        hint = (
            " Powers are written **."
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor)
            else ""
        )
        raise BadRequest(
            f"'{self._quoted(node)}' is not part of an expression. There are names, numbers, + - * / ** @, "
            f"calls of functions and .T{hint}"
        )

    def _name(self, name: str) -> Expression:
        if name in self.definitions:
            self.read.add(name)
            return self._definition(name)
        if name not in self.meanings:
            role = Role.PARAMETER if name in self.parameters else Role.BATCH
            dtype = self.dtypes.get(name, self.dtype)
            self.meanings[name] = var(name, self.shapes.get(name, ()), dtype=dtype, role=role)
        return self.meanings[name]

    def _operation(self, node: ast.BinOp) -> Expression | Number:
        left, right = self._meaning(node.left), self._meaning(node.right)
        if isinstance(left, tuple) or isinstance(right, tuple):
            raise BadRequest(f"'{self._quoted(node)}' computes with a list. Lists are for shapes only.")
        if isinstance(left, Expression) or isinstance(right, Expression):
            if isinstance(node.op, ast.MatMult) and not (
                isinstance(left, Expression) and isinstance(right, Expression)
            ):
                raise BadRequest(f"'{self._quoted(node)}': @ is for matrices, and a number is none")
            return _OPERATORS[type(node.op)](left, right)
        return self._number(node, float(left), float(right))

    def _number(self, node: ast.BinOp, left: float, right: float) -> Number:
        """Arithmetic on numbers alone, in floating point: whole numbers could grow without end."""
        try:
            found = _OPERATORS[type(node.op)](left, right)
        except (ArithmeticError, TypeError) as error:
            raise BadRequest(f"'{self._quoted(node)}' cannot be computed: {error}") from None
        if not isinstance(found, float) or not math.isfinite(found):
            raise BadRequest(f"'{self._quoted(node)}' is not a real number")
        return int(found) if found.is_integer() else found

    def _sign(self, node: ast.UnaryOp) -> Expression | Number:
        found = self._meaning(node.operand)
        if isinstance(found, tuple):
            raise BadRequest(f"'{self._quoted(node)}' computes with a list. Lists are for shapes only.")
        return -found if isinstance(node.op, ast.USub) else found

    def _call(self, node: ast.Call, name: str) -> Expression:
        if name not in FUNCTIONS:
            raise UnknownFunction(name, FUNCTIONS)
        args = [self._meaning(arg) for arg in node.args]
        options = {str(option.arg): self._meaning(option.value) for option in node.keywords}
        try:
            return FUNCTIONS[name](*args, **options)
        except TypeError as error:
            raise BadRequest(f"'{self._quoted(node)}': {error}") from None

    def _quoted(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.text, node) or ast.unparse(node)


def _where(error: SyntaxError | ValueError) -> str:
    """The place that Python stumbled over, and why, if it says so."""
    if not isinstance(error, SyntaxError) or error.text is None or error.offset is None:
        return ""
    before, after = error.text[: error.offset - 1].rstrip(), error.text[error.offset - 1 :].strip()
    place = f"at '{after}'" if after else f"after '{before}'"
    return f": {error.msg}, {place}"


def _definitions(text: str) -> tuple[dict[str, ast.expr], list[ast.expr]]:
    """The named expressions of a text, and those without names."""
    try:
        statements = ast.parse(text.strip()).body
    except (SyntaxError, ValueError) as error:
        raise BadRequest(f"'{text}' cannot be read as an expression{_where(error)}") from None
    except (RecursionError, MemoryError):
        raise BadRequest("the expression is nested too deeply. Give its parts names of their own.") from None
    named: dict[str, ast.expr] = {}
    unnamed: list[ast.expr] = []
    for statement in statements:
        if isinstance(statement, ast.Expr):
            unnamed.append(statement.value)
        elif isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
            if target.id in named or len(statement.targets) > 1:
                raise BadRequest(f"'{target.id}' is defined twice. Give every definition a name of its own.")
            named[target.id] = statement.value
        else:
            raise BadRequest(f"'{ast.unparse(statement)}' is neither an expression nor a definition")
    if not named and not unnamed:
        raise BadRequest("there is nothing to compute. Give at least one expression.")
    return named, unnamed
