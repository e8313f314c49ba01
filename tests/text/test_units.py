"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BadRequest
from lowtide.text.sizes import parse_bytes
from lowtide.text.units import format_bytes, format_seconds

FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (8_589_934_592, 8_589_934_592),
        (1, 1),
        ("1", 1),
        ("17 B", 17),
        ("24GiB", 25_769_803_776),
        ("8GB", 8_000_000_000),
        ("8 GB", 8_000_000_000),
        (" 8gb\n", 8_000_000_000),
        ("8gIb", 8_589_934_592),
        ("1.5MiB", 1_572_864),
        (".5KB", 500),
        ("0.5kib", 512),
        ("1.0015KB", 1001),  # half a byte is rounded down
        ("0.001KB", 1),
        ("1.999999B", 1),
        ("1_000", 1000),
        ("1,234,567", 1_234_567),
        ("1,024.5 KiB", 1_049_088),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 * 2**40),
        ("007", 7),
    ],
)
def test_a_size_is_read_as_written(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1,024.0 KiB"),
        (2**20, "1.0 MiB"),
        (720_371_712, "687.0 MiB"),
        (2**30 - 1, "1,024.0 MiB"),
        (2**30, "1.00 GiB"),
        (1_610_612_736, "1.50 GiB"),
        (2**40, "1.00 TiB"),
        (5000 * 2**40, "5,000.00 TiB"),
        (-1023, "-1023 B"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_bytes_are_written_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (8.3e-4, "830 µs"),
        (1e-3, "1.0 ms"),
        (0.0124, "12.4 ms"),
        (0.5, "500.0 ms"),
        (1.0, "1.00 s"),
        (1.314, "1.31 s"),
        (3600.0, "3600.00 s"),
    ],
)
def test_seconds_are_written_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@settings(deadline=None)
@given(st.integers(1, 10**18))
def test_a_number_of_bytes_comes_back_however_it_is_written(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(f"{count}") == parse_bytes(f"{count:,}") == count
    assert parse_bytes(f"{count:_} B") == count


@settings(deadline=None)
@given(st.integers(1, 10**6), st.sampled_from(sorted(FACTORS)))
def test_a_whole_number_of_units_is_exact(amount: int, unit: str) -> None:
    assert parse_bytes(f"{amount}{unit}") == amount * FACTORS[unit]
    assert parse_bytes(f"{amount} {unit.lower()}") == parse_bytes(f"{amount}{unit.upper()}")


@settings(deadline=None)
@given(
    st.integers(0, 999), st.text("0123456789", min_size=1, max_size=9), st.sampled_from(["MB", "GiB", "TiB"])
)
def test_a_fraction_is_exact_and_rounded_down(whole: int, digits: str, unit: str) -> None:
    exact = Fraction(f"{whole}.{digits}") * FACTORS[unit]
    if exact >= 1:
        assert parse_bytes(f"{whole}.{digits}{unit}") == exact.numerator // exact.denominator


@settings(deadline=None)
@given(st.integers(1, 2**50))
def test_what_is_written_reads_back_to_within_its_last_digit(count: int) -> None:
    text = format_bytes(count)
    unit = text.rpartition(" ")[2]
    digit = {"B": 1, "KiB": 10, "MiB": 10, "GiB": 100, "TiB": 100}[unit]
    assert abs(parse_bytes(text) - count) <= FACTORS[unit] / digit
    assert abs(parse_bytes(text) - count) <= 0.06 * count


@settings(deadline=None)
@given(st.one_of(st.text(max_size=8), st.from_regex(r"[0-9.,_ ]{1,6}[kmgtibKMGTIB]{0,3}", fullmatch=True)))
def test_any_text_is_a_positive_size_or_a_bad_request(text: str) -> None:
    with contextlib.suppress(BadRequest):
        assert parse_bytes(text) > 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "8 G",
        "8XB",
        "8GiBs",
        "-5",
        "+5",
        "1e9",
        "1.2.3",
        "1.",
        "_1",
        "60%",
        "٣GB",
        "8 G B",
        True,
        "9" * 5000,
        f"0.{'1' * 5000}",
    ],
)
def test_what_is_not_a_size_is_refused_with_advice(text: str | int) -> None:
    with pytest.raises(BadRequest) as refusal:
        parse_bytes(text)
    shown = f"{text}"[:60]
    assert str(refusal.value) == (
        f"cannot read '{shown}' as a size. Write a size such as 24GiB, 8GB, 512MiB or 8589934592."
    )


@pytest.mark.parametrize("text", ["0", 0, "0GiB", "0.0", "0.9", "0.0009KB"])
def test_a_size_of_nothing_is_refused(text: str | int) -> None:
    with pytest.raises(
        BadRequest, match=re.escape(f"a size of '{text}' leaves room for nothing. Write a size")
    ):
        parse_bytes(text)
