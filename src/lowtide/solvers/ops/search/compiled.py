"""Loops over numbers, compiled by numba where it is installed (`pip install 'lowtide[fast]'`).

Without it the very same functions run as Python: the answers are the same, long chains take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function` in machine code, compiled at its first call and remembered on disk.

    It may call nothing but what numba knows: no other compiled function.
    """

    @cache
    def machine_code() -> Any:
        from numba import njit  # half a second to import: only when a method is used that has loops

        return njit(cache=True)(function)

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result: Result = (machine_code() if is_compiling() else function)(*args, **kwargs)
        return result

    return call


@cache
def is_compiling() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None
