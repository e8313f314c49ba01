"""What was found to be so whatever the batch, and was taken for granted when a graph was captured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Finding(StrEnum):
    """What a dry run found out about a library that the model uses."""

    UNPACKED = "transformers: sequences are not packed, and that does not depend on the batch"


@dataclass(frozen=True, slots=True)
class NoGradient:
    """No gradient enters an output of one of the graphs that Dynamo captures; both are counted from 0."""

    graph: int
    output: int

    def __str__(self) -> str:
        return f"no gradient enters output {self.output} of graph {self.graph}"


Assumption: TypeAlias = Finding | NoGradient
