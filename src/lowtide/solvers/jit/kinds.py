"""What goes into compiled functions and comes out of them, read from their annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from inspect import unwrap
from types import FunctionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from llvmlite import ir

from lowtide.solvers.jit import Numbers, Reals, Record

INT, REAL, BOOL = ir.IntType(64), ir.DoubleType(), ir.IntType(1)
POINTER = INT.as_pointer()
_NUMBERS: Mapping[Any, Any] = {int: INT, float: REAL, bool: BOOL}


@dataclass(frozen=True)
class Column:
    """Numbers side by side: where they begin, and how many there are."""

    number: Any  # INT or REAL


@dataclass(frozen=True)
class Table:
    """A record: for each of its fields where it begins and how many numbers it has."""

    fields: Mapping[str, Kind]

    def place(self, name: str) -> int:
        """Which of the record's fields that is."""
        return list(self.fields).index(name)


Kind: TypeAlias = Any  # INT, REAL, BOOL, a Column or a Table


@dataclass(frozen=True)
class Signature:
    """Names and kinds of what a function takes, and the kinds of what it returns: none, one or several."""

    parameters: Mapping[str, Kind]
    results: tuple[Any, ...]

    @property
    def llvm(self) -> Any:
        """The same for LLVM. What is true or false is passed as 1 or 0, so that callers in C agree."""
        taken = [each for kind in self.parameters.values() for each in _passed(kind)]
        results = [each for kind in self.results for each in _passed(kind)]
        several = ir.LiteralStructType(results) if len(results) > 1 else ir.VoidType()
        return ir.FunctionType(results[0] if len(results) == 1 else several, taken)


@dataclass(frozen=True)
class Callee:
    """A function that is being compiled, as Python and as LLVM know it."""

    python: FunctionType
    signature: Signature
    llvm: Any


@dataclass(frozen=True)
class Scope:
    """What a function can name beside its own variables."""

    globals: Mapping[str, Any]  # of its module
    callees: Mapping[str, Callee]

    def callee(self, name: str) -> Callee | None:
        """The function that it calls by that name, if that is compiled too."""
        found, named = self.callees.get(name), self.globals.get(name)
        return found if found and callable(named) and unwrap(named) is found.python else None


def signature_of(function: FunctionType) -> Signature:
    """What the annotations of `function` say.

    Raises:
        TypeError: they say nothing, or something that cannot be compiled.
    """
    hints = get_type_hints(function)
    missing = {*function.__code__.co_varnames[: function.__code__.co_argcount], "return"} - set(hints)
    if missing:
        raise TypeError(f"{function.__qualname__} does not say what {', '.join(sorted(missing))} is")
    result = hints.pop("return")
    results = get_args(result) if get_origin(result) is tuple else () if result is type(None) else (result,)
    if any(each not in _NUMBERS for each in results):
        raise TypeError(f"{function.__qualname__} returns {result}; numbers can be returned")
    return Signature(
        {name: _kind(hint) for name, hint in hints.items()}, tuple(_NUMBERS[each] for each in results)
    )


@cache
def _kind(hint: Any) -> Kind:
    if hint in _NUMBERS:
        return _NUMBERS[hint]
    if hint in (Numbers, Reals):
        return Column(INT if hint == Numbers else REAL)
    if isinstance(hint, type) and issubclass(hint, Record):
        return Table({name: _kind(inner) for name, inner in get_type_hints(hint).items()})
    raise TypeError(f"{hint} cannot be compiled; int, float, bool, Numbers, Reals and records of columns can")


def _passed(kind: Kind) -> list[Any]:
    match kind:
        case Column():
            return [kind.number.as_pointer(), INT]
        case Table():
            return [POINTER]
        case _:
            return [INT if kind == BOOL else kind]
