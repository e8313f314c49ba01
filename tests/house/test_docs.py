"""The documentation: every block runs, every quotation is one, every link leads somewhere."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import lowtide
from tests.helpers.effort import long_but
from tests.helpers.pages import agrees, blocks, run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "lowtide"
README = ROOT / "README.md"
SITE_PAGES = sorted(DOCS.rglob("*.md"))
NAMES = [str(page.relative_to(DOCS)) for page in SITE_PAGES]
QUICK_NAMES = [
    name for name in NAMES if name != "methods/index.md"
]  # which repeats what every method answers
PAGES = [README, *SITE_PAGES]
MOST_LINES = 150  # of the README
METHODS = [*lowtide.methods(), *lowtide.schedulers()]
LARGEST_PICTURE = 60_000


def has(page: Path, kind: str) -> bool:
    return any(block.kind == kind and not block.not_run for block in blocks(page.read_text(encoding="utf-8")))


def together(page: Path) -> str:
    """Pages that run in one process: those of methods measure nothing, and are many."""
    return "methods" if page.parent.name == "methods" else str(page.relative_to(ROOT))


RUNNABLE = [
    (name, kind, tuple(page for page in PAGES if together(page) == name and has(page, kind)))
    for name in dict.fromkeys(map(together, PAGES))
    for kind in ("python", "console")
]
RUNNABLE = [entry for entry in RUNNABLE if entry[2]]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts beside the pages can be imported."""
    monkeypatch.syspath_prepend(DOCS)


def script(name: str) -> ModuleType:
    return import_module(name)


# The runner itself ------------------------------------------------------------------------------------

PAGE = """
```python
x = 1
print(x)
```

```text
1
```

Some words.

```text
not what is printed
```

<!-- not run: needs a GPU -->
```python
1 / 0
```

```python title="mine.py"
y = 2
```

```python
from mine import y
print(x + y)
```

```text
4
```

<!-- not run: neither -->
```python
2 / 0
```

```text
whatever
```
"""


def test_blocks_are_found_with_their_kind_and_place() -> None:
    found = blocks(PAGE)
    assert [block.kind for block in found] == [
        "python",
        "text",
        "text",
        "python",
        "python",
        "python",
        "text",
        "python",
        "text",
    ]
    assert [block.line for block in found] == [2, 7, 13, 18, 22, 26, 31, 36, 40]
    assert [block.follows for block in found] == [False, True, False, *[True] * 6]
    assert [block.not_run for block in found if block.not_run] == ["needs a GPU", "neither"]


def test_a_page_runs_in_one_namespace_and_what_it_prints_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert list(run(PAGE, "page.md", "python")) == [
        "page.md:31 shows\n4\n\nbut what is printed is\n3\n",
    ]


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("peak 1.5 MiB", "peak  12,345.0 MiB\n", True),
        ("peak 1.5 MiB", "peak 1.5 GiB", False),
        ("first\n…\nlast 3", "first\nmore\nand more\nlast 4", True),
        ("first\n…\nlast", "first\nmore", False),
        ("first", "first\nsecond", False),
    ],
)
def test_what_a_command_prints_agrees_in_words_and_not_in_numbers(
    shown: str, printed: str, expected: bool
) -> None:
    assert agrees(shown, printed) is expected


def test_a_command_that_exits_or_prints_otherwise_is_found() -> None:
    page = "```console\n$ lowtide zoo    # exits with 1\n```\n\n```console\n$ lowtide zoo\nnothing\n```\n"
    problems = list(run(page, "page.md", "console"))
    assert [problem.splitlines()[0].split("`")[0] for problem in problems] == ["page.md:1: ", "page.md:5: "]
    assert not list(run("```console\n$ lowtide \\\n    zoo\nalexnet …\n```\n", "page.md", "console"))


# Pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "pages"),
    [
        pytest.param(
            kind, pages, id=f"{name}-{kind}", marks=pytest.mark.long if "integrations" in name else []
        )
        for name, kind, pages in RUNNABLE
    ],
)
def test_every_block_of_a_page_does_what_the_page_says(
    kind: str, pages: tuple[Path, ...], tmp_path: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "tests" / "helpers" / "pages.py"), kind, *map(str, pages)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
        capture_output=True,
        text=True,
        timeout=3600,  # a hang is a failure
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_every_page_with_code_is_run() -> None:
    run_pages = {page for _, _, pages in RUNNABLE for page in pages}
    assert len(run_pages) > len(METHODS)
    assert run_pages == {page for page in PAGES if has(page, "python") or has(page, "console")}


