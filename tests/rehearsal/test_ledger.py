"""What is on a card, replayed: peaks of acts, what has no room, and a timeline of a fixed size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.ir.simulate import CATEGORIES, Category
from lowtide.rehearsal.ledger import CardLedger, Glimpses
from lowtide.rehearsal.outcome import Act, ActPeak, Doing, Instant
from tests.helpers.effort import examples

MIB = 1 << 20


def at(op: str, act: Act = Act.SETUP, line: str = "train.py:1, in main") -> Instant:
    return Instant(act, 0, Doing.FORWARD, op, line, line)


def ledger(
    allowed_bytes: int, look: Callable[[], None] = lambda: None, *, expandable: bool = False
) -> CardLedger:
    return CardLedger(allowed_bytes, expandable=expandable, look=look)


def peak(book: CardLedger, act: Act) -> ActPeak:
    return next(found for found in book.peaks() if found.act is act)


def test_a_peak_is_told_as_it_was_when_nothing_had_been_freed_yet() -> None:
    book = ledger(100 * MIB)
    book.take("weight", 4 * MIB, Category.PARAMETERS, at("first"))
    book.take("activation", 2 * MIB, Category.ACTIVATIONS, at("second"))
    book.give_back("activation")
    book.take("another", 2 * MIB, Category.ACTIVATIONS, at("third"))
    found = peak(book, Act.SETUP)
    assert found.allocated_bytes == 6 * MIB
    assert found.reserved_bytes == 20 * MIB  # one segment holds both
    assert found.moment == at("second")
    assert {category: count for category, count in found.held.items() if count} == {
        Category.PARAMETERS: 4 * MIB,
        Category.ACTIVATIONS: 2 * MIB,
    }


def test_what_something_is_held_for_may_become_known_after_the_peak_and_before_a_free() -> None:
    def look() -> None:
        book.label("made", Category.GRADIENTS, "weight.grad")

    book: CardLedger = ledger(100 * MIB, look)
    book.take("made", 2 * MIB, Category.TEMPORARIES, at("mm"))
    book.give_back("made")
    assert peak(book, Act.SETUP).held[Category.GRADIENTS] == 2 * MIB
    assert peak(book, Act.SETUP).held[Category.TEMPORARIES] == 0


def test_every_act_has_peaks_of_its_own_and_begins_with_what_is_there() -> None:
    book = ledger(100 * MIB)
    book.take("weight", 4 * MIB, Category.PARAMETERS, at("first"))
    book.enter(Act.TRAINING)
    book.take("activation", 2 * MIB, Category.ACTIVATIONS, at("second", Act.TRAINING))
    book.give_back("activation")
    for _ in range(2):
        book.enter(Act.SAVING)
        book.enter(Act.TRAINING)
    found = {each.act: (each.times, each.allocated_bytes, each.moment) for each in book.peaks()}
    assert found == {
        Act.SETUP: (1, 4 * MIB, at("first")),
        Act.TRAINING: (
            1,
            6 * MIB,  # saving does not end it
            at("second", Act.TRAINING),
        ),
        Act.SAVING: (2, 4 * MIB, None),
    }


def test_what_has_no_room_is_told_with_who_holds_what_and_is_held_all_the_same() -> None:
    book = ledger(24 * MIB)
    book.take("weight", 12 * MIB, Category.PARAMETERS, at("first"), "fc.weight")
    for number in range(2):
        book.take(number, 5 * MIB, Category.ACTIVATIONS, at("relu"))
    short = book.shortfall
    assert short is not None
    assert (short.asked_bytes, short.allocated_bytes, short.reserved_bytes) == (5 * MIB, 12 * MIB, 12 * MIB)
    assert short.moment == at("relu")
    assert {category: count for category, count in short.held.items() if count} == {
        Category.PARAMETERS: 12 * MIB
    }
    assert [(holder.name, holder.bytes, holder.tensors) for holder in short.holders] == [
        ("fc.weight", 12 * MIB, 1)
    ]
    found = peak(book, Act.SETUP)
    assert (found.fits, found.allocated_bytes) == (False, 22 * MIB)


def test_segments_that_grow_may_fit_where_whole_ones_do_not() -> None:
    book = ledger(48 * MIB)
    book.take("large", 30 * MIB, Category.ACTIVATIONS, at("relu"))
    book.give_back("large")
    book.take("small", 5 * MIB, Category.ACTIVATIONS, at("relu"))  # in the segment of 30, which stays
    book.take("again", 26 * MIB, Category.ACTIVATIONS, at("relu"))
    assert book.shortfall is not None
    assert book.shortfall.reserved_bytes == 30 * MIB
    assert not book.other.refusals


def test_after_a_shortfall_the_next_act_does_not_live_on_what_would_not_be_there() -> None:
    book = ledger(24 * MIB)
    book.take("weight", 12 * MIB, Category.PARAMETERS, at("first"))
    book.take("large", 30 * MIB, Category.ACTIVATIONS, at("mm"))
    book.give_back("large")
    assert book.replay.allocator.reserved_bytes == 42 * MIB
    book.enter(Act.TRAINING)
    assert book.replay.allocator.reserved_bytes == 12 * MIB
    book.take("large", 30 * MIB, Category.ACTIVATIONS, at("mm", Act.TRAINING))
    assert [found.fits for found in book.peaks()] == [False, False]
    book.give_back("large")
    book.enter(Act.VALIDATION)
    book.take("small", 12 * MIB, Category.ACTIVATIONS, at("mm", Act.VALIDATION))
    assert [found.fits for found in book.peaks()] == [False, False, True]


def test_what_is_cached_stays_where_everything_has_had_room() -> None:
    book = ledger(100 * MIB)
    book.take("large", 30 * MIB, Category.ACTIVATIONS, at("mm"))
    book.give_back("large")
    book.enter(Act.TRAINING)
    assert book.replay.allocator.reserved_bytes == 30 * MIB


def test_a_kernel_takes_memory_for_as_long_as_it_runs() -> None:
    book = ledger(100 * MIB)
    book.scratch(3 * MIB, at("convolution"))
    assert book.replay.allocator.allocated_bytes == 0
    assert peak(book, Act.SETUP).held[Category.WORKSPACE] == 3 * MIB


def test_what_is_unknown_can_be_given_back_and_labelled_without_harm() -> None:
    book = ledger(MIB)
    book.give_back("nobody")
    book.label("nobody", Category.BUFFERS, "mean")
    assert list(book.peaks()) == []


@given(sizes=st.lists(st.integers(1, 1 << 22), min_size=1, max_size=30), data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_at_any_moment_categories_add_up_to_what_is_allocated(sizes: list[int], data: st.DataObject) -> None:
    book = ledger(8 * MIB)
    held: list[int] = []
    for number, size in enumerate(sizes):
        book.take(number, size, data.draw(st.sampled_from(CATEGORIES)), at("op"))
        held.append(number)
        gives_back: bool = data.draw(st.booleans())
        if gives_back:
            book.give_back(held.pop(data.draw(st.integers(0, len(held) - 1))))
        is_labelled: bool = data.draw(st.booleans())
        if held and is_labelled:
            book.label(data.draw(st.sampled_from(held)), data.draw(st.sampled_from(CATEGORIES)), "name")
        last = book.glimpses()[-1]
        assert sum(last.stack) == last.allocated_bytes <= book.replay.allocator.peak_allocated_bytes
    found = peak(book, Act.SETUP)
    assert sum(found.held.values()) == found.allocated_bytes
    assert found.allocated_bytes == book.replay.allocator.peak_allocated_bytes


@pytest.mark.parametrize("events", [1, 2_048, 2_049, 50_000])
def test_a_timeline_stays_short_and_keeps_its_peak(events: int) -> None:
    glimpses = Glimpses()
    for number in range(events):
        held = 7_777_777 if number == events // 3 else number
        glimpses.add(Act.TRAINING, held, held, [held])
    found = glimpses.all()
    assert len(found) == min(events, len(found)) <= 2_048
    assert len(found) > min(events, 1_000) - 1
    assert max(each.allocated_bytes for each in found) == 7_777_777
