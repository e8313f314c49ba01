"""A training step really run, as it is or under a plan, and what its memory was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from lowtide.compat.dynamo import frames_compiled
from lowtide.cost.measure import Reading, default_device, measure, present_device, seconds_of
from lowtide.execute.apply import apply, set_aside
from lowtide.ir.graph import Role
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.trace.dry_run import Trace
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import optimizer_of, training_step

_NUMBER_BYTES = 8
_WARM_UP = 2  # libraries set themselves up, plans are compiled, optimizers make their states


@dataclass(frozen=True)
class RealStep:
    """A step whose model and batch are there. Running it trains the model.

    `warm_up` steps are run before one is measured, and each begins without gradients. Where several backward
    calls make an update it has two: gradients are then there when the second forward begins.
    """

    spec: StepSpec
    warm_up: int = _WARM_UP

    @cached_property
    def device(self) -> torch.device:
        """Where it runs. Raises BadRequest or DeviceMissing: see `measure`."""
        return present_device(default_device() if self.spec.device is None else self.spec.device, "measure")

    @cached_property
    def run(self) -> Callable[[], torch.Tensor]:
        """One step of the model as it is, with the plan that it has; it returns the loss."""
        spec = self.spec
        optimizer = optimizer_of(spec.optimizer, spec.model, spec.device)
        step = training_step(spec.model, spec.example, spec.loss, optimizer, min(spec.accumulate, 2))

        def run() -> torch.Tensor:
            spec.model.zero_grad(set_to_none=True)
            return step()

        return run

    def measured(self, timed: int = 0) -> Reading:
        """One step of the model as it is, with the plan that it has; `timed` is as in `measure`.

        Raises:
            BadRequest, DeviceMissing: see `measure`.
        """
        where = self.device
        for _ in range(self.warm_up):
            self.run()
        self.spec.model.zero_grad(set_to_none=True)
        before = frames_compiled()
        found = measure(self.run, device=where, timed=timed)
        compiled = frames_compiled() - before
        return _without_compiling(found, compiled) if compiled and where.type == "cpu" else found

    def reading(self, plain: Trace, solution: Solution | GraphSolution | None = None) -> Reading | None:
        """One step under `solution`, or without a plan; None if the device has too little memory for it.

        A plan that the model has is set aside, and there again afterwards. On the CPU, where the allocator
        does not know what was there before the step, that is what `plain`, a dry run of it, counts.

        Raises:
            BadRequest, DeviceMissing: see `measure`.
            CannotApply: see `apply`.
        """
        with self._under(solution):
            try:
                found = self.measured()
            except torch.OutOfMemoryError:
                return None
            finally:
                self.spec.model.zero_grad(set_to_none=True)
        return found if self.device.type == "cuda" else _counted_from(found, bytes_before(plain))

    def seconds(self, solution: Solution | GraphSolution | None = None) -> float:
        """The wall time of one step under `solution`, or without a plan. Nothing warms up."""
        with self._under(solution):
            self.spec.model.zero_grad(set_to_none=True)
            return seconds_of(self.run, self.device)

    @contextmanager
    def _under(self, solution: Solution | GraphSolution | None) -> Iterator[None]:
        with set_aside(self.spec.model):
            if solution is not None:
                apply(self.spec.model, solution)
            yield


def bytes_before(plain: Trace) -> int:
    """What is there when the plain step begins, but for gradients: a measured one begins without."""
    graph = plain.graph
    there = [value for value in graph.resident if graph.values[value].role is not Role.GRADIENT]
    return sum(graph.counted_bytes(value) for value in there)


def _without_compiling(reading: Reading, frames: int) -> Reading:
    """The same without what Dynamo holds while it compiles so many frames of Python.

    That is copies of the random state, and for good a number for each frame. A forward that counts its calls
    in Python is compiled at every one; a GPU holds nothing of this.
    """
    copy_bytes, copies = torch.get_rng_state().nbytes, 0
    timeline = [reading.resident_bytes]
    for before, now in pairwise(reading.timeline):
        if now - before == copy_bytes:
            copies += 1
        elif before - now == copy_bytes and copies:
            copies -= 1
        timeline.append(now - copies * copy_bytes)
    peak_bytes = max(timeline) - frames * _NUMBER_BYTES
    return replace(reading, peak_bytes=max(peak_bytes, reading.resident_bytes), timeline=tuple(timeline))


def _counted_from(reading: Reading, resident_bytes: int) -> Reading:
    """The same growth from another start."""
    lift = resident_bytes - reading.resident_bytes
    return replace(
        reading,
        peak_bytes=reading.peak_bytes + lift,
        resident_bytes=resident_bytes,
        timeline=tuple(held + lift for held in reading.timeline),
    )
