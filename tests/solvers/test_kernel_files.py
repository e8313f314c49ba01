"""Files of graphs of kernels: they come back to the last bit, and nothing else gets in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import BadFile, MalformedGraph
from lowtide.fusion.fuse import Treatment, fused, steps_of_ops
from lowtide.ir.graph import Graph, Op
from lowtide.ir.schedule import straight
from lowtide.ir.validate import validate
from lowtide.solvers.files import load_graph, load_solution, save_graph, save_solution
from lowtide.solvers.solution import GraphSolution
from tests.helpers.editable import editable
from tests.helpers.handmade import graphs, solved, three_layers
from tests.helpers.slices import in_slices, two_layers
from tests.solvers.test_files import ONE_OF_EACH, Place, at, changed, fits, places, refusal_of


def kind_of(graph: Graph, op: Op) -> Treatment:
    whole = op.target.startswith(("aten.mm", "lowtide."))
    return Treatment.WHOLE if whole else Treatment.POINTWISE


def kernels() -> Graph:
    return fused(three_layers(), kind_of)


# By hand ---------------------------------------------------------------------------------------------


def test_a_graph_of_kernels_comes_back_as_it_was(tmp_path: Path) -> None:
    for graph in (kernels(), fused(in_slices(two_layers(), 2), kind_of)):
        save_graph(graph, tmp_path / "graph.json", straight(graph))
        loaded, schedule = load_graph(tmp_path / "graph.json")
        assert (loaded, loaded.fused) == (graph, graph.fused)
        assert fits(loaded, Graph)
        assert schedule is not None
        assert steps_of_ops(loaded, schedule) == steps_of_ops(graph, straight(graph))


def test_a_solution_for_kernels_comes_back_as_it_was(tmp_path: Path) -> None:
    solution = solved(kernels(), straight(kernels()))
    save_solution(solution, tmp_path / "plan.json")
    loaded = load_solution(tmp_path / "plan.json")
    assert isinstance(loaded, GraphSolution)
    assert (loaded, loaded.graph.fused) == (solution, solution.graph.fused)
    assert str(loaded) == str(solution)


def test_only_documents_with_kernels_are_of_the_fourth_schema(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for graph, schema in ((kernels(), 4), (in_slices(two_layers(), 2), 3), (three_layers(), 1)):
        save_graph(graph, path)
        assert json.loads(path.read_text())["schema"] == schema
        assert ("fused" in json.loads(path.read_text())["graph"]) == (schema == 4)
        save_solution(solved(graph, straight(graph)), path)
        assert json.loads(path.read_text())["schema"] == schema


# Properties ------------------------------------------------------------------------------------------


@given(graphs(6), st.lists(st.sampled_from(Treatment), min_size=6, max_size=6))
def test_any_graph_of_kernels_comes_back(
    tmp_path_factory: pytest.TempPathFactory, graph: Graph, kinds: list[Treatment]
) -> None:
    path = tmp_path_factory.getbasetemp() / "kernels.json"
    found = fused(graph, lambda _, op: kinds[op.id])
    save_graph(found, path)
    loaded, _ = load_graph(path)
    assert (loaded, loaded.fused) == (found, found.fused)


# Refusals --------------------------------------------------------------------------------------------


@pytest.fixture
def document(tmp_path: Path) -> Any:
    save_graph(kernels(), tmp_path / "whole.json", straight(kernels()))
    return editable(tmp_path / "whole.json")


def of_kernels(document: Any) -> list[Place]:
    """Where the fields are that a plain graph has not, and the plain graph as a whole."""
    found = (place for place in places(document) if place[:2] == ("graph", "fused"))
    return [place for place in found if len(place) < 4 or place[2] != "plain"]


def test_every_field_of_another_type_is_refused(document: Any, tmp_path: Path) -> None:
    tried, accepted = 0, []
    for place in of_kernels(document):
        own = type(at(document, place)).__name__
        for kind, content in ONE_OF_EACH.items():
            if kind != own:
                tried += 1
                if refusal_of(changed(document, place, content), tmp_path / "graph.json") is None:
                    accepted.append((place, kind))
    assert accepted == []
    assert tried > 60


@pytest.mark.parametrize("field", ["plain", "members", "written"])
def test_every_missing_field_is_refused(field: str, document: Any, tmp_path: Path) -> None:
    fields = {name: each for name, each in document["graph"]["fused"].items() if name != field}
    refused = refusal_of(changed(document, ("graph", "fused"), fields), tmp_path / "graph.json")
    assert refused is not None
    assert refused.reason == f"graph.fused has no '{field}'"


@pytest.mark.parametrize(
    ("place", "content", "reason"),
    [
        (("members",), [], "5 kernels have 0 lists of ops"),
        (("members", 0), [], "op 0 (stem: aten.mm) stands for ops [], which are not all in the plain graph"),
        (
            ("members", 0),
            [6],
            "op 0 (stem: aten.mm) stands for ops [6], which are not all in the plain graph",
        ),
        (("members", 0), [-1], "op 0 (stem: aten.mm) stands for ops [-1], which are not all in the"),
        (
            ("members", 4),
            [0],
            "op 4 (stem: aten.mm) makes value 7, which op 0 (stem: aten.mm) of",
        ),
        (("members", 0), [1, 0], "op 0 (stem: aten.mm) stands for ops [1, 0], which are not in order"),
        (
            ("members", 3),
            [2],
            "op 3 (layers.1: lowtide.kernel) makes value 6, which op 2 (layers.1: aten.relu)",
        ),
        (("members",), [[0], [1], [3], [4], [5]], "op 2 (layers.1: aten.relu) of the plain graph is in no"),
        (("written",), [6], "op 6 is to be written, which is not in the plain graph"),
        (("plain", "device"), "cuda:0", "kernels on cpu are of a graph on cuda:0"),
        (("plain", "ops", 0, "seconds"), -1.0, "op 0 (stem: aten.mm) costs 0 bytes of workspace and -1"),
        (("plain", "values", 0, "name"), "y", "value 0 ('y') is another than before there were kernels"),
        (("plain", "values", 0, "bytes"), 51, "value 0 ('weight') is another than before there were kernels"),
    ],
)
def test_kernels_of_other_ops_are_refused(
    place: Place, content: Any, reason: str, document: Any, tmp_path: Path
) -> None:
    refusal = refusal_of(changed(document, ("graph", "fused", *place), content), tmp_path / "graph.json")
    assert refusal is not None
    assert refusal.reason.startswith(reason)


def test_kernels_of_kernels_and_slices_beside_kernels_are_refused() -> None:
    graph = kernels()
    assert graph.fused is not None
    inner = replace(graph.fused, plain=replace(graph.fused.plain, fused=graph.fused))
    with pytest.raises(MalformedGraph, match="before there were kernels has kernels itself"):
        validate(replace(graph, fused=inner))
    sliced = in_slices(two_layers(), 2)
    with pytest.raises(MalformedGraph, match="or slices beside them"):
        validate(replace(sliced, fused=inner))


def test_values_that_are_gone_are_refused() -> None:
    graph = kernels()
    assert graph.fused is not None
    plain = graph.fused.plain
    plain = replace(plain, values=(*plain.values, replace(plain.values[0], id=len(plain.values))))
    with pytest.raises(MalformedGraph, match="values are missing, or new, where ops became kernels"):
        validate(replace(graph, fused=replace(graph.fused, plain=plain)))


@pytest.mark.parametrize("tenth", range(10))
def test_a_file_cut_off_anywhere_is_refused(tenth: int, tmp_path: Path) -> None:
    save_graph(kernels(), tmp_path / "graph.json")
    whole = (tmp_path / "graph.json").read_bytes()
    (tmp_path / "graph.json").write_bytes(whole[: len(whole) * tenth // 10])
    with pytest.raises(BadFile, match="it is not JSON"):
        load_graph(tmp_path / "graph.json")
