"""Costs: what two calls must share to cost the same, and a cache that may be lost but is never wrong."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.cache import Cost, CostCache, signature
from lowtide.errors import BadFile
from lowtide.ir.graph import Arg, Graph, Op, Origin, Ref, Role, Symbol, Tensor, Value
from tests.helpers.effort import examples

# Signatures -----------------------------------------------------------------------------------------


def signed(
    *args: Arg,
    target: str = "aten.add.Tensor",
    shape: tuple[int, ...] = (2, 3),
    stride: tuple[int, ...] = (3, 1),
    dtype: str = "float32",
    offset: int = 0,
    device: str = "cpu",
    value: int = 0,
    **keywords: Arg,
) -> str:
    """The signature of one op on one tensor, with further arguments."""
    values = tuple(Value(i, 1000, Role.INTERMEDIATE, f"v{i}", "somewhere", device) for i in range(2))
    tensor = Tensor(0, value, shape, stride, offset, dtype)
    op = Op(0, target, (Ref(0), *args), tuple(keywords.items()), (), (value,), ())
    return signature(op, Graph("one op", Origin.EAGER, device, (op,), values, (tensor,)))


def test_a_signature_is_the_call_written_down() -> None:
    found = signed(Ref(0), 1.5, (0, True, None), alpha=2, dtype_=Symbol("dtype", "float64"))
    tensor = '{"tensor":[[2,3],[3,1],"float32"]}'
    assert found == (
        f'["aten.add.Tensor",[{tensor},{tensor},1.5,[0,true,null]],{{"alpha":2,"dtype_":{{"dtype":"float64"}}}}]'
    )


def test_everything_that_may_change_the_kernel_changes_the_signature() -> None:
    different = [
        signed(),
        signed(target="aten.add.Scalar"),
        signed(shape=(3, 2), stride=(2, 1)),
        signed(stride=(1, 2)),
        signed(dtype="float64"),
        signed(1),
        signed(2),
        signed(1.0),
        signed(True),
        signed("1"),
        signed(None),
        signed((1,)),
        signed((1, 1)),
        signed(Ref(0)),
        signed((Ref(0),)),
        signed(Symbol("dtype", "float32")),
        signed(Symbol("layout", "float32")),
        signed(alpha=1),
        signed(alpha=2),
        signed(beta=1),
        signed(alpha=Ref(0)),
    ]
    assert len(set(different)) == len(different)


def test_where_a_tensor_lies_changes_nothing() -> None:
    assert signed(device="cuda:1") == signed() == signed(offset=5) == signed(value=1)
    on = {where: Symbol("device", where) for where in ("cpu", "cuda:1")}
    assert signed(on["cpu"]) == signed(on["cuda:1"]) != signed()
    assert signed(device_=on["cpu"]) == signed(device_=on["cuda:1"]) != signed()


LEAVES = st.sampled_from([None, True, False, 0, 1, 1.0, -0.0, "1", "", Ref(0), Symbol("dtype", "1")])
ARGS: st.SearchStrategy[Arg] = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=2).map(tuple))


@given(st.lists(ARGS, max_size=2), st.lists(ARGS, max_size=2))
def test_signatures_are_equal_exactly_when_the_arguments_are(one: list[Arg], other: list[Arg]) -> None:
    assert (signed(*one) == signed(*other)) == (repr(one) == repr(other))


# The cache ------------------------------------------------------------------------------------------

COSTS = {
    "a": Cost(0, 0.0, ()),
    "b": Cost(2**40, 1e-300, (4, 2**40, 0)),
    "c": Cost(512, 1 / 3, None, extrapolated=True),
    "d": Cost(1, 0.1 + 0.2, (7,), extrapolated=False),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a" / "costs.sqlite"


def test_what_is_put_is_got_back_exactly(path: Path) -> None:
    CostCache(path, "here").put(COSTS)
    found = CostCache(path, "here").get([*COSTS, "unknown"])
    assert found == COSTS
    assert {key: type(cost.output_bytes) for key, cost in found.items()} == {
        "a": tuple,
        "b": tuple,
        "c": type(None),
        "d": tuple,
    }
    assert [cost.extrapolated for cost in found.values()] == [False, False, True, False]


def test_only_what_is_asked_for_is_got(path: Path) -> None:
    cache = CostCache(path, "here")
    cache.put(COSTS)
    assert cache.get(["b"]) == {"b": COSTS["b"]}
    assert cache.get([]) == {} == cache.get(["z"])


def test_environments_do_not_mix(path: Path) -> None:
    here, there = CostCache(path, "here"), CostCache(path, "there")
    here.put({"a": Cost(1, 1.0, None)})
    assert there.get(["a"]) == {}
    there.put({"a": Cost(2, 2.0, None)})
    assert here.get(["a"]) == {"a": Cost(1, 1.0, None)}
    assert there.get(["a"]) == {"a": Cost(2, 2.0, None)}


def test_a_later_cost_replaces_an_earlier_one(path: Path) -> None:
    cache = CostCache(path, "here")
    cache.put({"a": Cost(1, 1.0, None, extrapolated=True), "b": Cost(5, 5.0, None)})
    cache.put({"a": Cost(2, 2.0, (3,))})
    assert cache.get("ab") == {"a": Cost(2, 2.0, (3,)), "b": Cost(5, 5.0, None)}


FINITE = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
SIZES = st.integers(0, 2**62)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.dictionaries(
        st.text(),
        st.builds(Cost, SIZES, FINITE, st.none() | st.lists(SIZES, max_size=3).map(tuple), st.booleans()),
        max_size=4,
    ),
    st.text(),
)
def test_any_costs_survive_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, found: dict[str, Cost], environment: str
) -> None:
    cache = CostCache(tmp_path_factory.mktemp("costs") / "costs.sqlite", environment)
    cache.put(found)
    assert cache.get(found) == found


# Damage ---------------------------------------------------------------------------------------------


def entries(count: int = 200) -> dict[str, Cost]:
    return {f"aten.op{i}" * 10: Cost(i, i / 7, (i, i + 1)) for i in range(count)}


def works(path: Path) -> bool:
    cache = CostCache(path, "here")
    cache.put({"fresh": Cost(1, 2.0, (3,))})
    return CostCache(path, "here").get(["fresh"]) == {"fresh": Cost(1, 2.0, (3,))}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A cache file of several pages."""
    path = tmp_path_factory.mktemp("sound") / "costs.sqlite"
    CostCache(path, "here").put(entries())
    return path.read_bytes()


