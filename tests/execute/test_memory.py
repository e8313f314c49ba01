"""Memory that is handed out naively, from a pool or from an arena, and what is counted on the way."""

from __future__ import annotations

import pytest
import torch

from lowtide.arena.buffers import Birth, Buffer
from lowtide.arena.layout import Layout
from lowtide.execute.memory import Address, Direct, Naive, Pool, Static
from lowtide.ir.graph import Tensor

CPU = torch.device("cpu")


def test_a_place_is_seen_as_a_tensor_says() -> None:
    storage = torch.arange(12, dtype=torch.float32).untyped_storage()
    seen = Address(storage, 8).view(Tensor(0, 0, (2, 3), (1, 2), 1, "float32"))
    assert seen.tolist() == [[3.0, 5.0, 7.0], [4.0, 6.0, 8.0]]
    assert seen.untyped_storage().data_ptr() == storage.data_ptr()
    assert Address(storage, 8).is_at(Address(storage, 8))
    assert not Address(storage, 8).is_at(Address(storage, 4))


def test_naive_memory_is_new_for_every_value_and_held_to_the_end_of_the_step() -> None:
    naive = Naive(CPU)
    first = naive.take(Birth(0, 0), 100)
    naive.give(first)
    second = naive.take(Birth(1, 0), 100)
    assert not first.is_at(second)
    assert (naive.tally.requests, naive.tally.allocations, naive.kept_bytes) == (2, 2, 0)
    naive.new_step()
    assert (naive.tally.requests, naive.tally.allocations) == (0, 0)


def test_a_pool_recycles_the_smallest_block_that_is_large_enough() -> None:
    pool = Pool(CPU)
    small, large, larger = (pool.take(Birth(value, 0), size) for value, size in enumerate((100, 150, 190)))
    for place in (larger, small, large):
        pool.give(place)
    assert pool.take(Birth(3, 0), 101).is_at(large)
    assert pool.tally.wasted_bytes == 49
    assert pool.take(Birth(4, 0), 101).is_at(larger)
    assert pool.tally.wasted_bytes == 49 + 89
    assert (pool.tally.requests, pool.tally.allocations, pool.kept_bytes) == (5, 3, 440)


def test_a_block_that_is_far_too_large_is_left_for_others_and_free_pieces_are_counted() -> None:
    pool = Pool(CPU)
    blocks = [pool.take(Birth(value, 0), 300) for value in range(2)]
    for place in blocks:
        pool.give(place)
    assert not any(pool.take(Birth(2, 0), 149).is_at(place) for place in blocks)
    assert pool.tally.fragmented_bytes == 600  # free, and not used
    assert pool.take(Birth(3, 0), 150).storage.nbytes() == 300
    assert pool.take(Birth(4, 0), 1000).storage.nbytes() == 1000
    assert pool.tally.fragmented_bytes == 600  # 300 free bytes would not have been enough for 1000


def test_what_outlived_a_step_is_recycled_in_the_next() -> None:
    pool = Pool(CPU)
    gradient = pool.take(Birth(0, 0), 64)
    pool.new_step()
    assert pool.take(Birth(0, 0), 64).is_at(gradient)
    assert (pool.tally.allocations, pool.kept_bytes) == (0, 64)


def test_an_arena_is_allocated_once_and_every_value_has_its_place() -> None:
    buffers = (Buffer(0, 64, 0, 2, (Birth(5, 0),)), Buffer(1, 128, 1, 3, (Birth(6, 0), Birth(5, 1))))
    static = Static(CPU, Layout("by hand", 64, buffers, (0, 64), 192, 192, True))
    static.new_step()
    assert static.take(Birth(5, 0), 60).offset_bytes == 0
    assert static.take(Birth(6, 0), 128).is_at(static.take(Birth(5, 1), 128))
    assert static.arena.nbytes() == static.kept_bytes == 192
    assert (static.tally.requests, static.tally.allocations) == (3, 0)


def test_where_kernels_take_memory_themselves_there_is_none_to_hand_out() -> None:
    with pytest.raises(AssertionError, match="themselves"):
        Direct(CPU).take(Birth(0, 0), 1)
