"""Sizes as people write them."""

from __future__ import annotations

import re

from lowtide.errors import BadRequest

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
