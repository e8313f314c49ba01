"""Words made to fit: what is too long loses what is missed least."""

from __future__ import annotations

from collections.abc import Sequence


def without_middle(text: str, most: int) -> str:
    """`text`, or its beginning and end if it has more than `most` letters."""
    keep = most // 2 - 1
    return text if len(text) <= most else f"{text[:keep]}…{text[-keep:]}"


def listed(numbers: Sequence[int], most: int) -> str:
    """'3, 6, 9', or '3, 6, … 21 (7)' where that would have more than `most` letters."""
    whole = ", ".join(map(str, numbers))
    if len(whole) <= most:
        return whole
    end = f"… {numbers[-1]} ({len(numbers)})"
    shown = ""
    for number in numbers[:-1]:
        longer = f"{shown}{number}, "
        if len(longer) + len(end) > most:
            break
        shown = longer
    return f"{shown}{end}"
