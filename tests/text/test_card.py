"""What a card is said to hold."""

from __future__ import annotations

import pytest

from lowtide.errors import BadRequest, UnknownCard
from lowtide.text.budget import Budget
from lowtide.text.card import Card
from lowtide.text.known_cards import KNOWN_CARDS


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
    with pytest.raises(BadRequest, match="cannot read 'large' as a size"):
        Card.parse("large card")


@pytest.mark.parametrize(
    "name", ["rtx4090", "RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "rtx4090 card", "RTX_4090 Card"]
)
def test_a_card_goes_by_its_name(name: str) -> None:
    card = Card(name)
    assert card.known is KNOWN_CARDS["rtx4090"]
    assert card.memory_bytes == int(23.61 * (1 << 30))
    assert str(card) == "a card of 23.61 GiB (rtx4090)"
    assert Card(name, reserve="1GiB").usable_bytes == card.memory_bytes - (1 << 30)


def test_a_short_name_means_the_card_with_less_memory() -> None:
    assert Card("a100").known is KNOWN_CARDS["a100-40gb"]
    assert Card("Tesla V100").known is KNOWN_CARDS["v100-16gb"]


def test_an_unknown_card_is_refused_and_the_nearest_are_named() -> None:
    with pytest.raises(UnknownCard, match=r"there is no card called 'rtx4095'\. Did you mean") as refused:
        Card("rtx4095")
    assert "rtx4090" in refused.value.nearest
    assert refused.value.known == tuple(KNOWN_CARDS)


def test_the_table_is_in_order() -> None:
    assert len(KNOWN_CARDS) >= 12
    assert all(name == card.name for name, card in KNOWN_CARDS.items())
    sizes = [card.memory_bytes / (1 << 30) for card in KNOWN_CARDS.values()]
    assert min(sizes) < 8 < 160 < max(sizes)
    for card in KNOWN_CARDS.values():
        assert card.full_flops <= card.tensor_flops <= card.half_flops
        assert 1e11 < card.bandwidth < 1e13


def test_a_budget_may_be_a_card() -> None:
    for given in ("24GiB card", Card("24GiB")):
        assert Budget.parse(given).card == Card("24GiB")
        assert Budget.parse(given).bytes is None
    named = Budget.parse("rtx4090").card
    assert named is not None
    assert named.known is KNOWN_CARDS["rtx4090"]
    assert Budget.parse("24GiB").card is None


def test_a_card_means_no_bytes_of_a_peak() -> None:
    with pytest.raises(BadRequest, match=r"a card of 24\.00 GiB is no budget for this"):
        Budget.of_a_peak("24GiB card")
