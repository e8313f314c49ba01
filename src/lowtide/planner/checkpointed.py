"""Checkpointing as people switch it on today: the library's own, else torch's around what repeats.

transformers   gradient_checkpointing_enable
timm           set_grad_checkpointing
blocks         torch.utils.checkpoint around every block of a kind that comes three times or more
a long row     torch.utils.checkpoint around √n stretches of the longest nn.Sequential
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import BadRequest

_REPEATS = 3  # blocks of one kind
_LONG = 6  # modules in a row


def switch_checkpointing_on(model: nn.Module) -> str:
    """Have `model` checkpoint itself, as its library does it or else with torch.utils.checkpoint; say how.

    Attributes of its modules are changed, and stay so: give it a copy.

    Raises:
        BadRequest: nothing in it repeats, and it has no long row of modules.
    """
    how = _by_its_library(model)
    if how is not None:
        return how
    blocks = _blocks(model)
    if blocks:
        for block in blocks:
            _replace_forward(block, partial(_once, block.forward))
        kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
        return f"torch.utils.checkpoint around each of {len(blocks)} blocks ({kinds})"
    row = max(_rows(model), key=len, default=())
    if len(row) < _LONG:
        raise BadRequest(
            "the model has no checkpointing of its own, no kind of block that repeats and no long "
            "nn.Sequential, so it is not clear around what to put a checkpoint"
        )
    assert isinstance(row, nn.Sequential)
    count = round(math.sqrt(len(row)))
    _replace_forward(row, partial(run_segments, list(row), count))
    return f"torch.utils.checkpoint around {count} stretches of {len(row)} modules in a row"


def run_segments(layers: Sequence[nn.Module], count: int, x: torch.Tensor) -> torch.Tensor:
    """`layers` one after the other, in `count` checkpoints of as equal lengths as can be.

    None begins with what works in place: that would change what a checkpoint has to keep.
    """
    ends = [round(part * len(layers) / count) for part in range(count + 1)]
    starts = [_next_start(layers, end) for end in ends]
    for first, stop in pairwise(starts):
        found: torch.Tensor = checkpoint(nn.Sequential(*layers[first:stop]), x, use_reentrant=False)
        x = found
    return x


def _next_start(layers: Sequence[nn.Module], first: int) -> int:
    while 0 < first < len(layers) and getattr(layers[first], "inplace", False):
        first += 1
    return first


def _by_its_library(model: nn.Module) -> str | None:
    for module in model.modules():
        found: Any = module
        if getattr(found, "supports_gradient_checkpointing", False):
            found.gradient_checkpointing_enable()
            return "transformers' gradient_checkpointing_enable"
        if hasattr(found, "set_grad_checkpointing"):
            try:
                found.set_grad_checkpointing()
            except (AssertionError, NotImplementedError):  # how timm says that this model has none
                continue
            return "timm's set_grad_checkpointing"
    return None


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of a kind that repeats."""
    kinds = Counter(type(module) for module in model.modules() if _is_block(module))
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # from the outside to the inside
        if module not in inside and _is_block(module) and kinds[type(module)] >= _REPEATS:
            found.append(module)
            inside.update(module.modules())
    return found


def _is_block(module: nn.Module) -> bool:
    """Whether it is made of several modules, but neither a row of them nor a stage with a row of blocks."""
    children = list(module.children())
    if _is_row(module) or len(children) < 2:
        return False
    return not any(_is_row(child) and sum(map(_is_block, child.children())) > 1 for child in children)


def _is_row(module: nn.Module) -> bool:
    """Whether it is a container, or has nothing but what is numbered: layer1, layer2, …"""
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return True
    names = [name for name, _ in module.named_children()]
    return len(names) > 1 and len({name.rstrip("0123456789") for name in names}) == 1


def _rows(model: nn.Module) -> Iterator[nn.Sequential]:
    yield from (module for module in model.modules() if isinstance(module, nn.Sequential))


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.__dict__["forward"] = forward


def _once(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kept = [list(each) if isinstance(each, list) else each for each in args]  # DenseNet's is added to later
    return checkpoint(forward, *kept, use_reentrant=False, **kwargs)