def test_blocks_that_do_not_run_say_why_and_are_few() -> None:
    reasons = [block.not_run for page in PAGES for block in blocks(page.read_text()) if block.not_run]
    assert len(reasons) == 5, reasons


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("name", long_but(["../README.md", *NAMES], "../README.md", *QUICK_NAMES))
def test_what_a_page_repeats_of_the_code_is_up_to_date(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == script("fill").filled(text), "run `python docs/fill.py`"


@pytest.mark.usefixtures("scripts")
def test_stale_text_between_the_marks_is_replaced() -> None:
    page = "before\n<!-- fill: facts chen-sqrt -->\nold\n<!-- filled -->\nafter\n"
    now = script("fill").filled(page)
    assert "old" not in now
    assert "| **time** | O(√n) |" in now
    assert now.startswith("before\n<!-- fill: facts chen-sqrt -->\n\n")
    assert now.endswith("\n\n<!-- filled -->\nafter\n")
    assert script("fill").filled(now) == now


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_page_with_its_facts_and_its_picture(method: str) -> None:
    text = (DOCS / "methods" / f"{method}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {method}: ")
    assert f"<!-- fill: facts {method} -->" in text
    assert "**Choose it**" in text


def test_the_pages_name_every_public_name_and_every_command() -> None:
    from lowtide.cli import _COMMANDS

    python, cli = ((DOCS / page).read_text(encoding="utf-8") for page in ("python.md", "cli.md"))
    named = set(re.findall(r"^`lowtide\.(\w+)", python, re.MULTILINE))
    assert named == set(lowtide.__all__) - {"__version__"}
    assert re.findall(r"^## lowtide (\w+)$", cli, re.MULTILINE) == list(_COMMANDS)


# The front door ---------------------------------------------------------------------------------------


def test_the_readme_is_short_and_has_what_somebody_out_of_memory_looks_for() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert "CUDA out of memory" in text.partition("\n## ")[0]
    assert text.count("![") == 1
    assert text.index("![") < text.index("\n## ")
    found = blocks(text)
    assert [block.kind for block in found] == ["console", "python"]
    assert not any(block.not_run for block in found)
    assert "lowtide.optimize(" in found[1].text
    assert all(command in text for command in ("pip install lowtide", "make demo", "make test"))


def test_the_readme_says_where_lowtide_stands_the_rows_that_it_loses_included() -> None:
    text = README.read_text(encoding="utf-8")
    (head,) = re.findall(r"^\| MiB / ms \|.+$", text, re.MULTILINE)
    assert head.count("bf16") >= 2
    rows = re.findall(r"^\| (.+?) \|.*\d / .*\d.*\|$", text, re.MULTILINE)
    wanted = ("eager", "`torch.compile`", "checkpointing", "chunked loss", "lowtide, lowest")
    assert all(any(words in row for row in rows) for words in wanted), rows


def test_the_readme_leads_to_every_page_but_those_of_single_methods() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#]+\.md)", README.read_text(encoding="utf-8")))
    assert linked == {
        name for name in NAMES if name != "index.md" and Path(name).parent.name != "methods"
    } | {"methods/index.md"}


@pytest.mark.parametrize("page", PAGES, ids=["README.md", *NAMES])
def test_what_a_page_names_in_the_repository_is_there(page: Path) -> None:
    """Relative links of every page, and benchmarks and their results, which pages of the site only name."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`(benchmarks/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_the_files_to_read_first_are_there() -> None:
    text = (DOCS / "source.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert len(named) > 30
    assert [name for name in named if not (SOURCE / name).exists()] == []


@pytest.mark.usefixtures("scripts")
def test_the_table_of_where_lowtide_stands_tells_the_rows_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands = script("stands")
    monkeypatch.setattr(stands, "BENCHMARKS", tmp_path / "benchmarks")
    run = tmp_path / "benchmarks" / "any" / "standing-2026-01-02.json"
    run.parent.mkdir(parents=True)
    for name in (
        run,
        run.with_name("standing-2026-01-01.json"),
        run.with_name("standing-2026-01-03-cpu.json"),
    ):
        name.touch()
    row = {"subject": "tiny, bf16"}
    rows = [
        {**row, "label": "eager", "peak_bytes": 3000 << 20, "ms": 7.0},
        {**row, "label": "lowtide, lowest", "peak_bytes": 2 << 20, "ms": 12.4},
        {**row, "label": "own checkpointing", "error": "no", "failure": "InfeasibleBudget"},
        {**row, "label": "torch.compile, budget 0.5", "error": "no", "failure": "ProcessEnded"},
        {**row, "label": "torch.compile", "peak_bytes": 9 << 20, "ms": 11.0},
        {**row, "label": "torch.compile", "peak_bytes": 9 << 20, "ms": 13.0},
    ]
    earlier = [{**row, "label": "torch.compile, budget 0.5", "peak_bytes": 4 << 20, "ms": 8.0}]
    machine = {"device": "A GPU", "torch": "2.13", "date": "2026-01-02"}
    found = stands.table({"rows": rows, "earlier": earlier, "machine": machine})
    assert "| MiB / ms | tiny, bf16 |\n|---|--:|\n| eager | 3,000 / **7** |\n" in found
    assert "\n| lowtide, lowest | **2** / 12 |\n" in found
    assert "\n| the library's own checkpointing | does not fit |\n" in found
    assert "\n| `torch.compile` | 9 / 13 |\n" in found  # the later one
    assert "\n| … with a chunked loss, as in Liger | – |\n" in found
    assert "memory budget at 0.5 | 4 / 8 † |\n" in found
    assert found.endswith("† of an earlier run, in the same way, at commit 69bf53f.")
    assert "A GPU, torch 2.13, 2026-01-02" in found
    assert "(benchmarks/any/standing-2026-01-02.md)" in found


@pytest.mark.usefixtures("scripts")
def test_the_sentence_of_what_one_line_did_has_four_measured_rows() -> None:
    ways = ("eager", "own checkpointing", "lowtide, within own checkpointing's peak", "lowtide, lowest")
    rows = [
        {"subject": "convnext_base, bf16", "label": way, "peak_bytes": (4 - place) << 30, "ms": 10.4 + place}
        for place, way in enumerate(ways)
    ]
    measured = [{**row, "first_seconds": 1.0} for row in rows[:3]]
    again = {**measured[1], "ms": 15.4}
    document = {"rows": [*measured, again], "earlier": rows[3:], "machine": {"device": "A GPU"}}
    said = " ".join(script("stands").sentence(document).split())
    assert "measured on an A GPU: 4,096 MiB in 10 ms as it is written; 2,048 MiB in 12 ms within" in said
    assert "which takes 3,072 MiB in 11 to 15 ms; 1,024 MiB in 13 ms † at the lowest." in said


@pytest.mark.usefixtures("scripts")
def test_the_names_of_the_ways_are_those_of_the_benchmark() -> None:
    from benchmarks.standing.report import WAYS

    assert set(script("stands").WAYS) == set(WAYS)


# Quotations -------------------------------------------------------------------------------------------


def messages(source: str) -> Iterator[str]:
    """Every string in a module, with … for what is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def all_messages() -> tuple[str, ...]:
    return tuple(text for file in SOURCE.rglob("*.py") for text in messages(file.read_text(encoding="utf-8")))


def is_quoted_from(quotation: str, texts: tuple[str, ...]) -> bool:
    wanted = re.compile(".*".join(re.escape(part.strip()) for part in quotation.split("…")), re.DOTALL)
    return any(wanted.search(text) for text in texts)


TROUBLES = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
QUOTATIONS = [
    *re.findall(r"^> (.+)$", TROUBLES, re.MULTILINE),
    *(
        found
        for row in re.findall(r"^\| .+$", TROUBLES, re.MULTILINE)
        for found in re.findall(r'"(.+?)"', row)
    ),
]


@pytest.mark.parametrize("quotation", QUOTATIONS)
def test_a_message_that_is_quoted_is_one_that_lowtide_says(quotation: str) -> None:
    assert is_quoted_from(quotation, all_messages())


def test_a_message_that_nobody_says_is_not_found() -> None:
    said = tuple(messages('raise E(f"no plan of {m} fits in " f"{b}: too small")'))
    assert is_quoted_from("no plan of … fits in …: too small", said)
    assert not is_quoted_from("no plan of … fits into …", said)


def test_every_kind_of_error_is_explained() -> None:
    kinds = {
        name
        for name in lowtide.__all__
        if isinstance(thing := getattr(lowtide, name), type) and issubclass(thing, lowtide.LowtideError)
    }
    assert len(QUOTATIONS) > 30
    assert {name for name in kinds if f"`{name}`" not in TROUBLES} == set()


# Pictures ---------------------------------------------------------------------------------------------


@cache
def words_in(picture: bytes) -> tuple[str, ...]:
    return tuple(re.findall(r"<text[^>]*>([^<]*)</text>", picture.decode()))


@pytest.mark.usefixtures("scripts")
@pytest.mark.long
def test_the_pictures_say_what_would_be_drawn_now() -> None:
    drawn = script("draw").pictures()
    assert {path.name for path in (DOCS / "pictures").iterdir()} == set(drawn)
    for name, draw in drawn.items():
        there = (DOCS / "pictures" / name).read_bytes()
        assert words_in(there) == words_in(draw()), f"{name}: run `python docs/draw.py`"
        assert words_in(there)
        assert len(there) < LARGEST_PICTURE


@pytest.mark.usefixtures("scripts")
def test_the_chain_on_the_pages_is_the_one_that_is_drawn() -> None:
    namespace: dict[str, object] = {}
    exec(blocks((DOCS / "methods" / "index.md").read_text(encoding="utf-8"))[0].text, namespace)
    chain, drawn = namespace["chain"], script("example").twelve_layers()
    assert isinstance(chain, lowtide.Chain)
    assert (chain.d.tolist(), chain.forward_seconds) == (drawn.d.tolist(), drawn.forward_seconds)
    assert (chain.s.tolist(), chain.backward_seconds) == (drawn.s.tolist(), drawn.backward_seconds)


# The site ---------------------------------------------------------------------------------------------


Site = tuple[Path, "subprocess.CompletedProcess[str]"]


def built(source: Path, folder: Path) -> Site:
    """A site, as `make docs` builds it, and what building it said."""
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    return folder, subprocess.run(
        [*command, "--doctree-dir", f"{folder}-doctrees", str(source), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return built(DOCS, tmp_path_factory.mktemp("site"))


def test_the_site_is_built_without_a_warning(site: Site) -> None:
    folder, result = site
    assert (result.returncode, result.stderr) == (0, "")
    assert all((folder / Path(name).with_suffix(".html")).exists() for name in NAMES)
    assert not list(folder.rglob("*.py"))


def test_a_site_with_something_broken_is_not_built(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    for name in ("conf.py", "site.css"):
        (source / name).write_bytes((DOCS / name).read_bytes())
    broken = ("[a](nowhere.md)", "[b](other.md#nowhere)", "![c](nowhere.svg)")
    (source / "index.md").write_text("# Index\n\n" + "\n\n".join(broken) + "\n", encoding="utf-8")
    (source / "other.md").write_text("# In no table of contents\n", encoding="utf-8")
    _, result = built(source, tmp_path / "site")
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if "WARNING" in line]
    said = ("'nowhere.md'", "'nowhere'", "nowhere.svg", "isn't included in any toctree")
    assert all(any(words in line for line in lines) for words in said), result.stderr


def test_the_site_fetches_nothing_from_elsewhere(site: Site) -> None:
    folder, _ = site
    outside = re.compile(
        r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|<link[^>]+href=["']?https?://|@import"""
    )
    pages = list(folder.rglob("*.html"))
    assert len(pages) >= len(SITE_PAGES)
    for page in pages:
        assert not outside.search(page.read_text(encoding="utf-8")), page
    for sheet in folder.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_every_page_is_found_from_the_navigation_of_every_page(site: Site) -> None:
    folder, _ = site
    pages = {folder / Path(name).with_suffix(".html") for name in NAMES}
    for page in pages:
        links = re.findall(r'href="([^"#:]+\.html)"', page.read_text(encoding="utf-8"))
        assert pages - {page} <= {Path(os.path.normpath(page.parent / link)) for link in links}, page


@pytest.mark.usefixtures("scripts")
def test_the_table_of_compiled_training_tells_the_lowest_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = script("peers")
    monkeypatch.setattr(peers, "BENCHMARKS", tmp_path / "benchmarks")
    run = tmp_path / "benchmarks" / "any" / "compiled-2026-01-02.json"
    run.parent.mkdir(parents=True)
    assert peers.filled("table") == ""  # and where nothing was measured on a GPU
    run.with_name("compiled-2026-01-03-cpu.json").touch()
    assert peers.filled("table") == ""
    figures = {"eager": (3000, 7.0), "compile 0.5": (900, 5.0), "compile 0": (950, 6.0)}
    figures |= {"lowtide, lowest": (800, 9.0), "lowtide tiles, lowest": (500, 10.4)}
    rows = [
        {"subject": "tiny, bf16", "label": label, "peak_bytes": mib << 20, "ms": ms}
        for label, (mib, ms) in figures.items()
    ]
    rows.append({"subject": "tiny, bf16", "label": "checkpointing", "error": "no"})
    machine = {"device": "A GPU", "torch": "2.13", "date": "2026-01-02"}
    run.write_text(json.dumps({"rows": rows, "machine": machine}), encoding="utf-8")
    found = peers.filled("table")
    assert "\n| tiny, bf16 | 3,000, 7 | – | – | 900, 5 | – | 500, 10 | – | – |\n" in found
    assert "A GPU, torch 2.13, 2026-01-02" in found
    assert "(benchmarks/any/compiled-2026-01-02.md)" in found
