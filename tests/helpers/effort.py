"""How many examples a property tries under the profile that hypothesis runs with."""

from __future__ import annotations

from hypothesis import settings

_FULL = 100  # what hypothesis tries where nobody asks for another number


def examples(number: int) -> int:
    """`number` in the full profile, and as much less in the quick one as a plain property tries there."""
    return max(number * settings().max_examples // _FULL, 1)
