"""A captured graph whose halves are code that was generated from a schedule (see `codegen`)."""

from __future__ import annotations

import sys
from abc import abstractmethod
from types import FrameType
from typing import Any

from lowtide.aot.codegen import Planned
from lowtide.aot.graph_backend import CapturedGraph
from lowtide.aot.mark import Mark
from lowtide.errors import CannotApply

_FRAMES_TO_AUTOGRAD = 16


class PlannedGraph(CapturedGraph):
    """One captured graph, and the code for each section that it serves."""

    @abstractmethod
    def code(self, mark: Mark) -> Planned:
        """The code that a run with this mark follows."""

    def run_backward(self, mark: Mark, args: list[Any]) -> Any:
        _refuse_graphs_of_the_backward()
        backward = self.code(mark).backward
        assert backward is not None, "only a forward with a backward leaves a mark"
        return backward.forward(args)


def _refuse_graphs_of_the_backward() -> None:
    """Raise an error if the backward that runs now is to be differentiated itself.

    PyTorch would refuse that too, but only when it comes to it, and without saying what to do. AOTAutograd
    calls the backward through a function of that name then; autograd itself cannot be asked.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_AUTOGRAD):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code.co_name == "_double_backward":
            raise CannotApply(
                "a planned backward cannot be differentiated (create_graph=True). Take the plan off for such "
                "steps (lowtide.remove(model)), or compute that term with a copy of the model without a plan."
            )
