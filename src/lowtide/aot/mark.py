"""What a forward hands to its backward so that the two follow the same plan.

AOTAutograd saves tensors and nothing else between the two halves of a graph. So the mark is written as one:
two whole numbers in the shape of a tensor that has no bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Mark(NamedTuple):
    """Which plan a forward ran by, None if its graph was planned alone, and which of its sections it was."""

    plan: int | None
    section: int

    def write(self) -> torch.Tensor:
        """The mark as a tensor of no bytes, which `read` understands."""
        return torch.empty(0, 0 if self.plan is None else 1 + self.plan, self.section)

    @staticmethod
    def read(tensor: torch.Tensor) -> Mark:
        """The mark that was written as `tensor`."""
        _, plan, section = tensor.shape
        return Mark(plan - 1 if plan else None, section)
