"""A card as people mean it: all the memory that a device has to give."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lowtide.errors import BadRequest
from lowtide.text.known_cards import KnownCard, known_card
from lowtide.text.sizes import parse_bytes
from lowtide.text.units import format_bytes

_WORD = re.compile(r"\s*\bcard$", re.IGNORECASE)
_NAME = re.compile(r"\s*[a-z].*\d.*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, init=False)
class Card:
    """A device of so much memory, of which others hold `reserve_bytes`: a display, another process.

    `Card("24GiB")`, `Card("rtx4090")`, `Card("8GiB", reserve="1GiB")`. What is left, `usable_bytes`, has to
    hold everything that the process takes from the device: segments that PyTorch's allocator reserves, the
    CUDA context, what libraries take for themselves. `known` says more of a card that was named.

    Raises:
        UnknownCard: there is none of that name.
        BadRequest: it is no size, or nothing is left.
    """

    memory_bytes: int
    reserve_bytes: int = 0
    known: KnownCard | None = field(default=None, repr=False)

    def __init__(self, memory: str | int, reserve: str | int = 0) -> None:
        text = _WORD.sub("", str(memory).strip())
        known = known_card(text) if is_a_name(text) else None
        memory_bytes = parse_bytes(text) if known is None else known.memory_bytes
        reserve_bytes = parse_bytes(reserve) if reserve else 0
        object.__setattr__(self, "memory_bytes", memory_bytes)
        object.__setattr__(self, "reserve_bytes", reserve_bytes)
        object.__setattr__(self, "known", known)
        if reserve_bytes >= memory_bytes:
            raise BadRequest(
                f"a card of {format_bytes(memory_bytes)} of which others hold {format_bytes(reserve_bytes)} "
                "leaves room for nothing. Reserve less."
            )

    @classmethod
    def parse(cls, given: str | int | Card, reserve: str | int = 0) -> Card:
        """What is meant by '24GiB', '24GiB card', 'rtx4090' and 25_769_803_776; a card is as it is."""
        return given if isinstance(given, Card) else cls(given, reserve)

    @property
    def usable_bytes(self) -> int:
        """What this process can take."""
        return self.memory_bytes - self.reserve_bytes

    def __str__(self) -> str:
        held = f", {format_bytes(self.reserve_bytes)} of it held by others" if self.reserve_bytes else ""
        named = f" ({self.known.name})" if self.known is not None else ""
        return f"a card of {format_bytes(self.memory_bytes)}{named}{held}"


def is_a_name(given: str | int) -> bool:
    """Whether something that is written can only mean a card: '24GiB card', 'rtx4090'."""
    text = str(given).strip()
    return _WORD.search(text) is not None or _NAME.fullmatch(text) is not None
