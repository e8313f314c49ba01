"""A budget as people write it: four things, told apart once."""

from __future__ import annotations

import pytest

from lowtide.errors import BadRequest
from lowtide.text.budget import Budget

GIB = 1 << 30


def never() -> int:
    raise AssertionError("the plain peak is not needed")


@pytest.mark.parametrize(
    ("given", "is_given", "is_lowest", "allowed"),
    [
        (None, False, False, None),
        ("min", True, True, None),
        ("8GiB", True, False, 8 * GIB),
        (12345, True, False, 12345),
        ("60%", True, False, 600),
        (" 12.5 %", True, False, 125),
        ("250%", True, False, 2500),
    ],
)
def test_a_budget_is_bytes_or_a_part_or_the_lowest_peak_or_none(
    given: str | int | None, is_given: bool, is_lowest: bool, allowed: int | None
) -> None:
    budget = Budget.parse(given)
    assert (budget.is_given, budget.is_lowest, budget.bytes_of(1000)) == (is_given, is_lowest, allowed)
    assert str(budget) == str(given)


@pytest.mark.parametrize(("given", "plainly"), [(" MIN ", "min"), ("8 gib", 8 * GIB), ("60 %", "60%")])
def test_case_and_spaces_do_not_matter(given: str, plainly: str | int) -> None:
    found, expected = Budget.parse(given), Budget.parse(plainly)
    assert (found.is_lowest, found.bytes, found.part) == (expected.is_lowest, expected.bytes, expected.part)


@pytest.mark.parametrize("given", [None, "min", "8GiB", 12345])
def test_the_plain_peak_is_found_only_for_a_part_of_it(given: str | int | None) -> None:
    assert Budget.parse(given).bytes_of(never) == Budget.parse(given).bytes_of(1000)
    with pytest.raises(AssertionError):
        Budget.parse("60%").bytes_of(never)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lots", "cannot read 'lots' as a size"),
        ("", "cannot read '' as a size"),
        ("x%", "cannot read 'x%' as a part of the plain peak"),
        ("0%", "cannot read '0%' as a part of the plain peak"),
        ("-5%", "cannot read '-5%' as a part of the plain peak"),
        ("nan%", "cannot read 'nan%' as a part of the plain peak"),
        ("inf%", "cannot read 'inf%' as a part of the plain peak"),
        (0, "leaves room for nothing"),
    ],
)
def test_what_is_none_of_these_is_refused(given: str | int, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Budget.parse(given)
