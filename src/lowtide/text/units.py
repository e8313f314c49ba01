"""Bytes and seconds as people read them."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """`count` in binary units: '17 B', '1.5 KiB', '687.0 MiB', '1.50 GiB'."""
    if abs(count) < 1024:
        return f"{count} B"
    power = min((abs(count).bit_length() - 1) // 10, 4)
    size = count / 1024**power
    return f"{size:,.1f} {'KM'[power - 1]}iB" if power < 3 else f"{size:,.2f} {'GT'[power - 3]}iB"


def format_seconds(seconds: float) -> str:
    """`seconds` in the unit that suits it: '1.31 s', '12.4 ms', '830 µs'."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
