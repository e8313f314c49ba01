"""A user's script, run as `python script.py` runs it."""

from __future__ import annotations

import builtins
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType

from lowtide.compat.patches import patched
from lowtide.errors import BadRequest


def compiled_script(path: str) -> CodeType:
    """The code of a script.

    Raises:
        BadRequest: there is no such file, or it is no Python; said as Python says it.
    """
    file = Path(path)
    if not file.is_file():
        raise BadRequest(f"there is no script '{path}'." if not file.exists() else f"'{path}' is not a file.")
    try:
        return compile(file.read_bytes(), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # a ValueError where there are null bytes in it
        said = "".join(traceback.format_exception_only(error)).rstrip()
        raise BadRequest(f"'{path}' is not Python that can be run.\n{said}") from None
    except OSError as error:
        raise BadRequest(f"'{path}' cannot be read: {error.strerror}.") from None


def run_script(code: CodeType, path: str, args: Sequence[str]) -> None:
    """Run it, with the world as Python would have it: `sys.argv`, `__main__`, the first place to import from.

    Whatever it raises goes through, `SystemExit` as well.
    """
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    with _as_main(module, path, args):
        exec(code, module.__dict__)


@contextmanager
def _as_main(module: ModuleType, path: str, args: Sequence[str]) -> Iterator[None]:
    world = partial(patched, why="the script's own world", since="Python 3.11")
    beside = str(Path(path).resolve().parent)
    before = sys.modules.get("__main__")
    sys.modules["__main__"] = module  # where pickle looks for what is defined in it
    try:
        with world(sys, "argv", [path, *args]), world(sys, "path", [beside, *sys.path]):
            yield
    finally:
        if before is not None:
            sys.modules["__main__"] = before


def scripts_error(error: BaseException) -> str:
    """An error of the script, told with its own frames and those below, and none of those that ran it."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != __file__:
        found = found.tb_next
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return "".join(traceback.format_exception(type(error), error, found or error.__traceback__)).rstrip()
