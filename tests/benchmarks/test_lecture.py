"""The lecture's experiments in small: networks, what is counted, every scheme, fits and reports."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benchmarks.lecture import lecture
from benchmarks.lecture.fits import Curve, exponent, fitted
from benchmarks.lecture.graphs import NETWORKS, by_roofline, features_only, gradient_sums
from benchmarks.lecture.models import PreResNet, lstm, resnet, stages
from benchmarks.lecture.report import report
from benchmarks.lecture.runs import eager, measured
from benchmarks.lecture.schemes import SCHEMES, Scheme, cost_curve, estimated, lowest_for, planned
from benchmarks.planner.training_graphs import residual
from torch import nn

import lowtide
from lowtide.errors import BadFile, BadRequest
from lowtide.execute.memory import Memory
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.refereed import extra_seconds


@lru_cache
def captured(network: str) -> Graph:
    """The smallest ResNet and a short LSTM, priced."""
    with torch.device("meta"):
        made = small(network)
    return by_roofline(lowtide.capture(made.model, made.example, device="cpu", name=made.name))


def small(network: str) -> Any:
    if network == "resnet":
        return resnet(14, batch=2, image=32, classes=10)
    return lstm(6, batch=2, layers=2, width=8, inputs=3, classes=5)


# Networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [50, 101, 152, 200, 302, 500, 1001])
def test_a_resnet_has_as_many_layers_as_it_says(depth: int) -> None:
    with torch.device("meta"):
        model = PreResNet(stages(depth), 10)
    shortcuts = {f"{name}.shortcut" for name, _ in model.named_modules()}
    counted = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear) and name not in shortcuts
    ]
    assert len(counted) == depth


def test_stages_are_as_published_and_beyond_that_in_the_same_proportions() -> None:
    assert stages(50) == (3, 4, 6, 3)
    assert stages(200) == (3, 24, 36, 3)
    assert stages(1001) == (15, 121, 182, 15)
    assert stages(14) == (1, 1, 1, 1)


def test_the_lstm_has_a_loss_at_every_step_and_one_number_in_the_end() -> None:
    losses = [op for op in captured("lstm").ops if op.target == "aten.nll_loss_forward.default"]
    assert len(losses) == 6
    made = lstm(6, batch=2, layers=2, width=8, inputs=3, classes=5)
    assert isinstance(made.example, tuple)
    assert made.model(*made.example).shape == ()


# What is counted ------------------------------------------------------------------------------------------


def test_gradients_and_the_sums_on_the_way_to_them_weigh_nothing() -> None:
    graph = captured("lstm")
    summed = gradient_sums(graph)
    # Six matrices or more are multiplied at each of six steps; each product but the first is added to a sum.
    weight = next(value for value in graph.values if value.name == "cells.1.hidden.weight")
    like = [value for value in summed if graph.values[value].bytes == weight.bytes]
    assert {value for value in graph.outputs if graph.values[value].role == "gradient"} <= summed
    assert len(like) >= 2 * 6 - 1
    bare = features_only(graph)
    assert all(bare.counted_bytes(value) == 0 for value in summed)
    assert simulate(bare, straight(bare)).growth_bytes < simulate(graph, straight(graph)).growth_bytes


def test_a_roofline_takes_the_slowest_of_three() -> None:
    with torch.device("meta"):
        model, batch = nn.Linear(4096, 4096, bias=False), torch.empty(4096, 4096)
    graph = by_roofline(lowtide.capture(model, batch, lambda out: out.sum(), device="cuda"))
    seconds = {op.target: op.seconds for op in graph.ops}
    assert seconds["aten.mm.default"] == 2 * 4096**3 / 50e12  # products
    assert seconds["aten.sum.default"] == (4 * 4096**2 + 4) / 4e12  # bytes
    assert min(seconds.values()) >= 3e-6  # a launch


# Schemes --------------------------------------------------------------------------------------------------


@lru_cache
def rows(network: str) -> dict[str, dict[str, Any]]:
    graph = captured(network)
    size = 14 if network == "resnet" else 6
    found = {}
    for scheme in SCHEMES:
        if network in scheme.networks:
            found[scheme.name] = estimated(
                scheme, graph, planned(scheme, features_only(graph), network, size)
            )
    return found


@pytest.mark.parametrize("network", ["resnet", "lstm"])
def test_schemes_take_less_and_less(network: str) -> None:
    taken = {name: row["feature_bytes"] for name, row in rows(network).items()}
    assert taken["no optimisation"] > taken["in-place"] > taken["sharing"] > taken["√n"]
    for name, row in rows(network).items():
        assert row["live_bytes"] <= row["growth_bytes"]
        if name not in ("no optimisation", "in-place"):
            assert row["arena_least_bytes"] <= row["arena_bytes"]
    assert rows(network)["ours, min"]["live_bytes"] <= rows(network)["√n"]["live_bytes"]


@pytest.mark.parametrize("network", ["resnet", "lstm"])
def test_without_any_optimisation_every_value_has_memory_of_its_own(network: str) -> None:
    graph = features_only(captured(network))
    made = sum(graph.counted_bytes(value) for value in graph.creator)
    assert rows(network)["no optimisation"]["feature_bytes"] == made


def test_only_what_recomputes_costs_time() -> None:
    for network in ("resnet", "lstm"):
        costs = {name: row["extra_time"] for name, row in rows(network).items()}
        assert costs["no optimisation"] == costs["in-place"] == costs["sharing"] == 0
        assert 0 < costs["√n"] < costs["recursive"]
        assert costs["ours, +30 % time"] <= 0.3
    assert rows("resnet")["drop bn-relu"]["extra_time"] > 0
    assert "drop bn-relu" not in rows("lstm")


@pytest.mark.parametrize("more_time", [0.0, 0.1, 0.3, 5.0])
def test_the_lowest_for_some_time_costs_no_more_than_that(more_time: float) -> None:
    graph = residual(6)
    schedule = lowest_for(graph, more_time)
    assert extra_seconds(graph, schedule) <= more_time * sum(op.seconds for op in graph.ops)
    assert (schedule == straight(graph)) == (more_time == 0)


def test_a_schedule_that_was_searched_for_is_kept(tmp_path: Path) -> None:
    graph = residual(3)
    ours = next(scheme for scheme in SCHEMES if scheme.name == "ours, min")
    first = planned(ours, graph, "lstm", 3, tmp_path / "kept.json")
    never = Scheme("never", lambda *_: pytest.fail("planned again"), is_searched=True)
    assert planned(never, graph, "lstm", 3, tmp_path / "kept.json") == first
    (tmp_path / "kept.json").write_text("{}")
    with pytest.raises(BadFile, match=r"kept\.json"):
        planned(ours, graph, "lstm", 3, tmp_path / "kept.json")


def test_a_schedule_by_rule_is_not_kept(tmp_path: Path) -> None:
    graph = residual(3)
    rule = next(scheme for scheme in SCHEMES if scheme.name == "√n")
    assert planned(rule, graph, "lstm", 4, tmp_path / "kept.json").schedule != straight(graph)
    assert not list(tmp_path.iterdir())


def test_the_cost_curve_begins_with_the_straight_schedule() -> None:
    graph = residual(8)
    curve = dict(cost_curve(graph, [1, 3]))
    assert curve[1] == simulate(features_only(graph), straight(graph)).growth_bytes
    assert curve[3] < curve[1]


# Running --------------------------------------------------------------------------------------------------


def test_steps_are_run_and_measured() -> None:
    torch.manual_seed(0)
    made, graph = small("lstm"), captured("lstm")
    plain = eager(made, graph)
    static = measured(made, graph, straight(graph), Memory.STATIC, "auto")
    in_place = measured(made, graph, straight(graph), Memory.STATIC, "apart")
    naive = measured(made, graph, straight(graph), Memory.NAIVE, "")
    assert plain["peak_bytes"] == plain["predicted_bytes"]
    assert static["arena_bytes"] < static["peak_bytes"] < in_place["peak_bytes"] < naive["peak_bytes"]
    assert all(row["seconds"] > 0 for row in (plain, static, in_place, naive))


def test_what_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lecture.runs.room_bytes", lambda device: 1000)
    made, graph = small("lstm"), captured("lstm")
    for row in (eager(made, graph), measured(made, graph, straight(graph), Memory.STATIC, "auto")):
        assert row["skipped"].endswith("there is room for 1000 B")
        assert "peak_bytes" not in row


def test_rows_are_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cuda", "cpu"):
        lowtide.save_graph(captured("lstm"), tmp_path / f"lstm-6-{device}.json")
    monkeypatch.setitem(cast(Any, NETWORKS), "lstm", lambda length: small("lstm"))
    rows_file = tmp_path / "rows.json"

    def rows_after(*words: str) -> list[dict[str, Any]]:
        asked = [
            "--rows",
            str(rows_file),
            "--cache",
            str(tmp_path),
            "--only",
            "lstm",
            "--lengths",
            "6",
            *words,
        ]
        monkeypatch.setattr("sys.argv", ["lecture.py", *asked])
        lecture.main()
        return list(json.loads(rows_file.read_text())["rows"])

    assert [row["label"] for row in rows_after("--schemes", "sharing,√n")] == ["sharing", "√n"]
    first = rows_after()
    assert len(first) == 7
    assert rows_after() == first
    (curve,) = (row for row in rows_after("--curves") if row["kind"] == "curve")
    assert curve["points"][0] == [1, first[0]["live_bytes"]]
    rows_file = tmp_path / "measured.json"
    made = rows_after("--measure", "--schemes", "no opt,in-place,sharing")
    assert [row["label"] for row in made] == ["PyTorch, eager", "no optimisation", "in-place", "sharing"]
    assert all("seconds" in row and "skipped" not in row for row in made)


# Fits -----------------------------------------------------------------------------------------------------


def test_exponents_are_slopes_on_log_axes() -> None:
    assert exponent([(n, 3 * n) for n in (10, 20, 70)]) == pytest.approx(1)
    assert exponent([(n, 5 * math.sqrt(n)) for n in (10, 20, 70)]) == pytest.approx(0.5)


def test_the_curve_of_segments_is_found_again() -> None:
    meant = Curve(values=100.0, crossings=0.25, always=3.0)
    found = fitted([(k, meant.at(k)) for k in (1, 2, 5, 10, 50, 200)])
    assert [found.values, found.crossings, found.always] == pytest.approx([100, 0.25, 3])
    assert meant.lowest == 20
    assert meant.at(20) == 100 / 20 + 0.25 * 20 + 3


# Reports --------------------------------------------------------------------------------------------------


def document(kinds: str) -> dict[str, Any]:
    names = ("device", "torch", "python", "commit", "date", "command")
    return {"machine": {name: f"the {name}" for name in names}, "rows": [*_rows(kinds)]}


def _rows(kinds: str) -> Any:
    for network in ("resnet", "lstm"):
        for times in (1, 2, 4) if "estimated" in kinds else ():
            for label, row in rows(network).items():
                scaled = {key: times * value if value else value for key, value in row.items()}
                what = {"kind": "estimated", "network": network, "size": 10 * times, "label": label}
                yield {**scaled, "seconds_from": "thin air", **what}
        for times in (1, 2) if "measured" in kinds else ():
            what = {"kind": "measured", "network": network, "size": 10 * times}
            yield {
                **what,
                "label": "PyTorch, eager",
                "peak_bytes": 10**9,
                "seconds": 1.5,
                "memory": "PyTorch's",
            }
            yield {**what, "label": "sharing", "skipped": "too large for anybody"}
    if "curve" in kinds:
        points = [[k, round(1e9 / k + 1e7 * k)] for k in (1, 5, 10, 20)]
        yield {"kind": "curve", "network": "chain", "size": 100, "label": "segments", "points": points}


def test_a_report_has_tables_and_pictures_of_all_that_is_there(tmp_path: Path) -> None:
    report([document("estimated curve"), document("measured")], tmp_path / "lecture.md")
    text = (tmp_path / "lecture.md").read_text()
    assert "| √n |" in text
    assert "slope" in text
    assert "| sharing | 1.00 | 1.00 |" in text  # each size is a multiple of the first
    assert "too large for anybody" in text
    assert "| 100 equal layers | 10 | 0.2 | 0.2 | 10 | 1 | 10 | " in text
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {f"lecture-{what}.png" for what in ("resnet", "lstm", "time", "segments")}
    assert all(f"]({name})" in text for name in pictures)


def test_a_report_of_estimates_alone_has_no_times(tmp_path: Path) -> None:
    report([json.loads(json.dumps(document("estimated")))], tmp_path / "lecture.md")
    assert {path.name for path in tmp_path.glob("*.png")} == {"lecture-resnet.png", "lecture-lstm.png"}


# Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [11, 51, 1000])
def test_a_depth_that_no_such_resnet_has_is_refused(depth: int) -> None:
    with pytest.raises(BadRequest, match=rf"has 3n \+ 2 layers, 14 or more \(50, 1001\), not {depth}\."):
        stages(depth)
