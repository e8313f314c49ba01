"""Plan files: what is written comes back to the last bit, and nothing else gets in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from lowtide.chain.chain import Chain, Kind
from lowtide.chain.plan import Plan
from lowtide.errors import BadFile, CannotApply
from lowtide.execute.apply import apply
from lowtide.ir.graph import Call
from lowtide.planner.layers import Rehearsal
from lowtide.solvers import solve
from lowtide.solvers.files import load_graph, load_solution, save_graph, save_solution
from lowtide.solvers.solution import Confirmation, GraphSolution, Solution
from tests.helpers.chains import chains
from tests.helpers.editable import editable
from tests.helpers.handmade import chain as small_graph
from tests.solvers.test_files import scheduled

Place = tuple[str | int, ...]

# By hand ---------------------------------------------------------------------------------------------


def handmade() -> Solution:
    """Every field of a solution, its chain and its confirmation, with something in it."""
    chain = replace(
        Chain.from_sizes([4, 8, 64, 8], [20, 90, 30], settled_bytes=[1, 9, 0], base_bytes=100),
        name="données ☃",
        names=("stem", "widen", "the rest"),
        kinds=(Kind.HEAVY, Kind.LIGHT, Kind.MIXED),
        places=(0, 3, 5, 9),
        calls=(Call("", 1, 0, 9), Call("stem", 1, 0, 3)),
        timed=False,
        changed_buffers=("stem.running_mean",),
        inputs=("float32[2, 3]",),
        fingerprint="0123456789abcdef",
    )
    solution = replace(solve(chain, "rotor"), budget_bytes=2**62, objective_bytes=17, remark="by layers ☃")
    return replace(solution, confirmation=Confirmation(300, 4, 0.1 + 0.2, 400, 5e-324))


def test_the_handmade_solution_leaves_no_field_empty() -> None:
    solution = handmade()
    for part in (solution, solution.chain, solution.confirmation):
        assert part is not None
        for field in fields(part):
            assert getattr(part, field.name) not in (None, (), ""), field.name
    assert solution.plan != Plan()


def test_a_solution_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    save_solution(handmade(), tmp_path / "plan.json")
    loaded = load_solution(str(tmp_path / "plan.json"))
    assert isinstance(loaded, Solution)
    assert loaded == handmade_again(loaded)
    assert repr(loaded.chain.forward_seconds) == repr(handmade().chain.forward_seconds)


def handmade_again(loaded: Solution) -> Solution:
    """Planning took another time today, and nothing else differs."""
    return replace(handmade(), planning_seconds=loaded.planning_seconds)


def test_what_is_written_says_what_it_is_and_is_readable(tmp_path: Path) -> None:
    save_solution(handmade(), tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert (document["lowtide"], document["schema"]) == ("plan", 1)
    solution = document["solution"]
    assert Plan.read(solution["plan"]) == handmade().plan
    assert (solution["status"], solution["chain"]["kinds"]) == ("optimal", ["heavy", "light", "mixed"])
    assert set(solution) == {field.name for field in fields(Solution)}
    assert set(solution["chain"]) == {field.name for field in fields(Chain)}


def test_a_plan_that_was_saved_does_the_same_when_it_is_applied(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))

    rehearsal = Rehearsal(model(), (torch.ones(64, 16),), torch.sum, profile=False)
    solution = rehearsal.solve(rehearsal.chain(), "every-k")
    save_solution(solution, tmp_path / "plan.json")
    loaded = load_solution(tmp_path / "plan.json")
    assert isinstance(loaded, Solution)
    assert loaded == solution
    fresh = Rehearsal(model(), (torch.ones(64, 16),), torch.sum, profile=False)
    assert fresh.confirm(loaded) == solution.confirmation
    with pytest.raises(CannotApply, match="the plan was made for another model"):
        apply(nn.Linear(3, 3), loaded)


# Properties ------------------------------------------------------------------------------------------


@given(chains())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_solution_comes_back(tmp_path: Path, chain: Chain) -> None:
    solution = solve(chain, "chen-recursive")
    save_solution(solution, tmp_path / "plan.json")
    assert load_solution(tmp_path / "plan.json") == solution


# Refusals --------------------------------------------------------------------------------------------

ONE_OF_EACH: dict[str, Any] = {
    "NoneType": None,
    "bool": True,
    "int": 3,
    "float": 0.5,
    "str": "x",
    "list": [],
    "dict": {},
}
MAY_BE_NOTHING = ("budget_bytes", "objective_bytes", "confirmation")


@pytest.fixture
def document(tmp_path: Path) -> Any:
    save_solution(handmade(), tmp_path / "whole.json")
    return editable(tmp_path / "whole.json")


def places(document: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    for key, item in inner:
        if isinstance(item, dict | list):
            yield from places(item, (*place, key))
        else:
            yield (*place, key)


def at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def changed(document: Any, place: Place, content: Any) -> Any:
    if not place:
        return content
    result = copy.deepcopy(document)
    at(result, place[:-1])[place[-1]] = content
    return result


def refusal_of(document: Any, path: Path) -> BadFile | None:
    path.write_text(json.dumps(document))
    try:
        load_solution(path)
    except BadFile as refusal:
        return refusal
    return None


def may_also_be(place: Place) -> list[str]:
    name = next((key for key in place[::-1] if isinstance(key, str)), "")
    if name in MAY_BE_NOTHING:
        return ["NoneType"]
    return ["int"] if name.endswith("seconds") else []


def test_every_field_of_another_type_is_refused(document: Any, tmp_path: Path) -> None:
    tried, accepted = 0, []
    for place in places(document):
        own = type(at(document, place)).__name__
        for kind, content in ONE_OF_EACH.items():
            if kind != own and kind not in may_also_be(place):
                tried += 1
                if refusal_of(changed(document, place, content), tmp_path / "plan.json") is None:
                    accepted.append((place, kind))
    assert accepted == []
    assert tried > 300


def test_every_missing_field_is_refused(document: Any, tmp_path: Path) -> None:
    for place in places(document):
        holder = at(document, place[:-1]) if place else None
        if isinstance(holder, dict):
            without = changed(document, place[:-1], {k: v for k, v in holder.items() if k != place[-1]})
            may_be_missing = place == ("solution", "remark")  # files without a remark have none
            assert (refusal_of(without, tmp_path / "plan.json") is None) == may_be_missing, place


@pytest.mark.parametrize(
    ("place", "content", "reason"),
    [
        (("solution", "plan"), "[1-2", "'[1-2' is not a plan: a bracket is not closed"),
        (("solution", "plan"), "import os", "'import os' is not a plan"),
        (("solution", "plan"), "[1-7]", "recomputes layer 7, but données ☃ has only 3 layers"),
        (("solution", "plan"), "[" * 9, "is not a plan"),
        (("solution", "plan"), "[1-1 " * 9999 + "]" * 9999, "it is nested too deeply"),
        (("solution", "status"), "perfect", "solution.status is 'perfect', not one of"),
        (("solution", "peak_bytes"), 5, "its plan is said to peak at 5 bytes, and replayed it peaks at"),
        (("solution", "extra_seconds"), -1.0, "solution.extra_seconds is no time: -1.0"),
        (("solution", "chain", "kinds", 0), "large", "solution.chain.kinds[0] is 'large'"),
        (("solution", "chain", "saved_bytes", 0), -1, "saved_bytes[0] is -1; sizes cannot be negative"),
        (("solution", "chain", "saved_bytes"), [1], "output_bytes has 4 entries, but 2 are needed"),
        (("solution", "chain", "forward_bytes", 0), 0, "less than its output and what it saves"),
        (("solution", "chain", "places"), [1], "has 3 layers, but 1 places"),
        (("solution", "chain", "calls", 0), ["", 1, 2], "calls[0] should have 4 fields, found 3"),
        (("solution",), [], "solution should be an object"),
    ],
)
def test_what_cannot_be_is_refused_and_named(
    document: Any, place: Place, content: Any, reason: str, tmp_path: Path
) -> None:
    refusal = refusal_of(changed(document, place, content), tmp_path / "plan.json")
    assert refusal is not None
    assert reason in str(refusal)
    assert str(refusal).startswith(f"cannot read '{tmp_path}/plan.json': ")


def test_times_without_end_are_refused(document: Any, tmp_path: Path) -> None:
    text = json.dumps(changed(document, ("solution", "extra_seconds"), 0.125)).replace("0.125", "1e999")
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(BadFile, match=r"solution\.extra_seconds is no time: inf"):
        load_solution(tmp_path / "plan.json")


@pytest.mark.parametrize("written", [handmade, scheduled])
def test_a_damaged_file_is_refused_or_is_the_plan_that_was_written(
    written: Callable[[], Solution | GraphSolution], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    save_solution(written(), path)
    whole, solution = path.read_bytes(), load_solution(path)
    draw, refused = Random(0), 0
    for _ in range(500):
        path.write_bytes(damaged(whole, draw))
        try:
            assert load_solution(path) == solution
        except BadFile:
            refused += 1
    assert refused > 450


def damaged(whole: bytes, draw: Random) -> bytes:
    """One byte or a few are others, or are gone."""
    content = bytearray(whole)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        place = draw.randrange(len(content))
        content[place : place + 1] = draw.choice(
            [bytes([draw.randrange(256)]), bytes([draw.choice(b'0123456789[]{},:"-.e ')]), b""]
        )
    return bytes(content)


def test_an_edited_file_is_refused_until_its_checksum_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_solution(handmade(), path)
    path.write_text(path.read_text().replace("stem", "stern"))
    with pytest.raises(BadFile, match=r"damaged, or edited\..* take the field 'checksum' out"):
        load_solution(path)
    path.write_text(json.dumps(editable(path), indent=2))
    assert load_solution(path) != handmade()


@pytest.mark.parametrize("tenth", range(10))
def test_a_file_cut_off_anywhere_is_refused(document: Any, tenth: int, tmp_path: Path) -> None:
    whole = (tmp_path / "whole.json").read_bytes()
    (tmp_path / "plan.json").write_bytes(whole[: len(whole) * tenth // 10])
    with pytest.raises(BadFile):
        load_solution(tmp_path / "plan.json")


def test_graphs_are_not_plans_and_plans_are_not_graphs(tmp_path: Path) -> None:
    save_graph(small_graph(), tmp_path / "graph.json")
    save_solution(handmade(), tmp_path / "plan.json")
    with pytest.raises(BadFile, match="it is not a lowtide plan file"):
        load_solution(tmp_path / "graph.json")
    with pytest.raises(BadFile, match="it is not a lowtide graph file"):
        load_graph(tmp_path / "plan.json")


@pytest.mark.parametrize("schema", [0, 5, True, "1", None])
def test_a_file_of_another_schema_is_refused_with_advice(document: Any, schema: Any, tmp_path: Path) -> None:
    refusal = refusal_of(changed(document, ("schema",), schema), tmp_path / "plan.json")
    assert refusal is not None
    assert "this lowtide reads schema 1 to 4. Write it again with this version" in str(refusal)


def test_a_missing_file_and_a_place_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot read '.*/absent.json': No such file or directory"):
        load_solution(tmp_path / "absent.json")
    with pytest.raises(BadFile, match=r"cannot write '.*/absent/plan.json': No such file or directory"):
        save_solution(handmade(), tmp_path / "absent" / "plan.json")
    assert list(tmp_path.iterdir()) == []
