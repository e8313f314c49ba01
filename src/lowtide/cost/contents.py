"""Numbers that decide how much an op does, and how large its results are: as many as the graph says.

Where the batch decides and the graph does not say, they are those that make the kernel take most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

Shapes: TypeAlias = Sequence[tuple[int, ...]]  # of an op's results
Fill: TypeAlias = Callable[[Sequence[Any], Shapes], None]


def is_sized_by_numbers(target: str) -> bool:
    """Whether the sizes of an op's results may depend on numbers among its arguments."""
    return target in _FILLS and target not in _OF_WORKSPACES


def fill_decisive(target: str, args: Sequence[Any], results: Shapes) -> None:
    """Write into the made-up arguments of an op the numbers that make its `results` as large as they are."""
    fill = _FILLS.get(target)
    if fill is not None:
        fill(args, results)


def _grouped_product(args: Sequence[Any], _: Shapes) -> None:
    """Where each expert's rows end: the most workspace is taken where one expert has them all."""
    left, right, ends = (*args, None)[:3]
    if ends is None:
        return
    if left.dim() == right.dim():
        rows = left.shape[1]  # what is summed over is in groups
    else:
        rows = left.shape[0] if left.dim() == 2 else right.shape[1]
    ends.fill_(rows)


def _index(args: Sequence[Any], results: Shapes) -> None:
    masks = [(place, each) for place, each in enumerate(args[1]) if each is not None]
    for place, mask in masks:
        if mask.dtype in (torch.bool, torch.uint8):
            _choose(mask, results[0][place] if len(masks) == 1 else mask.numel())


def _first_chosen(args: Sequence[Any], results: Shapes) -> None:
    _choose(args[0], results[0][0])


def _mask_chosen(args: Sequence[Any], results: Shapes) -> None:
    _choose(args[1], results[0][0])


def _choose(mask: torch.Tensor, count: int) -> None:
    """The first `count` elements, and no others."""
    mask.copy_((torch.arange(mask.numel()) < count).view(mask.shape))


def _counted(args: Sequence[Any], results: Shapes) -> None:
    args[0].fill_(results[0][0] - 1)


def _all_different(args: Sequence[Any], _: Shapes) -> None:
    args[0].copy_(torch.arange(args[0].numel()).view(args[0].shape))


def _ctc_loss(args: Sequence[Any], results: Shapes) -> None:
    """The first target is the longest; where all lie in one row, the others share what is left."""
    scores, targets, steps, lengths = args[:4]
    longest = (results[1][-1] - 1) // 2
    steps.fill_(scores.shape[0])
    targets.fill_(min(1, scores.shape[-1] - 1))
    left = targets.numel() - longest
    others = longest if targets.dim() == 2 else min(longest, left // max(1, lengths.numel() - 1))
    lengths.fill_(others)
    lengths.view(-1)[:1] = longest


def _bags(args: Sequence[Any], _: Shapes) -> None:
    """Where each bag begins: none is empty if there are enough indices, for an empty one takes nothing."""
    indices, offsets = args[1:3]
    number = torch.arange(offsets.numel(), device=offsets.device)
    offsets.copy_(number * indices.numel() // max(1, offsets.numel()))


_OF_WORKSPACES: Mapping[str, Fill] = {  # whose numbers decide on workspaces, and on the sizes of no results
    "aten._grouped_mm.default": _grouped_product,
    "aten._embedding_bag.default": _bags,
}
_FILLS: Mapping[str, Fill] = {
    **_OF_WORKSPACES,
    "aten.index.Tensor": _index,
    "aten.nonzero.default": _first_chosen,
    "aten.nonzero_numpy.default": _first_chosen,
    "aten.masked_select.default": _mask_chosen,
    "aten.bincount.default": _counted,
    "aten._unique2.default": _all_different,
    "aten.unique_dim.default": _all_different,
    "aten.unique_consecutive.default": _all_different,
    "aten._ctc_loss.Tensor": _ctc_loss,
}
