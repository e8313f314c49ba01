"""What was found to be so whatever the batch, or taken to be so, when a step was traced or captured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # a shape and strides


class Finding(StrEnum):
    """What a dry run found out about a library that the model uses."""

    UNPACKED = "transformers: sequences are not packed, and that does not depend on the batch"


@dataclass(frozen=True, slots=True)
class NoGradient:
    """No gradient enters an output of one of the graphs that Dynamo captures; both are counted from 0.

    A graph has the number of the first section that it runs as.
    """

    graph: int
    output: int

    def __str__(self) -> str:
        return f"no gradient enters output {self.output} of graph {self.graph}"


@dataclass(frozen=True, slots=True)
class UseByUse:
    """An input of one of those graphs enters it once for each use: graphs that run later use it too."""

    graph: int
    input: int

    def __str__(self) -> str:
        return f"input {self.input} of graph {self.graph} enters once for each use"


@dataclass(frozen=True, slots=True)
class GradientLayouts:
    """The gradients that enter a graph's backward have these shapes and strides.

    None: as one is taken to lie that nothing is known of.
    """

    graph: int
    layouts: tuple[Layout | None, ...]

    def __str__(self) -> str:
        return f"gradients enter graph {self.graph} with shapes and strides {json.dumps(self.layouts)}"


@dataclass(frozen=True, slots=True)
class Guess:
    """A number that exists only when the step runs; the path is the one for `number`."""

    number: str  # as Python writes it, or what a size was taken to be
    line: str

    def __str__(self) -> str:
        return f"taken to be {self.number}: {self.line}"


@dataclass(frozen=True, slots=True)
class NodesBetween:
    """The nodes that autograd has between the captured graphs when the forward is over, by their names.

    A step that has more of them is on another path than the one that guesses have led to.
    """

    counts: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"nodes of autograd between graphs: {json.dumps(dict(self.counts))}"


OfOneGraph: TypeAlias = NoGradient | UseByUse | GradientLayouts  # of those that Dynamo captures
Assumption: TypeAlias = Finding | OfOneGraph | Guess | NodesBetween
