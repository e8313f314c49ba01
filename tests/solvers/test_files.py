"""Graph files: what is written comes back to the last bit, and nothing else gets in."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import pickle
import stat
import tempfile
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BadFile, MalformedGraph
from lowtide.ir.assumptions import Finding, GradientLayouts, NodesBetween, NoGradient, UseByUse
from lowtide.ir.graph import Arg, Graph, Op, Origin, Phase, Ref, Role, Signs, Symbol
from lowtide.ir.schedule import KINDS, Compute, Free, Schedule, Step, straight
from lowtide.ir.validate import validate
from lowtide.solvers.files import load_graph, load_solution, save_graph, save_solution
from lowtide.solvers.solution import GraphSolution, Status
from lowtide.text.documents import write_text
from tests.helpers.editable import editable
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, chain, graphs, solved, steps, three_layers

# Telling equal from nearly equal ---------------------------------------------------------------------


def to_the_last_bit(graph: Graph) -> tuple[str, list[int]]:
    """Equal for graphs that are equal in every type and bit: True is not 1, -0.0 is not 0.0, nan is nan."""
    return repr(replace(graph, outputs=frozenset())), sorted(graph.outputs)


@functools.cache
def fields_of(kind: Any) -> dict[str, Any]:
    if not is_dataclass(kind):
        return {}
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def fits(thing: Any, hint: Any) -> bool:
    """Whether `thing` is, to every depth, exactly of the type its annotation promises."""
    if isinstance(hint, str | typing.ForwardRef):
        return fits(thing, Arg)  # the only type that names itself
    if hint is Step:
        return any(fits(thing, kind) for kind in KINDS.values())
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(fits(thing, choice) for choice in inner)
    if typing.get_origin(hint) is tuple and inner[-1] is not Ellipsis:
        return isinstance(thing, tuple) and len(thing) == len(inner) and all(map(fits, thing, inner))
    if kind := typing.get_origin(hint):
        return type(thing) is kind and all(fits(item, inner[0]) for item in thing)
    same = type(thing) is hint
    return same and all(fits(getattr(thing, name), field) for name, field in fields_of(hint).items())


def test_the_type_check_itself_tells_types_apart() -> None:
    assert fits(oddities(), Graph)
    op = chain().ops[0]
    strange: list[Any] = [True, 1.0, None, "1"]
    assert not any(fits(replace(op, call=wrong), Op) for wrong in strange)
    assert not any(fits(replace(op, reads=(wrong,)), Op) for wrong in strange)
    listed: Any = [1]
    assert not fits(replace(op, reads=listed), Op)
    assert not fits(replace(op, args=((listed,),)), Op)
    assert not fits(replace(chain(), outputs=listed), Graph)
    assert fits(steps(0, "f1"), Schedule)
    assert not any(fits(Schedule((Compute(wrong),)), Schedule) for wrong in strange)


# By hand --------------------------------------------------------------------------------------------


SCALAR_ODDITIES = (None, True, 1, 1.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 2**200, "")


def oddities() -> Graph:
    """Every kind of argument and field that a file must carry."""
    drawing = Drawing("cuda:0")
    x = drawing.value("données ☃", 8, Role.BATCH, device="cpu")
    y = drawing.value('"quoted"\n\x00', 2**62, Role.OPTIMIZER_STATE, module="a.b")
    drawing.op(
        "aten.odd.default",
        [x],
        [y],
        [x],
        extra=(*SCALAR_ODDITIES, (), ((Ref(0),), ((),))),
        keywords={
            "out_dtype": Symbol("dtype", "float32"),
            "x": (Ref(0), Symbol("device", "cuda:0")),
            "": None,
        },
        phase=Phase.OPTIMIZER,
        random=True,
        workspace=3,
        seconds=5e-324,
    )
    drawing.op("aten.nothing.default")
    graph = drawing.graph([y], name="")
    first = replace(graph.ops[0], outputs=(None, 1, None), call=4, section=2, extrapolated=True)
    return validate(
        replace(
            graph,
            tensors=(graph.tensors[0], replace(graph.tensors[1], signs=Signs.CONJUGATE)),
            ops=(first, graph.ops[1]),
            origin=Origin.EAGER,
            profiled_on="NVIDIA H200",
            notes=("a guess", ""),
            assumptions=(
                Finding.UNPACKED,
                NoGradient(graph=0, output=13),
                GradientLayouts(3, (((2, 3), (1, 2)), None, ((), ()))),
                NodesBetween((("AddmmBackward0", 2), ("TBackward0", 1))),
                UseByUse(graph=2, input=5),
            ),
        )
    )


@pytest.mark.parametrize(
    "graph", [chain(), oddities(), Drawing().graph()], ids=["chain", "oddities", "empty"]
)
def test_a_graph_comes_back_to_the_last_bit(graph: Graph, tmp_path: Path) -> None:
    save_graph(graph, tmp_path / "graph.json")
    loaded, schedule = load_graph(tmp_path / "graph.json")
    assert to_the_last_bit(loaded) == to_the_last_bit(graph)
    assert schedule is None


@pytest.mark.parametrize(
    "schedule", [steps(), steps("f0"), straight(chain()), steps(0, 1, 2, "f2", 3, 0, 1, 4, "f0", "f6", 5)]
)
def test_a_schedule_comes_back_beside_its_graph(schedule: Schedule, tmp_path: Path) -> None:
    save_graph(chain(), str(tmp_path / "graph.json"), schedule)
    assert load_graph(str(tmp_path / "graph.json")) == (chain(), schedule)


def test_what_is_written_is_pure_json_and_says_what_it_is(tmp_path: Path) -> None:
    save_graph(oddities(), tmp_path / "graph.json", steps(0, "f0", "f1"))
    text = (tmp_path / "graph.json").read_text(encoding="ascii")

    def refuse(literal: str) -> NoReturn:
        raise AssertionError(f"{literal} is not JSON")

    document = json.loads(text, parse_constant=refuse)
    assert (document["lowtide"], document["schema"], document["schedule"]) == ("graph", 1, [0, -1, -2])
    assert document["graph"]["tensors"][0] == [0, [8], [1], 0, "uint8"]
    assert document["graph"]["assumptions"] == [
        "transformers: sequences are not packed, and that does not depend on the batch",
        "no gradient enters output 13 of graph 0",
        "gradients enter graph 3 with shapes and strides [[[2, 3], [1, 2]], null, [[], []]]",
        'nodes of autograd between graphs: {"AddmmBackward0": 2, "TBackward0": 1}',
        "input 5 of graph 2 enters once for each use",
    ]
    assert document["graph"]["ops"][0]["args"][6:9] == [{"float": "inf"}, {"float": "-inf"}, {"float": "nan"}]


# Properties -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "graph.json"


SCALARS: st.SearchStrategy[Arg] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 5e-324]),
    st.text(max_size=5),
    st.builds(Symbol, st.sampled_from(["dtype", "device", "layout"]), st.text(max_size=5)),
)
ARGS: st.SearchStrategy[Arg] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6
)
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(Compute, st.integers(0, 2**62)), st.builds(Free, st.integers(0, 2**62))
)


@settings(deadline=None, max_examples=examples(150))
@given(
    graphs(names=st.text(max_size=6), args=st.lists(ARGS, max_size=3), seconds=st.floats(0, 1e300)),
    st.none() | st.lists(STEPS).map(lambda found: Schedule(tuple(found))),
)
def test_any_graph_with_any_schedule_comes_back_to_the_last_bit(
    scratch: Path, graph: Graph, schedule: Schedule | None
) -> None:
    save_graph(graph, scratch, schedule)
    loaded, loaded_schedule = load_graph(scratch)
    assert to_the_last_bit(loaded) == to_the_last_bit(graph)
    assert loaded_schedule == schedule
    assert fits(loaded, Graph)


def saved(graph: Graph, path: Path, schedule: Schedule | None = None) -> bytes:
    save_graph(graph, path, schedule)
    return path.read_bytes()


@settings(deadline=None, max_examples=examples(400))
@given(st.data())
def test_a_damaged_file_is_refused_or_what_was_written(scratch: Path, data: st.DataObject) -> None:
    damaged = bytearray(saved(oddities(), scratch, straight(oddities())))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        byte = data.draw(st.one_of(st.sampled_from(b'0123456789-.eE"[]{},:tn\\ '), st.integers(0, 255)))
        match data.draw(st.sampled_from(["change", "insert", "drop"])):
            case "change":
                damaged[place] = byte
            case "insert":
                damaged.insert(place, byte)
            case _:
                del damaged[place]
    scratch.write_bytes(bytes(damaged))
    try:
        graph, schedule = load_graph(scratch)
    except BadFile:
        return
    assert to_the_last_bit(graph) == to_the_last_bit(oddities())
    assert schedule == straight(oddities())
    assert validate(graph) is graph


@settings(deadline=None, max_examples=examples(200))
@given(st.binary(max_size=60))
def test_bytes_from_anywhere_are_refused(scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)
    with pytest.raises(BadFile):
        load_graph(scratch)


# Refusals: the file as a whole ----------------------------------------------------------------------


@pytest.mark.parametrize("fiftieth", range(50))
def test_a_file_cut_off_anywhere_is_refused(fiftieth: int, tmp_path: Path) -> None:
    whole = saved(chain(), tmp_path / "graph.json", straight(chain()))
    (tmp_path / "graph.json").write_bytes(whole[: len(whole) * fiftieth // 50])
    with pytest.raises(BadFile, match=r"it is not JSON from line 1, column \d+: damaged or cut off\?"):
        load_graph(tmp_path / "graph.json")


class Trap:
    """Unpickling this leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_is_refused_and_never_run(protocol: int, tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_bytes(pickle.dumps(Trap(tmp_path / "mark"), protocol))
    with pytest.raises(BadFile, match="it is not"):
        load_graph(tmp_path / "graph.json")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not JSON from line 1, column 1: damaged or cut off?"),
        (b'{\n"a": }', "it is not JSON from line 2, column 6: damaged or cut off?"),
        (b'{"lowtide": "graph\xff"}', "it is not text"),
        ('{"lowtide": "graph"}'.encode("utf-16"), "it is not text"),
        (b"[" * 100_000, "it is nested too deeply to be lowtide's"),
        (b'{"a":' * 100_000, "it is nested too deeply to be lowtide's"),
        (b'{"lowtide": NaN}', "it holds an impossible number (NaN is not JSON)"),
        (b'{"lowtide": -Infinity}', "it holds an impossible number (-Infinity is not JSON)"),
        (b"[]", "it is not a lowtide graph file"),
        (b"null", "it is not a lowtide graph file"),
        (b"3", "it is not a lowtide graph file"),
        (b"{}", "it is not a lowtide graph file"),
        (b'{"lowtide": "plan", "schema": 1}', "it is not a lowtide graph file"),
        (b'{"lowtide": ["graph"]}', "it is not a lowtide graph file"),
        (b'{"lowtide": "graph", "schema": 1}', "'graph' is missing"),
    ],
)
def test_a_foreign_file_is_refused_with_the_reason(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(content)
    with pytest.raises(BadFile) as refusal:
        load_graph(path)
    assert str(refusal.value) == f"cannot read '{path}': {reason}"
    assert (refusal.value.path, refusal.value.reason) == (str(path), reason)


@pytest.mark.parametrize("schema", ["0", "5", "true", "1.0", '"1"', "null", "[]"])
def test_a_file_of_another_schema_is_refused_with_advice(schema: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(f'{{"lowtide": "graph", "schema": {schema}, "graph": {{}}}}')
    with pytest.raises(BadFile) as refusal:
        load_graph(path)
    assert refusal.value.reason == (
        f"it has schema {json.loads(schema)!r}; this lowtide reads schema 1 to 4. "
        "Write it again with this version"
    )


def test_a_number_too_long_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text('{"lowtide": ' + "9" * 5000 + "}")
    with pytest.raises(BadFile, match="it holds an impossible number"):
        load_graph(tmp_path / "graph.json")


def test_a_missing_file_and_a_directory_are_refused_as_the_system_names_them(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"none\.json': No such file or directory"):
        load_graph(tmp_path / "none.json")
    with pytest.raises(BadFile, match="Is a directory"):
        load_graph(tmp_path)


# Refusals: one field at a time ----------------------------------------------------------------------

Place = tuple[str | int, ...]
ONE_OF_EACH: dict[str, Any] = {
    "NoneType": None,
    "bool": True,
    "int": 1,
    "float": 0.5,
    "str": "x",
    "list": [],
    "dict": {},
}


KINDS_OF_SYMBOL = ("tensor", "float", "dtype", "device")


def places(found: Any, here: Place = ()) -> Iterator[Place]:
    """Where every object, list and leaf of a JSON document is."""
    yield here
    if isinstance(found, dict | list):
        for key, child in found.items() if isinstance(found, dict) else enumerate(found):
            yield from places(child, (*here, key))


def at(document: Any, place: Place) -> Any:
    return functools.reduce(lambda found, key: found[key], place, document)


def changed(document: Any, place: Place, content: Any) -> Any:
    if not place:
        return content
    result = copy.deepcopy(document)
    at(result, place[:-1])[place[-1]] = content
    return result


def may_also_be(place: Place) -> Sequence[str]:
    """JSON types a place may hold besides the one found there."""
    match place:
        case ("schedule",) | ("graph", "profiled_on"):
            return ["NoneType"]
        case ("graph", "ops", _, "outputs", _):
            return ["NoneType", "int"]
        case ("graph", "ops", _, "seconds"):
            return ["int"]
        case ("graph", "ops", _, "args" | "kwargs", _, *_) if place[-1] not in KINDS_OF_SYMBOL:
            return ["NoneType", "bool", "int", "float", "str", "list"]
    return []


@pytest.fixture
def document(tmp_path: Path) -> Any:
    saved(oddities(), tmp_path / "whole.json", straight(oddities()))
    return editable(tmp_path / "whole.json")


def refusal_of(document: Any, path: Path) -> BadFile | None:
    path.write_text(json.dumps(document))
    try:
        graph, schedule = load_graph(path)
    except BadFile as refusal:
        return refusal
    assert fits(graph, Graph)
    assert fits(schedule, Schedule | None)
    return None


def test_every_field_of_another_type_is_refused(document: Any, tmp_path: Path) -> None:
    tried, accepted = 0, []
    for place in places(document):
        own = type(at(document, place)).__name__
        for kind, content in ONE_OF_EACH.items():
            if kind != own:
                refusal = refusal_of(changed(document, place, content), tmp_path / "graph.json")
                tried += 1
                if refusal is None and kind not in may_also_be(place):
                    accepted.append((place, kind))
    assert accepted == []
    assert tried > 500


def test_every_missing_field_is_refused(document: Any, tmp_path: Path) -> None:
    accepted = []
    for place in places(document):
        holder = at(document, place[:-1])
        if place and isinstance(holder, dict) and place[-2:-1] != ("kwargs",) and place != ("schedule",):
            without = changed(document, place[:-1], {k: v for k, v in holder.items() if k != place[-1]})
            if refusal_of(without, tmp_path / "graph.json") is None:
                accepted.append(place)
    assert accepted == []


@pytest.mark.parametrize(
    ("place", "content", "reason"),
    [
        (("graph",), [], "graph should be an object"),
        (("graph",), {}, "graph has no 'name'"),
        (("graph", "origin"), "guess", "graph.origin is 'guess', not one of "),
        (("graph", "assumptions", 0), "it rains", "graph.assumptions[0] is 'it rains', not one of "),
        *(
            (
                ("graph", "assumptions", 2),
                f"gradients enter graph 3 with shapes and strides {layouts}",
                "graph.assumptions[2] should have pairs of shapes and strides, found ",
            )
            for layouts in ("[[[2]]]", "[[2, 3]]", "[[[2], [1.0]]]", "[[[2], [1]]")
        ),
        *(
            (
                ("graph", "assumptions", 3),
                f"nodes of autograd between graphs: {counts}",
                "graph.assumptions[3] should say how many nodes there are of each name, found ",
            )
            for counts in ('{"a": 1.0}', '{"a" 1}', '{"a": null}')
        ),
        (("graph", "values"), {}, "graph.values should be list, found {}"),
        (("graph", "values", 0, "bytes"), -1, "value 0 ('données ☃') has -1 bytes"),
        (("graph", "values", 0, "bytes"), True, "graph.values[0].bytes should be int, found True"),
        (("graph", "values", 0, "bytes"), 8.0, "graph.values[0].bytes should be int, found 8.0"),
        (("graph", "values", 0, "bytes"), 2**63, f"graph.values[0].bytes does not fit in 64 bits: {2**63}"),
        (("graph", "values", 0, "role"), "weight", "graph.values[0].role is 'weight', not one of "),
        (("graph", "tensors", 0), [0, [8], [1], 0], "graph.tensors[0] should have 5 or 6 fields, found 4"),
        (
            ("graph", "tensors", 0),
            [0, [8], [1], 0, "uint8", "conjugate", 0],
            "graph.tensors[0] should have 5 or 6 fields, found 7",
        ),
        (
            ("graph", "tensors", 0),
            [0, [8], [1], 0, "uint8", "upside down"],
            "graph.tensors[0][5] is 'upside down', not one of ",
        ),
        (("graph", "tensors", 0, 1), [9], "tensor 0 reaches 9 bytes into value 0 ('données ☃'), which has 8"),
        (("graph", "tensors", 0, 1), [10**30], "graph.tensors[0][1][0] does not fit in 64 bits: 1000"),
        (("graph", "tensors", 0, 4), "float" + "9" * 5000, "'float999"),
        (("graph", "ops", 0, "args", 0), {}, "graph.ops[0].args[0] should name one thing, found 0"),
        (
            ("graph", "ops", 0, "args", 0),
            {"tensor": 0, "dtype": "float32"},
            "graph.ops[0].args[0] should name one thing, found 2",
        ),
        (("graph", "ops", 0, "args", 1), {"tensor": 2}, "op 0 (aten.odd) names tensor 2, which is not in"),
        (("graph", "ops", 0, "args", 1), {"float": "1e3"}, "graph.ops[0].args[1] is no float: '1e3'"),
        (("graph", "ops", 0, "args", 1), {"dtype": 3}, "graph.ops[0].args[1].dtype should be str, found 3"),
        (("graph", "ops", 0, "kwargs", "x"), {}, "graph.ops[0].kwargs.x should name one thing, found 0"),
        (("graph", "ops", 0, "seconds"), -1.0, "op 0 (aten.odd) costs 3 bytes of workspace and -1.0 seconds"),
        (("graph", "ops", 0, "seconds"), 10**400, "graph.ops[0].seconds does not fit in 64 bits: 1000"),
        (("graph", "ops", 0, "seconds"), True, "graph.ops[0].seconds should be int, found True"),
        (("graph", "ops", 0, "phase"), "Forward", "graph.ops[0].phase is 'Forward', not one of "),
        (("graph", "outputs"), [2], "the graph's outputs name value 2, which is not in the graph"),
        (("schedule",), [0, "1"], "schedule[1] should be int, found '1'"),
        (("schedule",), [0, False], "schedule[1] should be int, found False"),
    ],
)
def test_a_field_that_cannot_be_is_named(
    document: Any, tmp_path: Path, place: Place, content: Any, reason: str
) -> None:
    refusal = refusal_of(changed(document, place, content), tmp_path / "graph.json")
    assert refusal is not None
    assert refusal.reason.startswith(reason)


def test_a_whole_number_of_seconds_is_read_as_seconds(document: Any, tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(changed(document, ("graph", "ops", 0, "seconds"), 2)))
    graph, _ = load_graph(tmp_path / "graph.json")
    assert repr(graph.ops[0].seconds) == "2.0"


def test_nan_in_an_argument_is_refused_where_json_has_none(document: Any, tmp_path: Path) -> None:
    refusal = refusal_of(changed(document, ("graph", "ops", 1, "args"), [math.nan]), tmp_path / "graph.json")
    assert refusal is not None
    assert refusal.reason == "it holds an impossible number (NaN is not JSON)"


@pytest.mark.parametrize("depth", [10, 100, 200, 300, 400, 600, 900, 950, 1000, 5000])
def test_arguments_nested_without_end_are_refused(document: Any, tmp_path: Path, depth: int) -> None:
    text = json.dumps(changed(document, ("graph", "ops", 1, "args"), ["here"]))
    (tmp_path / "graph.json").write_text(text.replace('"here"', "[" * depth + "]" * depth))
    try:
        graph, _ = load_graph(tmp_path / "graph.json")
        reason = ""
        assert repr(graph.ops[1].args).count("(") == depth + 1
    except BadFile as refusal:
        reason = refusal.reason
    too_deep = "it is nested too deeply to be lowtide's"
    assert reason in ([""] if depth <= 100 else ["", too_deep] if depth < 1000 else [too_deep])


# Writing --------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(chain(), path, straight(chain()))
    save_graph(oddities(), path)
    assert to_the_last_bit(load_graph(path)[0]) == to_the_last_bit(oddities())
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["graph.json"]


def test_a_bare_name_is_written_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text("note.txt", "hello ☃")
    assert (tmp_path / "note.txt").read_text(encoding="utf-8") == "hello ☃"


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")

    def fail(*_: object) -> NoReturn:
        raise failure

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((BadFile, KeyboardInterrupt)) as refusal:
        save_graph(chain(), path)
    if isinstance(failure, OSError):
        assert str(refusal.value) == f"cannot write '{path}': No space left on device"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["graph.json"]


def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "x" * 100_000 + "\ud800")  # half of a character cannot be written
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["note.txt"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    for path, why in [
        (tmp_path / "none" / "graph.json", "No such file or directory"),
        (tmp_path / "file" / "graph.json", "Not a directory"),
        (tmp_path, "Is a directory|Device or resource busy"),
    ]:
        with pytest.raises(BadFile, match=f"cannot write '{path}': ({why})"):
            save_graph(chain(), path)
    assert os.listdir(tmp_path) == ["file"]

    def forbid(**_: object) -> NoReturn:  # a mode would not stop root
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", forbid)
    with pytest.raises(BadFile, match=r"graph\.json': Permission denied"):
        save_graph(chain(), tmp_path / "graph.json")


def test_a_graph_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    graph = chain()
    endless = replace(graph, ops=(replace(graph.ops[0], seconds=float("inf")), *graph.ops[1:]))
    with pytest.raises(MalformedGraph, match="inf seconds"):
        save_graph(endless, tmp_path / "graph.json")
    assert list(tmp_path.iterdir()) == []


# Solutions of graphs --------------------------------------------------------------------------------


def scheduled() -> GraphSolution:
    """Every field of a solution, with something in it, and an op that runs again."""
    return solved(
        three_layers(),
        steps(0, 1, 2, "f3", 3, 4, "f4", 1, 5, "f2", "f3", "f6"),
        status=Status.OPTIMAL,
        extra_seconds=0.1 + 0.2,
        planning_seconds=5e-324,
        budget_bytes=2**62,
        least_extra_seconds=0.1,
        objective_bytes=17,
        plain_peak_bytes=2500,
        fingerprint="0123456789abcdef",
        inputs=("float32[2, 3]", "données ☃"),
        torch_version="2.13.0+cpu",
        remark="what runs between the graphs ☃",
    )


def test_the_handmade_solution_leaves_no_field_empty() -> None:
    solution = scheduled()
    assert all(getattr(solution, field.name) not in (None, (), "") for field in fields(solution))


def test_a_scheduled_solution_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    save_solution(scheduled(), tmp_path / "plan.json")
    loaded = load_solution(str(tmp_path / "plan.json"))
    assert isinstance(loaded, GraphSolution)
    assert loaded == scheduled()
    assert repr(loaded) == repr(scheduled())
    assert to_the_last_bit(loaded.graph) == to_the_last_bit(three_layers())
    assert fits(loaded.schedule, Schedule)
    assert str(loaded) == str(scheduled())


def test_a_scheduled_solution_is_a_plan_file_with_a_whole_number_a_step(tmp_path: Path) -> None:
    save_solution(scheduled(), tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert (document["lowtide"], document["schema"]) == ("plan", 1)
    assert set(document["scheduled"]) == {field.name for field in fields(GraphSolution)}
    assert document["scheduled"]["schedule"] == [0, 1, 2, -4, 3, 4, -5, 1, 5, -3, -4, -7]
    with pytest.raises(BadFile, match="it is not a lowtide graph file"):
        load_graph(tmp_path / "plan.json")


@settings(deadline=None, max_examples=examples(60))
@given(graphs(names=st.text(max_size=6), args=st.lists(ARGS, max_size=3), seconds=st.floats(0, 1e300)))
def test_the_plain_schedule_of_any_graph_comes_back(scratch: Path, graph: Graph) -> None:
    solution = solved(graph, straight(graph))
    save_solution(solution, scratch)
    loaded = load_solution(scratch)
    assert isinstance(loaded, GraphSolution)
    assert to_the_last_bit(loaded.graph) == to_the_last_bit(graph)
    assert (repr(loaded), loaded.schedule) == (repr(solution), solution.schedule)


def solution_refused(document: Any, path: Path) -> BadFile | None:
    path.write_text(json.dumps(document))
    try:
        load_solution(path)
    except BadFile as refusal:
        return refusal
    return None


@pytest.fixture
def plan_document(tmp_path: Path) -> Any:
    save_solution(scheduled(), tmp_path / "whole.json")
    return editable(tmp_path / "whole.json")


def test_every_field_of_a_scheduled_solution_is_needed_and_of_its_type(
    plan_document: Any, tmp_path: Path
) -> None:
    solution = plan_document["scheduled"]
    accepted = []
    for name, found in solution.items():
        without = {key: value for key, value in solution.items() if key != name}
        refusal = solution_refused({**plan_document, "scheduled": without}, tmp_path / "plan.json")
        assert (refusal is None) == (name == "remark"), name  # files without a remark have none
        for kind, content in ONE_OF_EACH.items():
            changed_one = {**plan_document, "scheduled": {**solution, name: content}}
            if kind != type(found).__name__ and solution_refused(changed_one, tmp_path / "plan.json") is None:
                accepted.append((name, kind))
    seconds = [(name, "int") for name in ("extra_seconds", "planning_seconds", "least_extra_seconds")]
    nothing = [(name, "NoneType") for name in ("budget_bytes", "objective_bytes", "plain_peak_bytes")]
    assert sorted(accepted) == sorted([*seconds, *nothing])


@pytest.mark.parametrize(
    ("place", "content", "reason"),
    [
        (
            ("peak_bytes",),
            5,
            "its plan is said to peak at 5 bytes, and replayed it peaks at 1911. Plan again",
        ),
        (("schedule",), [0, 1], "op 2 (layers.1: aten.relu) is never computed"),
        (("schedule",), [99], "step 0 computes op 99, which is not in the graph"),
        (("schedule",), [0, 1, -4, -4], "step 3 frees value 3 ('middle'), already freed"),
        (("schedule",), [-1000], "step 0 frees value 999, which is not in the graph"),
        (("schedule",), [0, True], "scheduled.schedule[1] should be int, found True"),
        (
            ("graph", "values", 2, "bytes"),
            900,
            "tensor 2 reaches 1000 bytes into value 2 ('wide'), which has 900",
        ),
        (("graph", "ops", 0, "seconds"), -1.0, "op 0 (stem: aten.mm) costs"),
        (("status",), "perfect", "scheduled.status is 'perfect', not one of"),
        (("extra_seconds",), -1.0, "scheduled.extra_seconds is no time: -1.0"),
        (("inputs",), [1], "scheduled.inputs[0] should be str, found 1"),
        ((), [], "scheduled should be an object"),
        ((), None, "scheduled should be an object"),
    ],
)
def test_a_scheduled_solution_that_cannot_be_is_refused_and_named(
    plan_document: Any, place: Place, content: Any, reason: str, tmp_path: Path
) -> None:
    document = changed(plan_document, ("scheduled", *place), content)
    refusal = solution_refused(document, tmp_path / "plan.json")
    assert refusal is not None
    assert refusal.reason.startswith(reason)


@pytest.mark.parametrize("tenth", range(10))
def test_a_scheduled_solution_cut_off_anywhere_is_refused(
    plan_document: Any, tenth: int, tmp_path: Path
) -> None:
    whole = (tmp_path / "whole.json").read_bytes()
    (tmp_path / "plan.json").write_bytes(whole[: len(whole) * tenth // 10])
    with pytest.raises(BadFile):
        load_solution(tmp_path / "plan.json")


def test_a_solution_of_a_graph_that_breaks_its_rules_is_not_written(tmp_path: Path) -> None:
    broken = replace(scheduled(), graph=replace(three_layers(), outputs=frozenset([99])))
    with pytest.raises(MalformedGraph):
        save_solution(broken, tmp_path / "plan.json")
    assert os.listdir(tmp_path) == []
