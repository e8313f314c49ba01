"""Words made to fit: what is too long loses what is missed least."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBERED = re.compile(r"(?<![^\s.])\d+(?=[.:]|$)")  # the 3 of 'layers.3.conv', and no digit of a name


def same_name(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` means, in whatever case and with whatever hyphens it is written."""
    known = list(known)
    return name if name in known else next((each for each in known if _bare(each) == _bare(name)), None)


def _bare(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).casefold()


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


def unnumbered(text: str) -> str:
    """What is said of all layers of a kind: 'input of layers.*.conv: Relu' for that of layers.3."""
    return _NUMBERED.sub("*", text)


def in_common(texts: Sequence[str]) -> str:
    """Texts that differ in the numbers of layers as one: 'layers.*.1.conv'."""
    columns = _numbers(texts)
    return _with_numbers(texts[0], ["*" if len(column) > 1 else str(column[0]) for column in columns])


def together(texts: Sequence[str]) -> str:
    """The same, told which where they differ in one number alone: 'layers.{0–8, 11}.1.conv'."""
    columns = _numbers(texts)
    if sum(len(column) > 1 for column in columns) != 1:
        return in_common(texts)
    written = [f"{{{ranges(column)}}}" if len(column) > 1 else str(column[0]) for column in columns]
    return _with_numbers(texts[0], written)


def _numbers(texts: Sequence[str]) -> list[list[int]]:
    """The different numbers in each place that has one; all texts have them in the same places."""
    rows = (map(int, _NUMBERED.findall(text)) for text in texts)
    return [list(dict.fromkeys(column)) for column in zip(*rows, strict=True)]


def _with_numbers(text: str, written: Iterable[str]) -> str:
    following = iter(written)
    return _NUMBERED.sub(lambda _: next(following), text)


def ranges(numbers: Iterable[int]) -> str:
    """'0–8, 11' for the numbers 0 to 8 and 11."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in found)
