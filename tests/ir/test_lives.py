"""Lives: who is alive when, and that all of them together are what the referee counts."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from lowtide.ir.graph import Graph
from lowtide.ir.lives import Life, lives
from lowtide.ir.schedule import Compute, Schedule, straight
from lowtide.ir.simulate import CATEGORIES, CUDA, Category, simulate
from tests.helpers.handmade import graphs
from tests.helpers.layouts import stepped
from tests.helpers.reported import small


def test_a_value_that_is_made_twice_has_two_lives() -> None:
    solution = small()
    found = lives(solution.graph, solution.schedule)
    assert found == (
        Life(0, 0, 0, 12, 50, Category.PARAMETERS),
        Life(1, 0, 0, 12, 100, Category.BATCH),
        Life(2, 0, 0, 2, 1000, Category.TEMPORARIES),  # no backward op sees it
        Life(3, 0, 1, 10, 400, Category.ACTIVATIONS),
        Life(4, 0, 3, 6, 300, Category.ACTIVATIONS),
        Life(5, 0, 4, 12, 4, Category.ACTIVATIONS),
        Life(6, 0, 5, 9, 300, Category.TEMPORARIES),
        Life(2, 1, 7, 11, 1000, Category.ACTIVATIONS),
        Life(7, 0, 8, 12, 50, Category.GRADIENTS),
    )


def test_sizes_are_rounded_as_the_allocator_rounds() -> None:
    solution = small()
    rounded = [life.bytes for life in lives(solution.graph, solution.schedule, CUDA)]
    assert rounded == [512, 512, 1024, 512, 512, 512, 512, 1024, 512]


def added_up(graph: Graph, schedule: Schedule) -> np.ndarray:
    stack = np.zeros((len(schedule), len(CATEGORIES)), dtype=np.int64)
    for life in lives(graph, schedule):
        stack[life.first : life.stop, CATEGORIES.index(life.category)] += life.bytes
    for position, step in enumerate(schedule):
        if isinstance(step, Compute):
            stack[position, CATEGORIES.index(Category.WORKSPACE)] += graph.ops[step.op].workspace_bytes
    return stack


@given(stepped())
def test_lives_add_up_to_the_timeline_where_ops_run_again(drawn: tuple[Graph, Schedule]) -> None:
    graph, schedule = drawn
    assert np.array_equal(added_up(graph, schedule), simulate(graph, schedule).stack)


@given(graphs())
def test_lives_add_up_to_the_timeline_in_any_graph(graph: Graph) -> None:
    assert np.array_equal(added_up(graph, straight(graph)), simulate(graph, straight(graph)).stack)
