"""Compiling from nothing: caches are elsewhere while the block lasts, and budgets are put back."""

from __future__ import annotations

import os

import pytest
import torch
import torch._functorch.config

from lowtide.compat.compiling import compiling_afresh
from lowtide.compat.dynamo import activation_budget


def test_a_budget_holds_while_the_block_lasts() -> None:
    before = torch._functorch.config.activation_memory_budget
    with activation_budget(0.25):
        assert torch._functorch.config.activation_memory_budget == 0.25
    assert torch._functorch.config.activation_memory_budget == before


def test_caches_on_disk_are_new_ones_unless_the_old_may_be_used() -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with compiling_afresh():
        place = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        assert place != before
        assert os.path.isdir(place)
    assert not os.path.exists(place)
    with compiling_afresh(from_cache=True):
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_what_was_compiled_before_and_in_the_block_is_forgotten() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        compiled.append(1)
        return graph.forward

    run = torch.compile(torch.exp, backend=backend)
    run(torch.ones(1))
    with compiling_afresh(from_cache=True):
        run(torch.ones(1))
        assert len(compiled) == 2
    run(torch.ones(1))
    assert len(compiled) == 3


def test_an_error_in_the_block_is_its_own_and_leaves_nothing_behind() -> None:
    places: list[str] = []

    def fail() -> None:
        with compiling_afresh():
            places.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert not os.path.exists(os.path.dirname(places[0]))
