"""The model, the batch and the loss that a recipe stands for: equal ones whenever it is built again."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fuzz.images import IMAGES
from benchmarks.fuzz.oddities import ODDITIES
from benchmarks.fuzz.parts import Part
from benchmarks.fuzz.recipe import AUTOCAST, FLOAT64, IMAGE, Ingredient, Recipe
from benchmarks.fuzz.sequences import SEQUENCES
from benchmarks.fuzz.wrappings import WRAPPINGS
from lowtide.trace.losses import tensors_of
from lowtide.trace.step import Arguments, Loss

_WORDS = 16


@dataclass(frozen=True)
class Subject:
    """A model, a batch for it, a loss of its output, and what the forward runs within."""

    model: nn.Module
    example: Arguments
    loss: Loss | None
    context: Callable[[], AbstractContextManager[Any]]
    targets: tuple[Tensor, ...]  # that the loss closes over

    @property
    def batch(self) -> list[Tensor]:
        """The tensors that the model is called with."""
        given = (*self.example.args, *self.example.kwargs.values())
        return [thing for thing in given if isinstance(thing, Tensor)]


def built(recipe: Recipe) -> Subject:
    """The subject; an equal one every time."""
    torch.manual_seed(recipe.seed)
    inside = recipe.loss == "inside"
    model = Model(recipe).train()
    if recipe.kind == FLOAT64:
        model = model.double()
    if recipe.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    example = _example(recipe)
    loss, targets = (None, ()) if inside else _loss(recipe)
    context = nullcontext if recipe.kind != AUTOCAST else _autocast
    return Subject(model, example, loss, context, targets)


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Model(nn.Module):
    """A stem, the parts in a row, and what is made of the last."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        c = recipe.channels
        tokens = recipe.inputs == "tokens"
        self.stem: nn.Module = nn.Conv2d(3, c, 1) if recipe.trunk == IMAGE else nn.Linear(3, c)
        if tokens:
            self.stem = nn.Embedding(_WORDS, c, padding_idx=0)
        self.parts = nn.ModuleList(_part(ingredient, recipe) for ingredient in recipe.ingredients)
        self.second = nn.Linear(c, 2)
        self.recipe = recipe

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Any:
        if self.recipe.inputs == "changed in place":
            x.mul_(0.9)
        h = self.stem(x)
        if mask is not None:
            h = h.masked_fill(mask, 0.0) * scale
        for part in self.parts:
            h = part(h)
        if self.recipe.loss == "inside":
            return _carried(h)
        return self._returned(x, h)

    def _returned(self, x: Tensor, h: Tensor) -> Any:
        output = self.recipe.output
        if output == "tensor":
            return h
        second = self.second(h.movedim(1, -1) if h.dim() == 4 else h)
        returned: Mapping[str, Any] = {
            "tuple": (h, second),
            "dict": {"first": h, "second": second},
            "nested": {"first": [h, None], "more": (second, 3, "word")},
            "unused": (h, second, h.detach() * 2),
            "whole numbers": (h, h.flatten(1).argmax(-1)),
            "the input": (h, x),
        }
        return returned[output]


def _carried(h: Tensor) -> dict[str, Tensor]:
    return {"loss": h.square().mean(), "logits": h}


def _part(ingredient: Ingredient, recipe: Recipe) -> nn.Module:
    rng, c = random.Random(ingredient.seed), recipe.channels
    torch.manual_seed(ingredient.seed)
    if ingredient.part in ODDITIES:
        part = ODDITIES[ingredient.part](rng, _mixing(rng, recipe))
    else:
        part = (IMAGES if recipe.trunk == IMAGE else SEQUENCES)[ingredient.part](rng, c)
    return WRAPPINGS[ingredient.wrapping][1](rng, part)


def _mixing(rng: random.Random, recipe: Recipe) -> nn.Module:
    """A layer that mixes channels."""
    c = recipe.channels
    if recipe.trunk == IMAGE:
        conv = nn.Conv2d(c, c, 3, padding=1)
        return rng.choice((conv, nn.Sequential(conv, nn.BatchNorm2d(c))))
    norm = Part(lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2), norm=nn.BatchNorm1d(c))
    lin = nn.Linear(c, c)
    return rng.choice((lin, nn.Sequential(lin, nn.LayerNorm(c)), nn.Sequential(lin, norm)))


def _example(recipe: Recipe) -> Arguments:
    torch.manual_seed(recipe.seed + 1)
    b, n = recipe.batch, recipe.length
    kind = torch.float64 if recipe.kind == FLOAT64 else torch.float32
    x = torch.randn((b, 3, n, n) if recipe.trunk == IMAGE else (b, n, 3), dtype=kind)
    if recipe.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    if recipe.inputs == "tokens":
        return Arguments((torch.randint(_WORDS, (b, n)),), {})
    if recipe.inputs == "with a gradient":
        return Arguments((x.requires_grad_(),), {})
    if recipe.inputs == "by keyword":
        shape = (b, 1, n, n) if recipe.trunk == IMAGE else (b, n, 1)
        return Arguments((), {"x": x, "mask": torch.rand(shape) < 0.2, "scale": 1.5})
    return Arguments((x,), {})


# Losses -------------------------------------------------------------------------------------------------


def _first(output: Any) -> Tensor:
    return tensors_of(output)[0]


def _trained(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(output) if tensor.requires_grad and tensor.is_floating_point()]


def _loss(recipe: Recipe) -> tuple[Loss, tuple[Tensor, ...]]:
    """A loss of the output, and the targets that it closes over."""
    torch.manual_seed(recipe.seed + 2)
    kind = torch.float64 if recipe.kind == FLOAT64 else torch.float32
    c, n = recipe.channels, recipe.length
    shape = (recipe.batch, c, n, n) if recipe.trunk == IMAGE else (recipe.batch, n, c)
    labels, target = torch.randint(n, (recipe.batch,)), torch.randn(shape, dtype=kind)
    criterion = nn.SmoothL1Loss()

    def of_all(number: Callable[[Tensor], Tensor]) -> Loss:
        return lambda output: torch.stack([number(each.float()) for each in _trained(output)]).sum()

    def cross_entropy(output: Any) -> Tensor:
        return F.cross_entropy(_first(output).flatten(1), labels)

    def weighted(output: Any) -> Tensor:
        return (_first(output) * target).sum() / target.numel()

    losses: Mapping[str, tuple[Loss, tuple[Tensor, ...]]] = {
        "mean square": (of_all(lambda tensor: tensor.square().mean()), ()),
        "norm": (of_all(lambda tensor: tensor.norm()), ()),
        "logsumexp": (of_all(lambda tensor: tensor.logsumexp(-1).mean()), ()),
        "variance": (of_all(lambda tensor: tensor.var() + tensor.mean() ** 2), ()),
        "cross entropy": (cross_entropy, (labels,)),
        "to a target": (lambda output: F.mse_loss(_first(output), target), (target,)),
        "criterion": (lambda output: criterion(_first(output), target), (target,)),
        "weighted": (weighted, (target,)),
    }
    return losses[recipe.loss]
