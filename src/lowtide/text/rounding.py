"""Numbers rounded for a table so that the printed ones add up to the printed total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """What a column of bytes is counted in, and to how many decimals."""

    name: str
    bytes: int
    decimals: int

    def column(self, counts: Sequence[int]) -> list[str]:
        """`counts` in this unit; as printed they sum to what `text(sum(counts))` prints."""
        scale = int(10**self.decimals)
        return [self._written(tick) for tick in apportioned(counts, self.bytes, scale)]

    def text(self, count: int) -> str:
        """One count, rounded by itself."""
        return self.column([count])[0]

    def _written(self, ticks: int) -> str:
        return f"{ticks / 10**self.decimals:,.{self.decimals}f}"


def unit_for(total: int) -> Unit:
    """The unit in which a table that sums to `total` reads best."""
    if total < 1 << 20:
        return Unit("B", 1, 0)
    if total < 100 << 20:
        return Unit("KiB", 1 << 10, 1)
    return Unit("MiB", 1 << 20, 1) if total < 1 << 40 else Unit("GiB", 1 << 30, 1)


def apportioned(counts: Sequence[int], whole: int, scale: int) -> list[int]:
    """`count * scale / whole` for each count, in whole numbers that sum to the rounded total.

    Each is rounded down, and those that lost most get what is missing (Hamilton's method).
    """
    floors = [count * scale // whole for count in counts]
    missing = (2 * sum(counts) * scale + whole) // (2 * whole) - sum(floors)
    lost = sorted(range(len(counts)), key=lambda place: -(counts[place] * scale % whole))
    for place in lost[:missing]:
        floors[place] += 1
    return floors
