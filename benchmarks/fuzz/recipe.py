"""What a seed stands for: the parts of a model, its batch, its output and its loss, in words.

A recipe is drawn once and can then be made smaller: every part has a stream of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.fuzz.images import IMAGES
from benchmarks.fuzz.oddities import ODDITIES
from benchmarks.fuzz.sequences import SEQUENCES
from benchmarks.fuzz.wrappings import WRAPPINGS

SEQUENCE, IMAGE = "sequence", "image"
FLOAT32, FLOAT64, AUTOCAST = "float32", "float64", "bfloat16 autocast"
INPUTS = ("numbers", "numbers", "numbers", "tokens", "with a gradient", "by keyword", "changed in place")
OUTPUTS = ("tensor", "tensor", "tensor", "tuple", "dict", "nested", "unused", "whole numbers", "the input")
LOSSES = (
    "mean square",
    "mean square",
    "norm",
    "logsumexp",
    "cross entropy",
    "cross entropy",
    "to a target",
    "criterion",
    "weighted",
    "variance",
    "inside",
)
_DISCRETE = frozenset({"gathered", "scattered", "experts", "custom gradient", "by chance"})


@dataclass(frozen=True)
class Ingredient:
    """One part: what it is, how it is called, and where its own random numbers begin."""

    part: str
    wrapping: str
    seed: int

    def __str__(self) -> str:
        return f"{self.part}, {self.wrapping}" if self.wrapping else self.part


@dataclass(frozen=True)
class Recipe:
    """A model, a batch and a loss."""

    seed: int
    trunk: str
    ingredients: tuple[Ingredient, ...]
    kind: str = FLOAT32
    channels_last: bool = False
    inputs: str = "numbers"
    output: str = "tensor"
    loss: str = "mean square"
    batch: int = 4
    length: int = 8  # places of a sequence, or the side of an image
    channels: int = 8

    def __str__(self) -> str:
        kinds = [self.trunk, *([] if self.kind == FLOAT32 else [self.kind])]
        kinds += ["channels last"] if self.channels_last else []
        parts = " | ".join(map(str, self.ingredients))
        return f"{' '.join(kinds)}: {self.inputs} > {parts} > {self.output} > {self.loss}"


def recipe(seed: int) -> Recipe:
    """What the seed stands for; the same on every machine."""
    rng = random.Random(seed)
    trunk = rng.choice((SEQUENCE, SEQUENCE, IMAGE))
    kind = rng.choices((FLOAT32, FLOAT64, AUTOCAST), (14, 3, 3))[0]
    inputs = rng.choice(INPUTS)
    return Recipe(
        seed,
        trunk,
        tuple(_ingredient(rng, trunk, kind) for _ in range(rng.choice((2, 3, 3, 4)))),
        kind,
        channels_last=trunk == IMAGE and rng.random() < 0.25,
        inputs="numbers" if trunk == IMAGE and inputs == "tokens" else inputs,
        output=_output(rng, kind),
        loss=rng.choice(LOSSES),
        batch=rng.choice((3, 6, 8)),
        length=rng.choice((6, 8, 10)),
    )


def _output(rng: random.Random, kind: str) -> str:
    """Whole numbers jump where others differ in their last bit, and under autocast they may."""
    found = rng.choice(OUTPUTS)
    return "tensor" if kind == AUTOCAST and found == "whole numbers" else found


def _ingredient(rng: random.Random, trunk: str, kind: str) -> Ingredient:
    """What jumps where numbers differ in their last bit is left out where they may."""
    while True:
        names = list(ODDITIES if rng.random() < 0.4 else SEQUENCES if trunk == SEQUENCE else IMAGES)
        wrapped = rng.choices(list(WRAPPINGS), [often for often, _ in WRAPPINGS.values()])[0]
        found = Ingredient(rng.choice(names), wrapped, rng.randrange(2**31))
        if kind != AUTOCAST or not {found.part, found.wrapping} & _DISCRETE:
            return found


def smaller(there: Recipe) -> Iterator[Recipe]:
    """The recipe with one thing less, or one thing plainer."""
    parts = there.ingredients
    for position in range(len(parts)):
        yield replace(there, ingredients=parts[:position] + parts[position + 1 :])
    for position, part in enumerate(parts):
        if part.wrapping:
            plainer = (*parts[:position], replace(part, wrapping=""), *parts[position + 1 :])
            yield replace(there, ingredients=plainer)
    plain = Recipe(there.seed, there.trunk, parts)
    for name in ("kind", "channels_last", "inputs", "output", "loss"):
        if getattr(there, name) != getattr(plain, name):
            yield replace(there, **{name: getattr(plain, name)})
