"""Loops over numbers, compiled by LLVM (llvmlite) at their first call.

    unit = Unit()             functions that are compiled together, and may call one another by name
    @unit.linked              a part of what calls it
    @unit.compiled            may be called from Python

A search is long loops over arrays; as Python it takes about a hundred times as long. Why not numba? It infers
types, which here are all written down, and compiles each function anew with each that calls it: for the
search that took half a minute. Here it takes half a second, so that nothing need be kept on disk.

What can be compiled is a small part of Python: whole and real numbers, columns of them, records of columns,
`if`, `while`, `for … in range(…)`, and calls. `translation` says what is meant by each and refuses the rest.
Without llvmlite the very same functions run as Python: the answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property, wraps
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


_OLDEST = (0, 44)  # LLVM's new pass managers


@cache
def is_compiling() -> bool:
    """Whether llvmlite is installed, and not too old."""
    try:
        found = version("llvmlite")
    except PackageNotFoundError:
        return False
    return tuple(int(part) for part in found.split(".")[:2]) >= _OLDEST


class Unit:
    """Functions that are compiled together, all of them when one is first called from Python.

    Every parameter and result has its type written down: int, float, bool, `Numbers`, `Reals` or a dataclass
    that is a `Record`.
    """

    def __init__(self) -> None:
        self.functions: dict[str, FunctionType] = {}
        self.entries: list[str] = []

    def linked(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """`function` as a part of the compiled functions that call it; for Python it stays what it is."""
        if not isinstance(function, FunctionType) or function.__name__ in self.functions:
            raise TypeError(f"{function!r} cannot be compiled: it is no function, or its name is taken")
        self.functions[function.__name__] = function
        return function

    def compiled(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """`function` in machine code, if llvmlite is there."""
        self.linked(function)
        self.entries.append(function.__name__)
        if not is_compiling():
            return function

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            result: Result = self._machine_code[function.__name__](*args, **kwargs)
            return result

        return call

    @cached_property
    def _machine_code(self) -> Mapping[str, Callable[..., Any]]:
        from lowtide.solvers.jit.machine import machine_code  # brings LLVM

        return machine_code(self.functions, self.entries)


class Record:
    """The base of dataclasses of columns and of further records; compiled functions get one address for all.

    The columns of a record that was handed over are never replaced: they stay where they are.
    """

    @cached_property
    def address(self) -> int:
        """Where its table is, which lives as long as the record."""
        return int(self._table.ctypes.data)

    @cached_property
    def _table(self) -> Numbers:
        """For each field where it begins, and how many numbers it has."""
        hints = get_type_hints(type(self))
        return np.array([_entry(getattr(self, name), hint) for name, hint in hints.items()], np.int64)


def _entry(value: object, hint: object) -> tuple[int, int]:
    return (value.address, 0) if isinstance(value, Record) else place_of(value, hint == Reals)


def place_of(column: object, is_real: bool) -> tuple[int, int]:
    """Where the numbers of a column begin, and how many there are.

    Raises:
        TypeError: it is no array of such numbers, 64 bits each, side by side.
    """
    wanted = np.float64 if is_real else np.int64
    if isinstance(column, np.ndarray) and column.dtype == wanted and column.flags.c_contiguous:
        return int(column.ctypes.data), len(column)
    raise TypeError(f"a compiled function takes contiguous arrays of {wanted.__name__}, not {column!r:.60}")
