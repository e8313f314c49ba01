"""A card as people mean it: all the memory that a device has to give."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import BadRequest
from lowtide.text.budget import parse_bytes
from lowtide.text.units import format_bytes

_WORD = "card"


@dataclass(frozen=True, slots=True)
class Card:
    """A device of so much memory, of which others hold `reserve_bytes`: a display, another process.

    What is left, `usable_bytes`, has to hold everything that the process takes from the device: segments that
    PyTorch's allocator reserves, the CUDA context, what libraries take for themselves.
    """

    memory_bytes: int
    reserve_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.reserve_bytes < self.memory_bytes:
            raise BadRequest(
                f"a card of {format_bytes(self.memory_bytes)} of which others hold "
                f"{format_bytes(self.reserve_bytes)} leaves room for nothing. Reserve less."
            )

    @classmethod
    def parse(cls, given: str | int | Card, reserve: str | int = 0) -> Card:
        """What is meant by '24GiB', '24GiB card' and 25_769_803_776, with so much of it held by others.

        Raises:
            BadRequest: it is no size, or nothing is left.
        """
        if isinstance(given, Card):
            return given
        text = str(given).strip()
        if text.lower().endswith(_WORD):
            text = text[: -len(_WORD)]
        return cls(parse_bytes(text), parse_bytes(reserve) if reserve else 0)

    @property
    def usable_bytes(self) -> int:
        """What this process can take."""
        return self.memory_bytes - self.reserve_bytes

    def __str__(self) -> str:
        held = f", {format_bytes(self.reserve_bytes)} of it held by others" if self.reserve_bytes else ""
        return f"a card of {format_bytes(self.memory_bytes)}{held}"
