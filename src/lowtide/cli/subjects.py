"""What `lowtide explain` explains: an expression, the two-layer network, a model, or its first layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lowtide.cli.preparing import default_device, load_model
from lowtide.errors import BadRequest

if TYPE_CHECKING:
    from lowtide.ir.graph import Graph
    from lowtide.text.progress import Stages
    from lowtide.zoo.setup import Setup

_TWO_LAYERS = "mlp"
_OPERATORS = re.compile(r"[-+*/@()=]")
_LIBRARIES = ("hf:", "torchvision:", "timm:")
_FILE = re.compile(r"\.py(:\w*)?$")
_LAYERS = "layers"


@dataclass(frozen=True)
class VariableShape:
    """What a variable of an expression looks like."""

    sizes: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Wishes:
    """What is asked for, and what of it."""

    model: str
    sizes: Mapping[str, int]
    device: str | None
    shapes: Mapping[str, VariableShape]
    wrt: tuple[str, ...] | None
    backward: bool


@dataclass(frozen=True)
class Subject:
    """A graph to explain, and how it came about."""

    title: str
    graph: Graph
    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()


def subject_of(wishes: Wishes, stage: Stages) -> Subject:
    """The graph that was asked for.

    Raises:
        BadRequest: options do not go together, or name something that is not there. Also its subclasses, for
            models, expressions and gradients that there are not.
        CannotCapture: the model cannot be captured.
    """
    if is_expression(wishes.model):
        return _expression(wishes)
    if wishes.shapes:
        raise BadRequest(f"--shape is for variables of an expression, and '{wishes.model}' is a model.")
    return _two_layers(wishes) if wishes.model.lower() == _TWO_LAYERS else _model(wishes, stage)


def is_expression(text: str) -> bool:
    """Whether a text names no model and no file, and has operators in it."""
    named = text.lower().startswith(_LIBRARIES) or _FILE.search(text) is not None
    return not named and _OPERATORS.search(text) is not None


# Expressions ----------------------------------------------------------------------------------------------


def _expression(wishes: Wishes) -> Subject:
    from lowtide.autodiff.expression import graph_of
    from lowtide.autodiff.parse import parse

    if wishes.sizes:
        raise BadRequest(
            f"an expression has no {next(iter(wishes.sizes))}. Give its variables shapes: --shape a=2,3."
        )
    shapes = {name: shape.sizes for name, shape in wishes.shapes.items()}
    dtypes = {name: shape.dtype for name, shape in wishes.shapes.items()}
    found = parse(wishes.model, shapes, dtypes=dtypes)
    graph = graph_of(*found, name=wishes.model, device=wishes.device or "cpu")
    grown, notes = _extended(graph, tuple(tensor for _, tensor in graph.results), wishes)
    return Subject(wishes.model, grown, {}, notes)


def _two_layers(wishes: Wishes) -> Subject:
    from lowtide.lesson.networks import two_layer_mlp
    from lowtide.zoo.setup import refuse_strays

    refuse_strays(_TWO_LAYERS, wishes.sizes, ("batch", "width", "classes"))
    graph, loss, _ = two_layer_mlp(**wishes.sizes)
    grown, notes = _extended(replace(graph, device=wishes.device or "cpu"), (loss,), wishes)
    sizes = ", ".join(f"{name} {value}" for name, value in wishes.sizes.items())
    return Subject(f"{graph.name}, {sizes}" if sizes else graph.name, grown, wishes.sizes, notes)


# Models ---------------------------------------------------------------------------------------------------


def _model(wishes: Wishes, stage: Stages) -> Subject:
    from lowtide.aot.capture import capture
    from lowtide.autodiff.reverse import forward_part
    from lowtide.lesson.excerpts import first_layers
    from lowtide.lesson.phrasing import distinctly_named
    from lowtide.report.text.terminal import asked

    setup, count = _loaded(wishes)
    if count is None and wishes.wrt is not None:
        raise BadRequest(
            "--wrt is for graphs that lowtide differentiates itself: a captured step has the gradients that "
            "it has. Give --layers too, or an expression."
        )
    stage.begin("capturing its ops")
    device = wishes.device or default_device()
    graph = capture(setup.model, setup.example, setup.loss, device=device, name=setup.name)
    title, notes = asked(setup.name, setup.sizes, None, graph.device), (*graph.notes, *setup.notes)
    if count is None:
        return Subject(title, graph if wishes.backward else forward_part(graph), setup.sizes, notes)
    excerpt = first_layers(graph, count)
    ends = frozenset(excerpt.graph.tensors[tensor].value for tensor in excerpt.ends)
    first = excerpt.graph if wishes.backward else replace(excerpt.graph, outputs=ends)
    grown, more = _extended(distinctly_named(first), excerpt.ends, wishes)
    shown = f"the first {len(excerpt.layers)} of {excerpt.of} layers, up to {excerpt.layers[-1]}"
    return Subject(f"{title}: {shown}", grown, setup.sizes, (*notes, *more))


def _loaded(wishes: Wishes) -> tuple[Setup, int | None]:
    """The model, and how many of its first layers are to be taken; None if it was built with as many."""
    count = wishes.sizes.get(_LAYERS)
    others = {name: value for name, value in wishes.sizes.items() if name != _LAYERS}
    if count is None:
        return load_model(wishes.model, others), None
    if _may_have_layers(wishes.model):
        setup = load_model(wishes.model, wishes.sizes)
        if _LAYERS in setup.sizes:  # a function in a user's file may not take it
            return setup, None
    return load_model(wishes.model, others), count


def _may_have_layers(model: str) -> bool:
    """Whether the number of layers is one of the model's sizes."""
    from lowtide.zoo import REGISTRY, known_as

    if known_as(model) in REGISTRY:
        return _LAYERS in REGISTRY[known_as(model)].defaults
    return model.lower().startswith("hf:") or _FILE.search(model) is not None


# Both -----------------------------------------------------------------------------------------------------


def _extended(graph: Graph, outputs: tuple[int, ...], wishes: Wishes) -> tuple[Graph, tuple[str, ...]]:
    """The graph with its backward, if that is wanted, and what to know about that."""
    from lowtide.lesson.excerpts import differentiable, extended

    if not wishes.backward:
        if wishes.wrt is not None:
            raise BadRequest("--wrt says by what to differentiate, and --no-backward not to. Leave one out.")
        return graph, ()
    given = [graph.values[value].name for value in graph.resident]
    for name in wishes.wrt or ():
        if name not in given:
            raise BadRequest(
                f"'{name}' is not given, so there is no gradient by it. Given are: {', '.join(given)}."
            )
    grown = extended(graph, outputs, wishes.wrt or differentiable(graph))
    summed = len(grown.results) > len(graph.results) and any(name == "total" for name, _ in grown.results)
    return grown, ("the gradients are those of 'total', the sum of all results",) if summed else ()
