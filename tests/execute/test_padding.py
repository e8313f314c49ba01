"""Padding to classes: what is named is padded as it is told, and nothing else is guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import BadRequest
from tests.helpers.transformer_models import small_transformer


def test_what_is_named_is_padded_with_what_is_said() -> None:
    batch = {"ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[6, 7, 8]]), "weight": torch.ones(1)}
    found = lowtide.padded(batch, (2, 5, 9), {"ids": 0, "labels": -100})
    assert found["ids"].tolist() == [[5, 6, 7, 0, 0]]
    assert found["labels"].tolist() == [[6, 7, 8, -100, -100]]
    assert found["weight"] is batch["weight"]
    assert list(found) == ["ids", "labels", "weight"]
    assert batch["ids"].shape == (1, 3)


def test_a_tuple_is_padded_by_places_along_any_dimension() -> None:
    ids, states = torch.ones(4, 2, dtype=torch.long), torch.ones(4, 2, 3)
    found = lowtide.padded((ids, states, "more"), [6], (9, 0.5), dim=0)
    assert found[0].tolist() == [[1, 1]] * 4 + [[9, 9]] * 2
    assert found[1].shape == (6, 2, 3)
    assert found[1][4:].eq(0.5).all()
    assert found[2] == "more"


def test_what_has_the_length_of_a_class_stays_as_it_is() -> None:
    ids = torch.ones(2, 4)
    assert lowtide.padded((ids,), (4, 8), (0,))[0].equal(ids)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def test_a_padded_batch_has_the_loss_of_the_batch(kind: str) -> None:
    model, batch = small_transformer(kind)
    model.eval()
    batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    fill = {"input_ids": 2, "attention_mask": 0, "labels": -100}
    padded = lowtide.padded(batch, (64,), fill)
    assert padded["input_ids"].shape == (4, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(**padded).loss, model(**batch).loss)


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fill", "more", "message"),
    [
        ({"ids": 0}, {}, "'labels' is 3 long as well, and nobody says with what to fill it"),
        (
            {"ids": 0, "labels": -1, "mask": 0},
            {},
            "'mask' is to be padded along dimension 1, and",
        ),
        ({"ids": 0, "labels": -1, "weight": 0}, {}, "'weight' is to be padded along dimension 1"),
        ({"ids": 0, "labels": -1}, {"dim": 0, "classes": (9,)}, None),
        ({"ids": 0, "labels": -1}, {"classes": (1, 2)}, "a length of 3 fits in none of the classes 1, 2"),
        ((0, 0), {}, "the batch is a dict, and what to fill in a tuple"),
    ],
)
def test_what_nobody_has_said_is_refused(fill: Any, more: dict[str, Any], message: str | None) -> None:
    batch = {"ids": torch.ones(2, 3), "labels": torch.ones(2, 3), "weight": torch.ones(3)}
    request = {"classes": (4,), **more}
    if message is None:
        assert lowtide.padded(batch, fill=fill, **request, leave=["weight"])["ids"].shape == (9, 3)
        return
    with pytest.raises(BadRequest, match=message):
        lowtide.padded(batch, fill=fill, **request)


def test_different_lengths_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"these differ: \{0: 3, 1: 4\}"):
        lowtide.padded((torch.ones(2, 3), torch.ones(2, 4)), (8,), (0, 0))


def test_what_is_left_is_not_asked_about() -> None:
    batch = {"ids": torch.ones(2, 3), "positions": torch.ones(2, 3)}
    found = lowtide.padded(batch, (5,), {"ids": 0}, leave=["positions"])
    assert found["positions"].shape == (2, 3)
