"""Sizes and budgets as people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.errors import BadRequest

LOWEST = "min"  # the budget that asks for the lowest peak there is

_FACTORS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_QUANTITY = re.compile(r"\s*(\d[\d_,]*(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_MOST_DIGITS = 40  # Python refuses to read numbers of thousands of digits, and nobody means them
_HOW = "Write a size such as 24GiB, 8GB, 512MiB or 8589934592"


def parse_bytes(text: str | int) -> int:
    """The number of bytes that `text` means: '24GiB', '8 GB', '1.5MiB', 8_589_934_592.

    GiB is 1024³, GB is 1000³. Fractions of a byte are rounded down.

    Raises:
        BadRequest: `text` is not a size, or the size is not positive.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2].lower() not in _FACTORS or len(match[1]) > _MOST_DIGITS:
        raise BadRequest(f"cannot read '{text!s:.60}' as a size. {_HOW}.")
    whole, _, fraction = match[1].replace("_", "").replace(",", "").partition(".")
    factor = _FACTORS[match[2].lower()]
    count = int(whole or 0) * factor + int(fraction or 0) * factor // int(10 ** len(fraction))
    if count <= 0:
        raise BadRequest(f"a size of '{text}' leaves room for nothing. {_HOW}.")
    return count


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step may hold at its peak, as it was asked for.

    It is one of four: a number of `bytes`; a `part` of what is held without a plan; the lowest peak that can
    be reached (`is_lowest`); or no budget at all, where a method minimises what it minimises.
    """

    given: str | int | None = None
    bytes: int | None = None
    part: float | None = None

    @classmethod
    def parse(cls, given: str | int | None) -> Budget:
        """What is meant by 8_589_934_592, '8GiB', '60%', 'min' and None.

        Raises:
            BadRequest: it is none of these.
        """
        if given is None:
            return cls()
        if isinstance(given, str) and given.strip().lower() == LOWEST:
            return cls(LOWEST)
        if isinstance(given, str) and given.strip().endswith("%"):
            return cls(given, part=_part(given))
        return cls(given, bytes=parse_bytes(given))

    @property
    def is_given(self) -> bool:
        """Whether a budget was asked for, be it the lowest."""
        return self.given is not None

    @property
    def is_lowest(self) -> bool:
        """Whether the lowest peak was asked for."""
        return self.given == LOWEST

    def bytes_of(self, plain_peak_bytes: int | Callable[[], int]) -> int | None:
        """The bytes that it allows; None for the lowest peak, and without a budget.

        A plain peak that has yet to be found, by a function, is found only for a budget that is a part of it.
        """
        if self.part is None:
            return self.bytes
        return int(self.part * (plain_peak_bytes() if callable(plain_peak_bytes) else plain_peak_bytes))

    def __str__(self) -> str:
        return str(self.given)


def _part(text: str) -> float:
    try:
        part = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        part = math.nan
    if not 0 < part < math.inf:
        raise BadRequest(f"cannot read '{text:.60}' as a part of the plain peak. Write 60% or 8GiB.")
    return part
