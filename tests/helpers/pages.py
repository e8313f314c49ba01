"""Pages of the documentation as programs: `python tests/pages.py python|console PAGE…` runs their blocks.

    ```python              runs, all blocks of a page in one namespace
    ```python title="x"    is written to the file x
    ```text                right after such a block: what it prints
    ```console             `$ lowtide …` runs; the lines after it are what it prints, in words: numbers
                           depend on the machine. `…` stands for anything. `# exits with 1` says that it does.

`<!-- warns: … -->` says how a warning begins that another library gives, and that is no error on this page.
A block right after `<!-- not run: REASON -->` is left out. Python and commands run in processes of their own:
what one leaves alive must not be counted in the other's memory.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(
    r"(?P<mark><!-- not run: (?P<reason>[^>]+) -->\n+)?"
    r"^(?P<indent> *)```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_WARNS = re.compile(r"<!-- warns: (.+) -->")
_NUMBER = re.compile(r"\d[\d,.]*(?: (?:µs|ms|s)\b)?")  # a time in whatever unit it takes here
_ELLIPSIS = "…"


@dataclass(frozen=True)
class Block:
    """A block of a page; `follows` says that only blank lines are between it and the block before."""

    kind: str
    title: str
    text: str
    line: int
    follows: bool
    not_run: str  # the reason, or nothing


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order."""
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(page):
        lines = match["text"].splitlines()
        found.append(
            Block(
                kind=match["kind"],
                title=match["title"] or "",
                text="\n".join(line.removeprefix(match["indent"]) for line in lines) + "\n",
                line=page.count("\n", 0, match.start("kind")) + 1,
                follows=bool(found) and not page[end : match.start()].strip(),
                not_run=match["reason"] or "",
            )
        )
        end = match.end()
    return found


def agrees(shown: str, printed: str) -> bool:
    """Whether `shown` tells what was printed: the same words, any numbers, `…` for whatever there is."""
    parts = [_words(part) for part in shown.split(_ELLIPSIS)]
    return re.fullmatch(".*".join(map(re.escape, parts)), _words(printed), re.DOTALL) is not None


def _words(text: str) -> str:
    """Without figures and the spaces that align them."""
    return re.sub(r"\s+", " ", _NUMBER.sub("0", text)).strip()


def run(page: str, name: str, kind: str) -> Iterator[str]:
    """Run a page's blocks of one kind; what does not do what the page says, one message each."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None  # by the block before, if it ran
    for block in blocks(page):
        place = f"{name}:{block.line}"
        before, printed = printed, None
        if block.not_run:
            continue
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.kind == kind == "console":
            yield from _console(block, place)
        elif block.kind == kind == "python":
            printed = _printed_by(block, place, namespace)
        elif block.kind == "text" and block.follows and before not in (None, block.text):
            yield f"{place} shows\n{block.text}\nbut what is printed is\n{before}"


def _printed_by(block: Block, place: str, namespace: dict[str, Any]) -> str:
    """What a block prints. Its lines are numbered as in the page, for tracebacks."""
    code = compile("\n" * block.line + block.text, place, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        exec(code, namespace)
    return stream.getvalue()


def _console(block: Block, place: str) -> Iterator[str]:
    from click.testing import CliRunner

    from lowtide.cli import main

    text = block.text.replace("\\\n", " ")  # a line that goes on in the next
    for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = command.partition("\n")
        line, _, comment = line.partition("#")
        program, *arguments = shlex.split(line)
        if program != "lowtide":
            continue
        expected = int(found[1]) if (found := re.search(r"exits with (\d)", comment)) else 0
        result = CliRunner().invoke(main, arguments)
        if result.exit_code != expected or (shown.strip() and not agrees(shown, result.output)):
            yield f"{place}: `{line}` exits with {result.exit_code} and prints\n{result.output}"


def main() -> int:
    """Run the blocks of some pages, in the current directory."""
    kind, *paths = sys.argv[1:]
    sys.path.insert(0, "")  # files that a page has written can be imported
    code = 0
    for path in map(Path, paths):
        page = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            for message in _WARNS.findall(page):
                warnings.filterwarnings("ignore", re.escape(message))
            for problem in run(page, path.name, kind):
                print(problem, file=sys.stderr)
                code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
