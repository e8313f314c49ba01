"""How long a search may be: the promises are the same, the work is less, and every door hands it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.planner.training_graphs import residual
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from lowtide.chain.chain import Chain
from lowtide.cli import main
from lowtide.cli.options import EFFORTS
from lowtide.errors import BadRequest, UnknownMethod
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.solvers import at_effort, solve
from lowtide.solvers.method import Effort, Searcher
from lowtide.solvers.ops import auto
from lowtide.solvers.ops.auto import Auto
from lowtide.solvers.ops.evict import Evict
from lowtide.solvers.ops.search import explore as exploring
from lowtide.solvers.ops.search.encode import costs, work_of
from lowtide.solvers.ops.search.explore import Explorer, explore
from lowtide.solvers.ops.search.pareto import Front
from lowtide.solvers.refereed import extra_seconds
from tests.helpers.effort import examples
from tests.helpers.handmade import graphs
from tests.solvers.test_evict import SECONDS, ladder

# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(25))
@given(graph=graphs(max_ops=12, seconds=SECONDS), method=st.sampled_from([Auto("quick"), Evict("quick")]))
def test_after_a_quick_search_too_more_budget_never_costs_more_time(graph: Graph, method: Searcher) -> None:
    plain = simulate(graph, straight(graph))
    before: float | None = None
    for step in range(11):
        budget = plain.resident_bytes + plain.growth_bytes * step // 10
        answer = method.within(graph, budget)
        assert answer is not None or before is None
        if answer is not None:
            assert simulate(graph, answer.schedule).peak_bytes <= budget
            seconds = extra_seconds(graph, answer.schedule)
            assert before is None or seconds <= before
            before = seconds
    assert before == 0.0


def test_a_quick_search_does_a_small_part_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Explorer] = []

    class Counted(Explorer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(exploring, "Explorer", Counted)
    graph = residual(8)
    for effort in (Effort.FULL, Effort.QUICK):
        explore(work_of(graph), costs(graph), effort=effort)
    full, quick = (explorer.slots.spent[0] for explorer in made)
    assert 0 < 8 * quick < full


# Every door ------------------------------------------------------------------------------------------


@pytest.fixture
def efforts(monkeypatch: pytest.MonkeyPatch) -> list[Effort]:
    """What the searches of auto are told."""
    told: list[Effort] = []

    def listen(work: Any, costs: Any, starts: Any, effort: Effort) -> Front:
        told.append(effort)
        return explore(work, costs, starts, effort)

    monkeypatch.setattr(auto, "explore", listen)
    return told


def model() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers), torch.ones(64, 16)


def test_solve_hands_it_on(efforts: list[Effort]) -> None:
    solve(ladder(5), "auto", "90%", effort="quick")
    solve(ladder(6), "auto", "90%")
    solve(ladder(7), Auto("quick"), "90%")
    assert efforts == [Effort.QUICK, Effort.FULL, Effort.QUICK]


def test_plan_and_optimize_hand_it_on(efforts: list[Effort]) -> None:
    net, batch = model()
    lowtide.plan(net, batch, loss=torch.sum, budget="95%", effort="quick", profile=False)
    lowtide.optimize(net, batch[:32], loss=torch.sum, budget="95%", effort="quick", profile=False)
    assert efforts == [Effort.QUICK, Effort.QUICK]


def test_the_command_hands_it_on(
    efforts: list[Effort], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\ndef four(batch=64):\n"
        "    with torch.device('meta'):\n"
        "        parts = [part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())]\n"
        "        return nn.Sequential(*parts), (torch.ones(batch, 16),), torch.sum\n"
    )
    for more in (["--budget", "95%"], ["--frontier", "--batch", "32"]):
        command = ["plan", "mine.py:four", "--device", "cuda", "--no-profile", "--effort", "quick", *more]
        assert CliRunner().invoke(main, command).exit_code == 0
    assert efforts == [Effort.QUICK, Effort.QUICK]


def test_the_command_knows_every_effort() -> None:
    assert list(EFFORTS) == list(Effort)


# Refusals -------------------------------------------------------------------------------------------


def test_an_effort_that_there_is_not_is_refused() -> None:
    for refused in (lambda: Auto("hasty"), lambda: solve(ladder(), effort="hasty")):
        with pytest.raises(BadRequest, match="no effort 'hasty'; it is one of full, quick"):
            refused()


@pytest.mark.parametrize("method", ["exact", "rotor", Auto()])
def test_what_does_not_search_or_was_told_before_takes_no_effort(method: Any) -> None:
    with pytest.raises(BadRequest, match=r"plans op by op \(evict, auto\)"):
        at_effort(method, "quick")


def test_neither_does_a_chain() -> None:
    with pytest.raises(BadRequest, match="this is hong-linear"):
        solve(Chain.from_sizes([1] * 6), effort="quick")


def test_a_method_that_there_is_not_is_not_known_at_any_effort() -> None:
    with pytest.raises(UnknownMethod):
        at_effort("autto", "quick")
