"""Files of graphs in slices: they come back to the last bit, and nothing else gets in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import BadFile, MalformedGraph
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.validate import validate
from lowtide.solvers.files import load_graph, load_solution, save_graph, save_solution
from lowtide.solvers.solution import GraphSolution
from tests.helpers.editable import editable
from tests.helpers.handmade import solved, three_layers
from tests.helpers.slices import in_slices, two_layers
from tests.solvers.test_files import ONE_OF_EACH, Place, at, changed, fits, places, refusal_of


def tiled() -> Graph:
    return in_slices(two_layers(), 2)


# By hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_a_graph_in_slices_comes_back_as_it_was(ahead: bool, tmp_path: Path) -> None:
    graph = in_slices(two_layers(), 4, ahead)
    save_graph(graph, tmp_path / "graph.json", straight(graph))
    loaded, schedule = load_graph(tmp_path / "graph.json")
    assert loaded == graph
    assert loaded.tiled == graph.tiled
    assert fits(loaded, Graph)
    assert schedule == straight(graph)


def test_a_solution_in_slices_comes_back_as_it_was(tmp_path: Path) -> None:
    solution = solved(tiled(), straight(tiled()))
    save_solution(solution, tmp_path / "plan.json")
    loaded = load_solution(tmp_path / "plan.json")
    assert isinstance(loaded, GraphSolution)
    assert (loaded, loaded.graph.tiled) == (solution, solution.graph.tiled)
    assert str(loaded) == str(solution)


def test_only_documents_with_slices_are_of_the_third_schema(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for graph, schema in ((tiled(), 3), (two_layers(), 1), (three_layers(), 1)):
        save_graph(graph, path)
        assert json.loads(path.read_text())["schema"] == schema
        assert ("tiled" in json.loads(path.read_text())["graph"]) == (schema == 3)
        save_solution(solved(graph, straight(graph)), path)
        assert json.loads(path.read_text())["schema"] == schema


# Refusals --------------------------------------------------------------------------------------------


@pytest.fixture
def document(tmp_path: Path) -> Any:
    save_graph(tiled(), tmp_path / "whole.json", straight(tiled()))
    return editable(tmp_path / "whole.json")


def of_slices(document: Any) -> list[Place]:
    """Where the fields are that a plain graph has not, and the plain graph as a whole."""
    found = (place for place in places(document) if place[:2] == ("graph", "tiled"))
    return [place for place in found if len(place) < 4 or place[2] != "plain"]


def test_every_field_of_another_type_is_refused(document: Any, tmp_path: Path) -> None:
    tried, accepted = 0, []
    for place in of_slices(document):
        own = type(at(document, place)).__name__
        for kind, content in ONE_OF_EACH.items():
            if kind != own:
                tried += 1
                if refusal_of(changed(document, place, content), tmp_path / "graph.json") is None:
                    accepted.append((place, kind))
    assert accepted == []
    assert tried > 300


def test_every_missing_field_is_refused(document: Any, tmp_path: Path) -> None:
    tried = 0
    for place in of_slices(document):
        holder = at(document, place[:-1])
        if isinstance(holder, dict) and place != ("graph", "tiled"):
            without = {name: field for name, field in holder.items() if name != place[-1]}
            refused = refusal_of(changed(document, place[:-1], without), tmp_path / "graph.json")
            assert refused is not None, place
            assert refused.reason == f"{'.'.join(map(str, place[:-1]))} has no '{place[-1]}'".replace(
                ".blocks.", ".blocks["
            ).replace(" has", "] has" if "blocks" in place[:-1] else " has")
            tried += 1
    assert tried == 3 + 7 * 4


@pytest.mark.parametrize(
    ("place", "content", "reason"),
    [
        (
            ("blocks", 1, "first"),
            6,
            "the block at op 6 ('layers.1') ends at op 14, and the one",
        ),
        (("blocks", 0, "stop"), 0, "the block at op 0 ('layers.0') ends at op 0, and the one"),
        (("blocks", 3, "stop"), 99, "the block at op 24 ('layers.0') ends at op 99"),
        (("blocks", 1, "stop"), 15, "the block at op 7 ('layers.1') has an op in it that is not sliced"),
        (
            ("blocks", 0, "count"),
            1,
            "the block at op 0 ('layers.0') has 1 slices of 8, and spares",
        ),
        (
            ("blocks", 0, "count"),
            9,
            "the block at op 0 ('layers.0') has 9 slices of 8, and spares",
        ),
        (
            ("blocks", 0, "spared_bytes"),
            -1,
            "the block at op 0 ('layers.0') has 2 slices of 8, and spares -",
        ),
        (("blocks", 0, "ops"), [0, 2], "not every op of the plain graph is there once"),
        (("blocks", 0, "ops"), [0, 2, 4, 4], "not every op of the plain graph is there once"),
        (("blocks", 0, "ops"), [0, 2, 4, 99], "not every op of the plain graph is there once"),
        (("origin", 14), 0, "not every op of the plain graph is there once"),
        (("origin", 0), 6, "the block at op 0 ('layers.0') has an op in it that is not sliced"),
        (("origin",), [], "32 ops have 0 origins"),
        (("plain", "device"), "cuda:0", "slices on cpu are of a graph on cuda:0"),
        (("plain", "ops", 6, "target"), "aten.sub.Tensor", "op 14 (aten.add) is not op 6 (aten.sub), which"),
        (("plain", "ops", 0, "seconds"), -1.0, "op 0 (layers.0: aten.mm) costs"),
        (("plain", "values", 0, "name"), "y", "value 0 ('y') is another than before there were slices"),
        (("plain", "values", 0, "bytes"), 65, "value 0 ('x') is another than before there were slices"),
        (("plain", "tiled"), 3, "graph.tiled.plain.tiled should be an object"),
    ],
)
def test_slices_that_cannot_be_are_refused_and_named(
    document: Any, place: Place, content: Any, reason: str, tmp_path: Path
) -> None:
    refusal = refusal_of(changed(document, ("graph", "tiled", *place), content), tmp_path / "graph.json")
    assert refusal is not None
    assert refusal.reason.startswith(reason)


def test_slices_of_slices_are_refused(document: Any, tmp_path: Path) -> None:
    inner = changed(document, ("graph", "tiled", "plain"), document["graph"])
    refusal = refusal_of(inner, tmp_path / "graph.json")
    assert refusal is not None
    assert refusal.reason == "what a graph was before it was cut into slices is cut into slices itself"


def test_values_that_are_gone_are_refused() -> None:
    graph = tiled()
    assert graph.tiled is not None
    plain = graph.tiled.plain
    same = (*plain.values, *graph.values[len(plain.values) :])
    plain = replace(plain, values=(*same, replace(same[0], id=len(same))))
    with pytest.raises(MalformedGraph, match="values are missing that were there before there were slices"):
        validate(replace(graph, tiled=replace(graph.tiled, plain=plain)))


@pytest.mark.parametrize("tenth", range(10))
def test_a_file_cut_off_anywhere_is_refused(tenth: int, tmp_path: Path) -> None:
    save_graph(tiled(), tmp_path / "graph.json")
    whole = (tmp_path / "graph.json").read_bytes()
    (tmp_path / "graph.json").write_bytes(whole[: len(whole) * tenth // 10])
    with pytest.raises(BadFile, match="it is not JSON"):
        load_graph(tmp_path / "graph.json")
