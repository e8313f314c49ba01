"""A captured graph whose halves are code that was generated from a schedule (see `codegen`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lowtide.aot.codegen import SectionCode
from lowtide.aot.graph_backend import CapturedGraph
from lowtide.aot.mark import Mark
from lowtide.compat.dynamo import is_to_be_differentiated
from lowtide.errors import CannotApply


class PlannedGraph(CapturedGraph):
    """One captured graph, and the code for each section that it serves."""

    @abstractmethod
    def code(self, mark: Mark) -> SectionCode:
        """The code that a run with this mark follows."""

    def run_backward(self, mark: Mark, args: list[Any]) -> Any:
        if is_to_be_differentiated():  # PyTorch refuses that later, and without saying what to do
            raise CannotApply(
                "a planned backward cannot be differentiated (create_graph=True). Take the plan off for such "
                "steps (lowtide.remove(model)), or compute that term with a copy of the model without a plan."
            )
        backward = self.code(mark).backward
        assert backward is not None, "only a forward with a backward leaves a mark"
        return backward.forward(args)
