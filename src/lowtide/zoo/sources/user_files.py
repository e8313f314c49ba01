"""A user's own model: path/to/file.py:function, where the function returns (model, example[, loss])."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from lowtide.errors import BadRequest, LowtideError
from lowtide.trace.step import declared
from lowtide.trace.user_lines import shortened
from lowtide.zoo.setup import Setup

_EXPECTED = (
    "Expected (model, example) or (model, example, loss): a torch.nn.Module, a tuple of its arguments "
    "or a dict of its keyword arguments, and a function that makes a loss of its output, or of "
    "its output and what comes last in the tuple."
)


def from_file(path: str, function: str, sizes: Mapping[str, int]) -> Setup:
    """Run `path`, call `function` in it and return what it set up.

    `sizes` are handed over as keyword arguments where the function takes them; a note names the others.
    """
    file = Path(path)
    if not file.is_file():
        raise BadRequest(f"there is no file '{path}'." if not file.exists() else f"'{path}' is not a file.")
    name = f"{path}:{function}"
    with _importing_beside(file):
        build = _function(_run(file), function, path)
        offered = {size: value for size, value in sizes.items() if _takes(build, size)}
        _check_call(build, offered, name)
        with _the_users_code(name):
            returned = build(**offered)
    ignored = [size for size in sizes if size not in offered]
    note = f"{name} takes no {' or '.join(ignored)}, so what was asked for had no effect"
    return _setup(name, returned, offered, (note,) if ignored else ())


def _run(file: Path) -> ModuleType:
    """The file as a module. Nothing is written beside it, as importing it would."""
    module = ModuleType(f"_lowtide_user_{file.stem}")
    module.__file__ = str(file)
    with _the_users_code(str(file)):
        code = compile(file.read_bytes(), str(file), "exec")
        sys.modules[module.__name__] = module  # dataclasses and pickle look modules up by name
        try:
            exec(code, module.__dict__)
        except BaseException:
            del sys.modules[module.__name__]
            raise
    return module


def _function(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    found = getattr(module, name, None) if name else None
    if callable(found):
        return found  # type: ignore[no-any-return]
    own = [
        key
        for key, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__
    ]
    there = f"It has {', '.join(own)}." if own else "It defines no functions."
    problem = f"'{path}' has no function '{name}'." if name else "which function builds the model?"
    raise BadRequest(f"{problem} {there} Write {path}:{own[0] if own else 'function'}.")


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    parameters = inspect.signature(function).parameters
    named = keyword in parameters and parameters[keyword].kind is not inspect.Parameter.POSITIONAL_ONLY
    return named or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _check_call(function: Callable[..., Any], offered: Mapping[str, int], name: str) -> None:
    try:
        inspect.signature(function).bind(**offered)
    except TypeError as error:
        raise BadRequest(
            f"cannot call {name}: {error}. It may take batch, image, tokens, classes, layers, width, heads "
            "and vocab, as given on the command line; everything else needs a default."
        ) from None


def _setup(name: str, returned: object, sizes: Mapping[str, int], notes: tuple[str, ...]) -> Setup:
    parts = returned if isinstance(returned, tuple) else ()
    if len(parts) in (2, 3):
        model, example, loss = (*parts, None)[:3]
        right = isinstance(model, nn.Module) and isinstance(example, (tuple, dict))
        if right and (loss is None or callable(loss)):
            given, whole = declared(example, loss)
            assert isinstance(given, (tuple, dict))
            return Setup(name, model, given, whole, sizes, notes)
    kinds = ", ".join(type(part).__name__ for part in parts)
    back = f"a tuple ({kinds})" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
    raise BadRequest(f"{name} returned {back}. {_EXPECTED}")


@contextmanager
def _the_users_code(name: str) -> Iterator[None]:
    try:
        yield
    except LowtideError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and must not end ours
        below = error.__traceback__
        while below is not None and below.tb_frame.f_code.co_filename == __file__:
            below = below.tb_next
        raise BadRequest(f"{name} raised an error.\n{shortened(error.with_traceback(below))}") from error


@contextmanager
def _importing_beside(file: Path) -> Iterator[None]:
    """Let the file import its neighbours, as it could if it were run by itself."""
    before = list(sys.path)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        yield
    finally:
        sys.path[:] = before