def set_aside(path: Path) -> Path:
    return path.with_name(path.name + ".damaged")


@pytest.mark.parametrize(
    "content", [random.Random(0).randbytes(20_000), b"notes to myself\n", b"SQLite format 3\0" + bytes(5000)]
)
def test_a_file_that_is_no_database_is_set_aside_and_begun_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "costs.sqlite"
    path.write_bytes(content)
    assert works(path)
    assert set_aside(path).read_bytes() == content  # perhaps it was the wrong file, and is dear to someone


def test_an_empty_file_is_simply_used(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    path.touch()
    assert works(path)
    assert not set_aside(path).exists()


def test_a_truncated_cache_is_begun_anew_wherever_it_was_cut(tmp_path: Path, sound: bytes) -> None:
    pages = len(sound) // 4096
    assert pages >= 5
    for cut in {1, 99, 100, 1000, *(page * 4096 + more for page in range(1, pages) for more in (-1, 0, 1))}:
        path = tmp_path / f"{cut}.sqlite"
        path.write_bytes(sound[:cut])
        assert CostCache(path, "here").get(entries()) == {}, cut
        assert works(path), cut


def test_a_cache_that_lost_its_last_byte_gives_only_what_is_sound(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "costs.sqlite"
    path.write_bytes(sound[:-1])  # SQLite reads a zero there and thinks nothing of it
    found = CostCache(path, "here").get(entries())
    assert len(found) == len(entries()) - 1
    assert found.items() <= entries().items()


def test_damage_anywhere_loses_costs_but_never_changes_one(tmp_path: Path, sound: bytes) -> None:
    draw = random.Random(1)
    for trial in range(120):
        content = bytearray(sound)
        start, length = draw.randrange(len(sound)), draw.choice([1, 1, 8, 200])
        content[start : start + length] = draw.randbytes(length)
        path = tmp_path / f"{trial}.sqlite"
        path.write_bytes(content)
        found = CostCache(path, "here").get(entries())
        assert found.items() <= entries().items(), (trial, start, length)
        assert works(path), (trial, start, length)


@pytest.mark.parametrize(
    "change",
    [
        "cost = CAST('[2, 1.0, null, false]' AS BLOB)",
        "cost = '[2, 1.0, null, false]'",
        "cost = 7",
        "cost = NULL",
        "checksum = checksum + 1",
        "environment = 'there'",
        "signature = 'b'",
    ],
)
def test_a_cost_that_was_tampered_with_is_not_known_any_more(path: Path, change: str) -> None:
    CostCache(path, "here").put({"a": Cost(1, 1.0, None), "z": Cost(9, 9.0, None)})
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE costs SET {change} WHERE signature = 'a'")
    for environment in ("here", "there"):
        found = CostCache(path, environment).get(["a", "b", "z"])
        assert found == ({"z": Cost(9, 9.0, None)} if environment == "here" else {})
    assert works(path)


def sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize("version", [0, 1, 99])
def test_a_cache_of_another_schema_is_emptied(path: Path, version: int) -> None:
    CostCache(path, "here").put(COSTS)
    sql(path, "DROP TABLE costs", "CREATE TABLE costs (something TEXT)", f"PRAGMA user_version = {version}")
    assert CostCache(path, "here").get(COSTS) == {}
    assert works(path)
    assert not set_aside(path).exists()


def test_a_cache_of_our_schema_with_another_table_in_it_is_set_aside(path: Path) -> None:
    CostCache(path, "here").put(COSTS)
    sql(path, "DROP TABLE costs", "CREATE TABLE costs (something TEXT)")
    assert works(path)
    assert set_aside(path).exists()


@pytest.mark.parametrize("version", [0, 2])
def test_someone_elses_database_is_set_aside_as_it_was(tmp_path: Path, version: int) -> None:
    path = tmp_path / "photos.sqlite"
    table = "CREATE TABLE costs (photo TEXT)"
    sql(path, table, "INSERT INTO costs VALUES ('sea')", f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    assert works(path)
    assert set_aside(path).read_bytes() == before


def test_a_file_that_is_gone_meanwhile_knows_nothing_and_takes_nothing(path: Path) -> None:
    cache = CostCache(path, "here")
    cache.put(COSTS)
    path.unlink()
    assert cache.get(COSTS) == {}
    with pytest.raises(BadFile, match="no such table: costs"):
        cache.put(COSTS)
    assert works(path)


# Several processes ----------------------------------------------------------------------------------


NAMES = ("north", "east", "south", "west")
ROUNDS = 6


def fill(folder: str, name: str, together: Barrier) -> None:
    """What one of several processes does: each round meets a file that is not there yet, or is garbage."""
    for turn in range(ROUNDS):
        together.wait(600)
        cache = CostCache(Path(folder) / f"{turn}.sqlite", "here")
        for part in range(3):
            cache.put({f"{name} {part}": Cost(turn, float(part), (part,)), "shared": Cost(turn, 0.0, None)})
            assert len(cache.get([f"{name} {part}" for part in range(3)])) == part + 1


@pytest.mark.parametrize("damaged", [False, True])
def test_processes_that_write_to_a_new_or_a_damaged_file_at_once_lose_nothing(
    tmp_path: Path, damaged: bool
) -> None:
    for turn in range(ROUNDS if damaged else 0):
        (tmp_path / f"{turn}.sqlite").write_bytes(random.Random(turn).randbytes(9000))
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(len(NAMES))
    processes = [spawn.Process(target=fill, args=(str(tmp_path), name, together)) for name in NAMES]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    for turn in range(ROUNDS):
        expected = {f"{name} {part}": Cost(turn, float(part), (part,)) for name in NAMES for part in range(3)}
        expected["shared"] = Cost(turn, 0.0, None)
        assert CostCache(tmp_path / f"{turn}.sqlite", "here").get(expected) == expected


def test_a_file_that_another_process_has_begun_anew_meanwhile_is_not_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    path.write_bytes(b"garbage" * 1000)

    class Slow(CostCache):
        def _begin_anew(self) -> None:
            CostCache(path, "here").put(COSTS)  # another process has found the damage, too
            super()._begin_anew()

    assert Slow(path, "here").get(COSTS) == COSTS


def test_only_one_process_at_a_time_sets_a_file_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.sqlite"
    path.write_bytes(b"garbage")
    monkeypatch.setattr("lowtide.cost.cache._WAIT_SECONDS", 0.0)
    with closing(sqlite3.connect(tmp_path / "costs.sqlite.lock", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BadFile, match="database is locked"):
            CostCache(path, "here")
        assert path.read_bytes() == b"garbage"
    assert works(path)


# Refusals -------------------------------------------------------------------------------------------


def test_a_directory_in_its_place_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "costs.sqlite"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(BadFile) as refusal:
        CostCache(path, "here")
    assert str(refusal.value) == f"cannot keep costs in '{path}': it is a directory"
    assert (path / "inside").is_dir()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "costs.sqlite"
    with pytest.raises(BadFile, match=r"cannot keep costs in '.*/file/costs.sqlite': .*(exists|directory)"):
        CostCache(path, "here")


class ReadOnly(CostCache):
    """A cache that may not be written; by its connection's mode, since whoever is root may write anywhere."""

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, isolation_level=None)
        connection.text_factory = bytes
        return connection


def test_a_cache_that_may_only_be_read_is_read_and_refuses_what_is_put(path: Path) -> None:
    CostCache(path, "here").put(COSTS)
    cache = ReadOnly(path, "here")
    assert cache.get(COSTS) == COSTS
    with pytest.raises(BadFile) as refusal:
        cache.put({"a": Cost(9, 9.0, None)})
    assert str(refusal.value) == f"cannot keep costs in '{path}': attempt to write a readonly database"
    assert CostCache(path, "here").get(COSTS) == COSTS
    assert not set_aside(path).exists()


def test_a_cache_that_may_not_be_made_is_refused(path: Path) -> None:
    with pytest.raises(BadFile) as refusal:
        ReadOnly(path, "here")
    assert str(refusal.value) == f"cannot keep costs in '{path}': unable to open database file"


def test_a_file_that_stays_locked_is_refused_and_not_set_aside(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CostCache(path, "here")
    cache.put(COSTS)
    monkeypatch.setattr("lowtide.cost.cache._WAIT_SECONDS", 0.0)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BadFile, match="database is locked"):
            CostCache(path, "here")
        with pytest.raises(BadFile, match="database is locked"):
            cache.get(["a"])
        with pytest.raises(BadFile, match="database is locked"):
            cache.put({"a": Cost(9, 9.0, None)})
    assert cache.get(COSTS) == COSTS


def test_a_disk_that_is_full_loses_what_is_put_and_nothing_else(path: Path) -> None:
    class Full(CostCache):
        def _connect(self) -> sqlite3.Connection:
            connection = super()._connect()
            connection.execute("PRAGMA max_page_count = 4")
            return connection

    cache = Full(path, "here")
    cache.put(COSTS)
    with pytest.raises(BadFile, match="database or disk is full"):
        cache.put(entries())
    assert cache.get([*COSTS, *entries()]) == COSTS  # all or nothing
