"""A training step really run, as it is or under a plan, and what its memory was."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from lowtide.cost.measure import Reading, measure, present_device
from lowtide.execute.apply import apply, set_aside
from lowtide.ir.graph import Role
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.trace.dry_run import Trace
from lowtide.trace.step import Example, Loss, build_optimizer, training_step

_WARM_UP = 2  # steps before one is measured: plans are compiled, optimizers make their states


@dataclass(frozen=True)
class RealStep:
    """A model that is there, a batch and a step over them; `plain` is a dry run of the step.

    Steps train the model. A plan that it has is set aside, and there again afterwards.
    """

    model: nn.Module
    example: Example
    loss: Loss | None
    optimizer: str | None
    device: str
    plain: Trace

    def reading(self, solution: Solution | GraphSolution | None = None) -> Reading | None:
        """One step under `solution`, or as it is; None if the device has too little memory for it.

        On the CPU, where the allocator does not know what was there before, that is what the dry run counts.

        Raises:
            BadRequest, DeviceMissing: see `measure`.
            CannotApply: see `apply`.
        """
        where = present_device(self.device, "measure")
        optimizer = None if self.optimizer is None else build_optimizer(self.optimizer, self.model, where)
        step = training_step(self.model, self.example, self.loss, optimizer)
        with set_aside(self.model):
            if solution is not None:
                apply(self.model, solution)
            try:
                for _ in range(_WARM_UP):
                    step()
                    self.model.zero_grad(set_to_none=True)
                found = measure(step, device=where)
            except torch.OutOfMemoryError:
                return None
            finally:
                self.model.zero_grad(set_to_none=True)
        return found if where.type == "cuda" else _counted_from(found, self._bytes_before())

    def _bytes_before(self) -> int:
        """What is there when a step begins, but for gradients: a measured one begins without."""
        graph = self.plain.graph
        there = [value for value in graph.resident if graph.values[value].role is not Role.GRADIENT]
        return sum(graph.counted_bytes(value) for value in there)


def _counted_from(reading: Reading, resident_bytes: int) -> Reading:
    """The same growth from another start."""
    lift = resident_bytes - reading.resident_bytes
    return replace(
        reading,
        peak_bytes=reading.peak_bytes + lift,
        resident_bytes=resident_bytes,
        timeline=tuple(held + lift for held in reading.timeline),
    )
