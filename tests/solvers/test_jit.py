"""Compiled loops: Python is the referee. What they compute, in which order, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.solvers.jit import Numbers, Reals, Record, Unit, is_compiling
from tests.helpers.effort import examples

pytestmark = pytest.mark.skipif(not is_compiling(), reason="needs llvmlite")

unit = Unit()
STEP = 3
TENTH = 0.1


@dataclass(frozen=True, eq=False)
class Inner(Record):
    marks: Numbers


@dataclass(frozen=True, eq=False)
class Outer(Record):
    whole: Numbers
    real: Reals
    inner: Inner


# The referee: expressions at random -------------------------------------------------------------------

WHOLE = st.recursive(
    st.sampled_from(["a", "b", "c", "0", "1", "7", "-3"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from(["5", "-5", "8", "d", "-d"])).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        st.tuples(inner, st.sampled_from(["<<", ">>"]), st.sampled_from(["1", "2"])).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"
        ),
        st.tuples(inner, inner, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), inner, inner).map(
            lambda parts: f"({parts[0]} if {parts[1]} {parts[2]} {parts[3]} else {parts[4]})"
        ),
        st.tuples(inner, inner, st.sampled_from(["and", "or"]), inner, inner).map(
            lambda parts: f"({parts[0]} if {parts[1]} {parts[2]} not {parts[3]} else {parts[4]})"
        ),
        inner.map(lambda part: f"(-{part})"),
    ),
    max_leaves=8,
)
REAL = st.recursive(
    st.sampled_from(["x", "y", "0.5", "-2.0", "a", "1"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda part: f"({part} / z)"),
        inner.map(lambda part: f"(-{part})"),
    ),
    max_leaves=8,
)
TEMPLATE = """
from __future__ import annotations
from lowtide.solvers.jit import Unit
unit = Unit()

@unit.compiled
def whole(a: int, b: int, c: int, d: int) -> int:
    return {whole}

@unit.compiled
def real(a: int, x: float, y: float, z: float) -> float:
    return 1.0 * {real}
"""
numbers = itertools.count()


def module_of(text: str, folder: Path) -> Any:
    """A module with that source."""
    path = folder / f"drawn{next(numbers)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        assert module.unit._machine_code
    return module


@settings(max_examples=examples(60))
@given(whole=WHOLE, real=REAL, data=st.data())
def test_an_expression_is_what_it_is_in_python(
    whole: str, real: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    module = module_of(TEMPLATE.format(whole=whole, real=real), tmp_path_factory.getbasetemp())
    small = st.integers(-20, 20)
    for _ in range(10):
        a, b, c, d = (data.draw(each) for each in (small, small, small, st.integers(1, 9)))
        assert module.whole(a, b, c, d) == unwrap(module.whole)(a, b, c, d)
        x, y, z = (data.draw(st.floats(-1e3, 1e3)) for _ in range(3))
        z = z or 1.0
        assert module.real(a, x, y, z).hex() == unwrap(module.real)(a, x, y, z).hex()


# By hand ----------------------------------------------------------------------------------------------


@unit.compiled
def floor_and_rest(a: int, b: int, out: Numbers) -> None:
    out[0], out[1] = a // b, a % b


@pytest.mark.parametrize(("a", "b"), [*itertools.product([-7, -6, 0, 6, 7], [-3, 3, 4, -4])])
def test_quotients_are_rounded_down(a: int, b: int) -> None:
    out = np.zeros(2, np.int64)
    floor_and_rest(a, b, out)
    assert out.tolist() == [a // b, a % b]


@unit.linked
def noted(outer: Outer, mark: int) -> bool:
    """Write down that it was called; true if the mark is odd."""
    outer.inner.marks[0] += 1
    outer.inner.marks[outer.inner.marks[0]] = mark
    return mark % 2 == 1


@unit.compiled
def asks_in_order(outer: Outer, a: int, b: int, c: int) -> bool:
    return (noted(outer, a) and noted(outer, b)) or not noted(outer, c)


@pytest.mark.parametrize(("a", "b", "c"), [*itertools.product([1, 2], repeat=3)])
def test_only_what_has_to_be_asked_is_asked_and_in_order(a: int, b: int, c: int) -> None:
    here, there = outer(), outer()
    assert asks_in_order(here, a, b, c) is unwrap(asks_in_order)(there, a, b, c)
    assert here.inner.marks.tolist() == there.inner.marks.tolist()


def outer() -> Outer:
    return Outer(np.arange(8), np.arange(8) / 4, Inner(np.zeros(16, np.int64)))


@unit.linked
def bump(outer: Outer) -> int:
    outer.whole[0] += 10
    return 1


@unit.compiled
def reads_before_it_computes(outer: Outer) -> None:
    outer.whole[0] += bump(outer)
    outer.real[0] *= bump(outer)
    outer.whole[bump(outer)] = bump(outer) + outer.whole[0]


@unit.linked
def two(a: int, b: float) -> tuple[int, float]:
    return a + 1, b


@unit.compiled
def unpacks(outer: Outer, a: int) -> float:
    b, c = two(a, a)
    b, a = a, b
    outer.whole[0], outer.whole[1] = outer.whole[1], outer.whole[0]
    return a + 100 * b + c


@unit.compiled
def loops(outer: Outer, stop: int) -> int:
    total = 0
    last = -1
    for index in range(stop):
        last = index
        index += 100
        if last == 5:
            continue
        if last == 7:
            break
        total += last
    for index in range(stop, 2, -2):
        total = 10 * total + index
    for index in range(2, stop, 2):
        total += index * len(outer.whole)
    while True:
        total += 1
        if total % STEP == 0:
            break
    while total > 1000 and stop:
        total //= 2
    return total + last


@unit.compiled
def mixes(outer: Outer, flag: bool, count: int) -> float:
    outer.whole[0] = flag
    outer.whole[1] = count > 3
    outer.real[1] = count
    kind = TENTH if flag else -1.0
    kind += count
    return kind * (1 if count > 3 else 0) + float(outer.whole[0])


@unit.compiled
def returns_a_number_for_a_truth(count: int) -> int:
    return count > 3


def run_both(function: Callable[..., object], *args: object) -> None:
    """Compiled and as Python: the same result, and the same is written."""
    here, there = outer(), outer()
    assert function(here, *args) == unwrap(function)(there, *args)
    for name in ("whole", "real"):
        assert getattr(here, name).tolist() == getattr(there, name).tolist()


def test_what_is_there_is_read_before_the_other_side_is_computed() -> None:
    run_both(reads_before_it_computes)


def test_several_values_are_computed_before_any_is_assigned() -> None:
    run_both(unpacks, 4)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("count", [0, 4])
def test_truths_and_whole_numbers_become_what_they_are_written_into(flag: bool, count: int) -> None:
    run_both(mixes, flag, count)
    assert returns_a_number_for_a_truth(count) == (count > 3)


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 6, 7, 9, 30])
def test_loops_go_as_far_as_in_python(stop: int) -> None:
    run_both(loops, stop)


@unit.compiled
def first_of_equals(x: float, y: float) -> float:
    return max(x, y)


def test_of_equals_the_first_is_taken() -> None:
    assert str(first_of_equals(-0.0, 0.0)) == str(max(-0.0, 0.0)) == "-0.0"
    assert str(first_of_equals(0.0, -0.0)) == str(max(0.0, -0.0)) == "0.0"


# Refusals ---------------------------------------------------------------------------------------------

REFUSED = {
    "divides": ("a / b", "Div of i64 is not known"),
    "powers": ("a ** 2", "Pow of i64 is not known"),
    "compares": ("1 if x > a else 0", "compares a whole number with a real one"),
    "chains": ("1 if 0 < a < b else 0", "Compare is not known"),
    "truncates": ("int(x)", "is double where i64 is needed"),
    "or-number": ("a or b", "the whole would be one in Python"),
    "kinds": ("1 if a else x", "sometimes of one kind"),
    "min-kinds": ("min(a, x)", "depends on which is chosen"),
    "named": ("nobody + 1", "is no number"),
    "called": ("abs(a)", "such a call is not known"),
    "listed": ("[a][0]", "is neither a column nor a record"),
    "column": ("column + 1", "is no number"),
    "index": ("column[x]", "at a whole number"),
    "result": ("x", "is double where i64 is needed"),
    "stringed": ("'a'", "is no number"),
}
SOURCE = """
from __future__ import annotations
from lowtide.solvers.jit import Numbers, Unit
unit = Unit()

