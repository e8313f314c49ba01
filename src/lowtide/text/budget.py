"""Budgets as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.errors import BadRequest
from lowtide.text.card import Card, is_a_name
from lowtide.text.sizes import parse_bytes

LOWEST = "min"  # the budget that asks for the lowest peak there is


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step may hold at its peak, as it was asked for.

    It is one of five: a number of `bytes`; a `part` of what is held without a plan; the lowest peak that can
    be reached (`is_lowest`); no budget at all, where a method minimises what it minimises; or a `card`, that
    has to hold all that the process takes from the device.
    """

    given: str | int | Card | None = None
    bytes: int | None = None
    part: float | None = None
    card: Card | None = None

    @classmethod
    def parse(cls, given: str | int | Card | None) -> Budget:
        """What is meant by 8_589_934_592, '8GiB', '60%', 'min', '24GiB card', 'rtx4090', a card and None.

        Raises:
            BadRequest: it is none of these.
        """
        if given is None:
            return cls()
        if isinstance(given, Card) or is_a_name(given):
            return cls(given, card=Card.parse(given))
        if isinstance(given, str) and given.strip().lower() == LOWEST:
            return cls(LOWEST)
        if isinstance(given, str) and given.strip().endswith("%"):
            return cls(given, part=_part(given))
        return cls(given, bytes=parse_bytes(given))

    @classmethod
    def of_a_peak(cls, given: str | int | Card | None) -> Budget:
        """The same, where nobody counts what is reserved of a card: that is refused.

        Raises:
            BadRequest: it is a card, or nothing that can be read.
        """
        found = cls.parse(given)
        if found.card is not None:
            raise BadRequest(f"{found.card} is no budget for this: give the bytes of a peak, such as 8GiB.")
        return found

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
        A card means no bytes of a peak: whoever plans for one counts what is reserved.
        """
        assert self.card is None, "a card is planned for by who counts what is reserved of it"
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
