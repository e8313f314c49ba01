"""What a card is said to hold."""

from __future__ import annotations

import pytest

from lowtide.errors import BadRequest
from lowtide.text.card import Card


@pytest.mark.parametrize("given", ["24GiB", "24GiB card", "24 gib Card", 24 << 30, Card(24 << 30)])
def test_a_card_is_read_however_it_is_written(given: str | int | Card) -> None:
    assert Card.parse(given) == Card(24 << 30)


def test_what_others_hold_is_not_to_be_had() -> None:
    card = Card.parse("8GiB card", reserve="1GiB")
    assert card.usable_bytes == 7 << 30
    assert str(card) == "a card of 8.00 GiB, 1.00 GiB of it held by others"


def test_a_card_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"a card of 1\.00 GiB of which others hold 1\.00 GiB leaves room"):
        Card.parse("1GiB", reserve="1GiB")


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(BadRequest, match="cannot read 'large ' as a size"):
        Card.parse("large card")