@unit.compiled
def refused(a: int, b: int, x: float, column: Numbers) -> int:
    {body}
"""
STATEMENTS = {
    "changes kind": ("a = x\n    return a", "is double where i64 is needed"),
    "iterates": ("for each in column:\n        a += each\n    return a", "For like this"),
    "variable step": ("for each in range(0, a, b):\n        a += each\n    return a", "step"),
    "too many": ("a, b = 1, 2, 3\n    return a", "3 values, and 2"),
    "never reached": ("return a\n    return b", "is never reached"),
    "tries": ("try:\n        a = 1\n    finally:\n        b = 1\n    return a", "Try like this"),
    "replaces": ("column = a\n    return a", "column is no number"),
}


@pytest.mark.parametrize(
    ("body", "why"),
    [*((f"return {text}", why) for text, why in REFUSED.values()), *STATEMENTS.values()],
    ids=[*REFUSED, *STATEMENTS],
)
def test_what_would_not_mean_the_same_is_refused(body: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=why) as caught:
        module_of(SOURCE.format(body=body), tmp_path)
    assert "refused, line" in str(caught.value)


@pytest.mark.parametrize(
    ("signature", "why"),
    [
        ("(a) -> int", "does not say what a is"),
        ("(a: int)", "does not say what return is"),
        ("(a: str) -> int", "cannot be compiled"),
        ("(a: int) -> str", "numbers can be returned"),
        ("(a: int) -> tuple[int, int]", "returns several values"),
    ],
)
def test_a_signature_that_cannot_be_read_is_refused(signature: str, why: str, tmp_path: Path) -> None:
    text = "from lowtide.solvers.jit import Unit\nunit = Unit()\n\n@unit.compiled\n"
    with pytest.raises(TypeError, match=why):
        module_of(f"{text}def refused{signature}:\n    return 1, 1\n", tmp_path)


@pytest.mark.parametrize(
    "given", [np.zeros(2), np.zeros(2, np.int32), np.zeros(4, np.int64)[::2], [0, 0], None]
)
def test_a_column_of_other_numbers_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="contiguous arrays of int64"):
        floor_and_rest(1, 2, given)


def test_a_record_with_a_column_of_other_numbers_is_refused() -> None:
    whole = np.arange(8)
    with pytest.raises(TypeError, match="contiguous arrays of float64"):
        reads_before_it_computes(Outer(whole, whole, Inner(whole)))  # type: ignore[arg-type]


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="its name is taken"):
        unit.linked(unwrap(loops))
