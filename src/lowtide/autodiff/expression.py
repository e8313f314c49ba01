"""Small graphs from expressions: `a = var("a"); y = exp(a * b + 3)`, then `graph_of(y)`.

An expression only says what is to be computed from what; `graph_of` makes ops, values and shapes of it.
`parse`, in `lowtide.autodiff.parse`, reads the same from text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from lowtide.autodiff import functions as kernels
from lowtide.errors import BadRequest
from lowtide.ir.builder import Growing, empty
from lowtide.ir.graph import Graph, Ref, Role
from lowtide.ir.validate import item_bytes

Operand: TypeAlias = "Expression | int | float"
Build: TypeAlias = Callable[..., Ref]  # a graph that grows and operands: the tensor that is made of them


@dataclass(frozen=True, eq=False)
class Expression:
    """Something to be computed, of operands that are expressions or numbers."""

    function: str
    operands: tuple[Operand, ...]
    build: Build
    name: str = ""

    def named(self, name: str) -> Expression:
        """The same as a new expression, under a name that the graph will know its value by.

        What has a name already keeps it, and gets this one as a result only.
        """
        if self.name:
            return Expression("alias", (self,), kernels.itself, name)
        return replace(self, name=name)

    def __add__(self, other: Operand) -> Expression:
        return _made("add", kernels.plus, self, other)

    def __radd__(self, other: Operand) -> Expression:
        return _made("add", kernels.plus, other, self)

    def __sub__(self, other: Operand) -> Expression:
        return _made("sub", kernels.minus, self, other)

    def __rsub__(self, other: Operand) -> Expression:
        return _made("sub", kernels.minus, other, self)

    def __mul__(self, other: Operand) -> Expression:
        return _made("mul", kernels.times, self, other)

    def __rmul__(self, other: Operand) -> Expression:
        return _made("mul", kernels.times, other, self)

    def __truediv__(self, other: Operand) -> Expression:
        return _made("div", kernels.over, self, other)

    def __rtruediv__(self, other: Operand) -> Expression:
        return _made("div", kernels.over, other, self)

    def __pow__(self, other: Operand) -> Expression:
        return _made("pow", kernels.raised, self, other)

    def __rpow__(self, other: Operand) -> Expression:
        return _made("pow", kernels.raised, other, self)

    def __matmul__(self, other: Expression) -> Expression:
        return matmul(self, other)

    def __neg__(self) -> Expression:
        return _made("neg", partial(kernels.pointwise, "neg"), self)

    @property
    def T(self) -> Expression:  # noqa: N802, it is what everybody calls it
        """The last two dimensions exchanged."""
        return transpose(self)


@dataclass(frozen=True, eq=False)
class Variable(Expression):
    """Something that is given."""

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    role: Role = Role.BATCH


def var(name: str, shape: Sequence[int] = (), *, dtype: str = "float32", role: Role = Role.BATCH) -> Variable:
    """A variable: a single number unless it has a shape.

    Raises:
        BadRequest: it has no name, or a size is not a whole number above zero.
        MalformedGraph: there is no such dtype.
    """
    if not name:
        raise BadRequest("a variable needs a name. Give it one.")
    for size in shape:
        if not isinstance(size, int) or size < 1:
            raise BadRequest(f"variable '{name}': sizes are whole numbers above zero, not {size!r}")
    item_bytes(dtype)
    resident = partial(_resident, name, tuple(shape), dtype, role)
    return Variable("var", (), resident, name, tuple(shape), dtype, role)


def _resident(name: str, shape: tuple[int, ...], dtype: str, role: Role, growing: Growing) -> Ref:
    return growing.resident(name, shape, dtype, role)


def _made(function: str, build: Build, *operands: Operand) -> Expression:
    for operand in operands:
        if not isinstance(operand, Expression | int | float):
            kind = type(operand).__name__
            raise BadRequest(f"{function} takes expressions and numbers, not {kind}. Make it a var.")
    return Expression(function, operands, build)


def _function(name: str, build: Build, *operands: Expression) -> Expression:
    for operand in operands:
        if not isinstance(operand, Expression):
            raise BadRequest(f"{name} takes expressions, not {operand!r}. Make it a var.")
    return Expression(name, operands, build)


# Functions --------------------------------------------------------------------------------------------


def _pointwise(name: str, kernel: str, description: str) -> Callable[[Expression], Expression]:
    def function(x: Expression) -> Expression:
        return _function(name, partial(kernels.pointwise, kernel), x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = description
    return function


exp = _pointwise("exp", "exp", "The exponential.")
ln = _pointwise("ln", "log", "The natural logarithm.")
log = _pointwise("log", "log", "The natural logarithm.")
sin = _pointwise("sin", "sin", "The sine.")
cos = _pointwise("cos", "cos", "The cosine.")
tanh = _pointwise("tanh", "tanh", "The hyperbolic tangent.")
sigmoid = _pointwise("sigmoid", "sigmoid", "1 / (1 + exp(-x)).")
relu = _pointwise("relu", "relu", "What is above zero, and zero elsewhere.")
gelu = _pointwise("gelu", "gelu", "x times the probability that a normal number is below x.")
silu = _pointwise("silu", "silu", "x times its sigmoid.")
sqrt = _pointwise("sqrt", "sqrt", "The square root.")
abs = _pointwise("abs", "abs", "The absolute value.")


def sum(x: Expression, dim: int | Sequence[int] = (), keepdim: bool = False) -> Expression:
    """The sum over some dimensions, or over everything."""
    return _function("sum", partial(kernels.reduction, "sum", _dims(dim), keepdim), x)


def mean(x: Expression, dim: int | Sequence[int] = (), keepdim: bool = False) -> Expression:
    """The mean over some dimensions, or over everything."""
    return _function("mean", partial(kernels.reduction, "mean", _dims(dim), keepdim), x)


def _dims(dim: int | Sequence[int]) -> tuple[int, ...]:
    return (dim,) if isinstance(dim, int) else tuple(dim)


def matmul(a: Expression, b: Expression) -> Expression:
    """The product of matrices, or of batches of them."""
    return _function("matmul", kernels.product, a, b)


def linear(x: Expression, weight: Expression, bias: Expression) -> Expression:
    """x @ weight.T + bias in one kernel, with a weight of shape (out, in)."""
    return _function("linear", kernels.linear, x, weight, bias)


def softmax(x: Expression, dim: int = -1) -> Expression:
    """Probabilities along a dimension."""
    return _function("softmax", partial(kernels.normalised, "_softmax", dim), x)


def log_softmax(x: Expression, dim: int = -1) -> Expression:
    """The logarithms of probabilities along a dimension."""
    return _function("log_softmax", partial(kernels.normalised, "_log_softmax", dim), x)


def nll_loss(logs: Expression, labels: Expression) -> Expression:
    """The mean of minus the entry of `logs` (batch, classes) that belongs to each of `labels` (batch)."""
    return _function("nll_loss", kernels.nll_loss, logs, labels)


def cross_entropy(scores: Expression, labels: Expression) -> Expression:
    """The mean cross entropy of `scores` (batch, classes) against whole numbers `labels` (batch)."""
    return _function("cross_entropy", kernels.cross_entropy, scores, labels)


def transpose(x: Expression, first: int = -2, second: int = -1) -> Expression:
    """Two dimensions exchanged. Nothing is computed: it is another look at the same value."""
    return _function("transpose", partial(kernels.transposition, first, second), x)


def reshape(x: Expression, shape: int | Sequence[int]) -> Expression:
    """Another shape; one size may be -1, and is what is left."""
    return _function("reshape", partial(kernels.reshaping, _dims(shape)), x)


def concat(*parts: Expression, dim: int = 0) -> Expression:
    """Tensors side by side along a dimension."""
    if not parts:
        raise BadRequest("concat needs at least one expression. Give it one.")
    return _function("concat", partial(kernels.concatenation, dim), *parts)


FUNCTIONS: Mapping[str, Callable[..., Expression]] = {
    function.__name__: function
    for function in (
        *(abs, cos, exp, gelu, ln, log, relu, sigmoid, silu, sin, sqrt, tanh),
        *(concat, linear, matmul, mean, reshape, softmax, log_softmax, sum, transpose),
        *(cross_entropy, nll_loss),
    )
}


# Graphs -----------------------------------------------------------------------------------------------


def graph_of(*outputs: Expression, name: str = "expression", device: str = "cpu") -> Graph:
    """The graph that computes `outputs`; they are its results, by name.

    Variables are resident, under their names, in the order in which they are met. Ops come in the order of a
    trace by hand: first what can be computed from variables alone, then what needs one step more, and so on.
    A value that was not named is called v1, v2, … in that order. An expression that is used twice is
    computed once. Transposing and reshaping make no ops where they need no copy.

    Raises:
        ShapeMismatch: shapes do not go together; the message names the operands.
        BadRequest: nothing is asked for, or a name stands for two different things.
    """
    if not outputs:
        raise BadRequest("there is nothing to compute. Give at least one expression.")
    growing = Growing(empty(name, device=device))
    made: dict[int, Ref] = {}
    nodes = _in_order(outputs)
    names = _Names({node.name for node in nodes})
    for node in nodes:
        operands = [made[id(each)] if isinstance(each, Expression) else each for each in node.operands]
        if isinstance(node, Variable) and (twin := names.variable(node)) is not None:
            made[id(node)] = made[id(twin)]
            continue
        before = len(growing.values)
        ref = made[id(node)] = node.build(growing, *operands)
        if growing.tensors[ref.tensor].value >= before and not isinstance(node, Variable):
            growing.rename(ref, names.of(node), Role.INTERMEDIATE)
    results = {each.name or growing.name(made[id(each)]): made[id(each)].tensor for each in outputs}
    return growing.finish([growing.tensors[tensor].value for tensor in results.values()], results)


class _Names:
    """Hands out names, each for one thing; numbers leave out those that are `given`."""

    def __init__(self, given: AbstractSet[str]) -> None:
        self._numbered = (name for n in itertools.count(1) if (name := f"v{n}") not in given)
        self._taken: dict[str, Expression] = {}

    def variable(self, node: Variable) -> Variable | None:
        """A variable that was met before under the same name."""
        twin = self._taken.setdefault(node.name, node)
        if twin is node:
            return None
        if not isinstance(twin, Variable) or (twin.shape, twin.dtype) != (node.shape, node.dtype):
            raise _ambiguous(node.name)
        return twin

    def of(self, node: Expression) -> str:
        """The name of a node, or the next number."""
        name = node.name or next(self._numbered)
        if name in self._taken:
            raise _ambiguous(name)
        self._taken[name] = node
        return name


def _ambiguous(name: str) -> BadRequest:
    return BadRequest(f"'{name}' stands for two different things. Choose another name for one of them.")


def _in_order(outputs: Sequence[Expression]) -> list[Expression]:
    """Every expression once: by the most steps that lead to it, and then as one reads."""
    depths: dict[int, int] = {}
    met: list[Expression] = []
    waiting = list(reversed(outputs))
    while waiting:
        node = waiting[-1]
        operands = [each for each in node.operands if isinstance(each, Expression)]
        missing = [each for each in operands if id(each) not in depths]
        if missing:
            waiting.extend(reversed(missing))
            continue
        waiting.pop()
        if id(node) not in depths:
            depths[id(node)] = 1 + max((depths[id(each)] for each in operands), default=-1)
            met.append(node)
    return sorted(met, key=lambda node: depths[id(node)])
