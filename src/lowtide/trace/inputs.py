"""What a step is given, by name: the tensors in the example, and those that the loss closes over.

The names are those of the forward's parameters and of the loss's variables, followed by the way into nested
containers: `x`, `batch['labels']`, `target`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.compat.patches import patched
from lowtide.compat.trees import keystr, tree_leaves, tree_map_with_path
from lowtide.trace.losses import LossOfAnyBatch
from lowtide.trace.step import LossWithTargets, arguments

Change = Callable[[torch.Tensor, str], torch.Tensor]  # what takes the place of a tensor, given its name


def named_inputs(model: nn.Module, example: Any, loss: Any) -> dict[str, torch.Tensor]:
    """The tensors that a step is given, by the names that a captured graph knows them by."""
    found: dict[str, torch.Tensor] = {}

    def note(tensor: torch.Tensor, name: str) -> torch.Tensor:
        found[name] = tensor
        return tensor

    replaced(note, model, example)
    with over(note, loss):
        return found


def replaced(change: Change, model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an example stands for, every tensor changed."""
    args, kwargs = arguments(example)
    names = list(inspect.signature(model.forward).parameters)
    names += [f"argument {position}" for position in range(len(names), len(args))]
    return (
        tuple(_changed(change, thing, name) for thing, name in zip(args, names, strict=False)),
        {key: _changed(change, thing, str(key)) for key, thing in kwargs.items()},
    )


@contextmanager
def over(change: Change, loss: Any) -> Iterator[Any]:
    """`loss` with every tensor that it closes over changed, for as long as the block lasts."""
    if isinstance(loss, partial):
        with over(change, loss.func) as func:
            args = [_changed(change, thing, "target") for thing in loss.args]
            keywords = {key: _changed(change, thing, key) for key, thing in loss.keywords.items()}
            yield partial(func, *args, **keywords)
        return
    if isinstance(loss, LossOfAnyBatch):
        with (
            over(change, loss.loss) as inner,
            patched(loss, "loss", inner, why="the loss closes over a part of the batch", since="python 3.11"),
        ):
            yield loss
        return
    if isinstance(loss, LossWithTargets):
        with over(change, loss.loss) as inner:
            yield LossWithTargets(inner, tuple(_changed(change, thing, "target") for thing in loss.targets))
        return
    names = getattr(getattr(loss, "__code__", None), "co_freevars", ())
    cells = [
        (cell, cell.cell_contents, name)
        for cell, name in zip(getattr(loss, "__closure__", None) or (), names, strict=True)
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(cell.cell_contents))
    ]
    fakes = partial(patched, why="the loss closes over a part of the batch", since="python 3.11")
    with ExitStack() as patches:
        for cell, contents, name in cells:
            patches.enter_context(fakes(cell, "cell_contents", _changed(change, contents, name)))
        yield loss


def criteria(loss: Any, model: nn.Module) -> list[nn.Module]:
    """Modules that the loss is or uses, and that are no part of the model."""
    own = set(map(id, model.modules()))
    found = (thing for thing in (loss, *_captives(loss)) if isinstance(thing, nn.Module))
    return [module for module in found if id(module) not in own]


def _changed(change: Change, tree: Any, name: str) -> Any:
    return tree_map_with_path(
        lambda path, leaf: change(leaf, name + keystr(path)) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _captives(loss: Any) -> list[Any]:
    """What a loss closes over."""
    if isinstance(loss, LossOfAnyBatch | LossWithTargets):
        return [loss.loss, *_captives(loss.loss)]
    if isinstance(loss, partial):
        return [*loss.args, *loss.keywords.values(), *_captives(loss.func)]
    return [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
