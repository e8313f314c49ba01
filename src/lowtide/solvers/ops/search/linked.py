"""Loops over numbers that call one another, compiled together by numba where it is installed.

`compiled` takes one function at a time; a search is many. Without numba the very same functions run as
Python: the answers are the same, and take longer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from lowtide.solvers.ops.search.compiled import is_compiling

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_LINKED: dict[str, tuple[FunctionType, bool]] = {}  # by name; and whether it is compiled into its callers


def linked(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function` in machine code; it may call linked and inlined functions by name, and make no arrays.

    Called from Python it compiles what it needs, and remembers that on disk.
    """
    _enlist(function, inline=False)
    if not is_compiling():
        return function

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result: Result = _machine_code()[function.__name__](*args, **kwargs)
        return result

    return call


def inlined(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function` as a part of the linked functions that call it: what has one caller compiles faster so."""
    _enlist(function, inline=True)
    return function


def _enlist(function: Callable[..., object], *, inline: bool) -> None:
    if not isinstance(function, FunctionType) or function.__name__ in _LINKED:
        raise TypeError(f"{function!r} cannot be linked: it is no function, or its name is taken")
    _LINKED[function.__name__] = function, inline


@cache
def _machine_code() -> dict[str, Any]:
    """Every linked function as numba sees it: with the others in place of what Python would call."""
    from numba import njit  # half a second to import: only when a method is used that has loops

    # Why a digest in the names? numba finds compiled code again by a function's name and its file's date, and
    # would not notice a change in another file that is compiled into this one.
    code = [(each.__code__.co_code, each.__code__.co_consts, inline) for each, inline in _LINKED.values()]
    digest = hashlib.sha256(repr(code).encode()).hexdigest()[:8]
    found: dict[str, Any] = {}
    for name, (function, inline) in _LINKED.items():
        copy = FunctionType(function.__code__, {**function.__globals__}, name, function.__defaults__)
        copy.__module__ = function.__module__
        copy.__qualname__ = f"{name}_{digest}"
        # Why no runtime? Arrays would be counted in and out at every call, which takes longer than the calls.
        found[name] = njit(cache=True, inline="always" if inline else "never", _nrt=False)(copy)
    for dispatcher in found.values():
        dispatcher.py_func.__globals__.update(found)
    return found
