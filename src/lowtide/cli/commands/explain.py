"""`lowtide explain`: how the memory of a graph is planned, step by step, for people who want to see it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.options import json_option, model_options, output_file, size, whole_number
from lowtide.cli.quiet import hush_libraries, undisturbed
from lowtide.cli.subjects import Subject, VariableShape, Wishes, subject_of

if TYPE_CHECKING:
    from lowtide.execute.trials import Trial
    from lowtide.lesson.lesson import Lesson

_ALL = "all"
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "bool")
_NAME = re.compile(r"[^\W\d][\w.]*")
_LARGEST_SIZE = 1 << 40


def _pairs(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> Mapping[str, str]:
    """'NAME=…' for several names, each once."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise click.BadParameter(
                f"'{text:.60}' is not of the form {param.make_metavar(ctx)}.", ctx, param
            )
        if name in found:
            raise click.BadParameter(f"'{name}' is given twice.", ctx, param)
        found[name] = rest
    return found


def _shapes(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> Mapping[str, VariableShape]:
    """NAME=2,3 or NAME=8:int64."""
    found: dict[str, VariableShape] = {}
    for name, text in _pairs(ctx, param, texts).items():
        numbers, _, dtype = text.partition(":")
        sizes = numbers.split(",")
        if not all(part.isascii() and part.isdigit() and 0 < int(part) < _LARGEST_SIZE for part in sizes):
            problem = f"the sizes of '{name}' are whole numbers above zero, not '{numbers:.60}'."
            raise click.BadParameter(problem, ctx, param)
        if dtype and dtype not in _DTYPES:
            raise click.BadParameter(f"'{dtype:.60}' is none of {', '.join(_DTYPES)}.", ctx, param)
        found[name] = VariableShape(tuple(map(int, sizes)), dtype or "float32")
    return found


def _numbers(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> Mapping[str, tuple[float, ...]]:
    """NAME=2, or NAME=1,2,3 for each element."""
    found: dict[str, tuple[float, ...]] = {}
    for name, text in _pairs(ctx, param, texts).items():
        try:
            found[name] = tuple(map(float, text.split(",")))
        except ValueError:
            found[name] = (math.nan,)
        if not all(map(math.isfinite, found[name])):
            raise click.BadParameter(f"'{text:.60}' is no number for '{name}', nor several.", ctx, param)
    return found


def _names(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """a,b."""
    return None if text is None else tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _steps(ctx: click.Context, param: click.Parameter, text: str) -> int | None:
    """A number of rows, or all of them."""
    return None if text == _ALL else whole_number(ctx, param, text)


@click.command("explain")
@model_options
@click.option(
    "--shape",
    "shapes",
    metavar="NAME=2,3",
    multiple=True,
    callback=_shapes,
    help="Shape of a variable, and dtype as in labels=8:int64.  [default: a number, float32]",
)
@click.option(
    "--at",
    metavar="NAME=2",
    multiple=True,
    callback=_numbers,
    help="Run it with this number, or these, and show what comes out of each op.",
)
@click.option(
    "--wrt",
    metavar="a,b",
    callback=_names,
    help="Differentiate by these.  [default: all variables, or parameters]",
)
@click.option("--backward/--no-backward", default=True, help="Extend the graph by its backward, or do not.")
@click.option(
    "--match-range",
    metavar="N",
    default="16",
    show_default=True,
    callback=whole_number,
    help="How many times too large or too small a free tag may be.",
)
@click.option("--arena", metavar="SIZE", callback=size, help="Refuse a static layout that needs more.")
@click.option(
    "--steps",
    metavar="N|all",
    default="12",
    show_default=True,
    callback=_steps,
    help="Rows to show of each end of a long table. JSON has all.",
)
@click.option("--run", is_flag=True, help="Run it in naive, pooled and static memory, and measure.")
@click.option(
    "--plot",
    metavar="FILE",
    callback=output_file(".svg", ".png", ".pdf"),
    help="Draw the graph, one colour for each piece of memory (svg, png, pdf).",
)
@json_option
def command(
    model: str,
    device: str | None,
    shapes: Mapping[str, VariableShape],
    at: Mapping[str, tuple[float, ...]],
    wrt: tuple[str, ...] | None,
    backward: bool,
    match_range: int,
    arena: int | None,
    steps: int | None,
    run: bool,
    plot: Path | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Show how memory is planned: the graph, its backward, the planner's walk, what each idea saves.

    MODEL is an expression, "exp(a*b+3)" or "h = relu(x @ w); y = sum(h)"; or mlp, a network of two
    layers; or what `lowtide fit` takes. With --layers N a model is built with N layers, where that is one
    of its sizes; of others the first N are taken, and lowtide derives the gradients of their sum itself.

    Exit code: 0 fine, 2 bad request.
    """
    from lowtide.text.progress import stages

    hush_libraries()
    _check_can_draw(plot)
    given = {name: value for name, value in sizes.items() if value is not None}
    wishes = Wishes(model, given, device, shapes, wrt, backward)
    with undisturbed(), stages() as stage:
        subject = subject_of(wishes, stage)
        stage.begin("planning its memory")
        lesson = _lesson(subject, match_range, arena, at)
        stage.begin("running it" if run else "drawing it")
        trials = _trials(lesson) if run else ()
        picture = None if plot is None else _picture(subject, lesson, plot)
    _write(picture, plot)
    _answer(subject, lesson, trials, steps, as_json)


def _check_can_draw(plot: Path | None) -> None:
    from lowtide.report.picture.drawing import require_drawing

    if plot is not None:
        require_drawing()


def _lesson(
    subject: Subject, match_range: int, arena: int | None, at: Mapping[str, tuple[float, ...]]
) -> Lesson:
    from lowtide.lesson.lesson import lesson_of, with_numbers

    lesson = lesson_of(subject.graph, match_range=match_range, arena_bytes=arena)
    if not at:
        return lesson
    from lowtide.execute.trials import numbers_of

    return with_numbers(lesson, numbers_of(lesson.graph, at))


def _trials(lesson: Lesson) -> tuple[Trial, ...]:
    from lowtide.execute.trials import trials

    return trials(lesson.graph)


def _picture(subject: Subject, lesson: Lesson, plot: Path) -> bytes:
    from lowtide.report.picture.drawing import draw_lesson

    return draw_lesson(lesson, plot.suffix.lower().removeprefix("."), title=subject.title)


def _write(picture: bytes | None, plot: Path | None) -> None:
    from lowtide.report.picture.plot import write_picture

    if picture is not None and plot is not None:
        write_picture(picture, plot)


def _answer(
    subject: Subject, lesson: Lesson, trials: tuple[Trial, ...], steps: int | None, as_json: bool
) -> None:
    from lowtide.report.text.lesson import print_lesson

    if not as_json:
        print_lesson(subject.title, lesson, trials, steps=steps, notes=subject.notes)
        return
    document: dict[str, Any] = {
        "title": subject.title,
        "sizes": dict(subject.sizes),
        "device": lesson.graph.device,
        **lesson.to_json(),
        **({"trials": [asdict(trial) for trial in trials]} if trials else {}),
        "notes": list(subject.notes),
    }
    click.echo(json.dumps(document, indent=2))
