"""How much the quick profile tries: fewer examples of a property, some rows of a long table."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import settings

_FULL = 100  # what hypothesis tries where nobody asks for another number


def examples(number: int) -> int:
    """`number` in the full profile, and as much less in the quick one as a plain property tries there."""
    return max(number * settings().max_examples // _FULL, 1)


def long_but(values: Iterable[str], *quick: str) -> list[ParameterSet]:
    """All of `values` for a table of tests, marked `long` but for `quick`."""
    found = list(values)
    assert set(quick) <= set(found), set(quick) - set(found)
    return [pytest.param(each, marks=[] if each in quick else pytest.mark.long) for each in found]
