"""One step, trained in several ways from the same start: what each holds, takes and makes.

All ways share the weights, so that a model and its copies hold no more than the model. Eager training is what
others are measured beside: their steps are timed in turns with its steps, and their first loss and gradients
are compared with its.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from lowtide.compat.tensors import storage_key
from lowtide.cost.measure import measure, seconds_of
from lowtide.errors import BadRequest
from lowtide.planner.real_step import RealStep
from lowtide.trace.inputs import named_inputs
from lowtide.trace.spec import StepSpec

_SEEDS = (1, 2, 3)  # other draws, to see how far these move a loss
_SPREADS = 4  # times as far as these may others be
_LOSS_ROUNDINGS, _GRADIENT_ROUNDINGS = 2, 8  # of the narrowest type
_TF32 = 2.0**-10  # what convolutions on CUDA round to, and products where that is allowed
_LOSS_PART, _GRADIENT_PART = 1e-4, 1e-3  # of sums in another order


@dataclass(frozen=True)
class PeerReading:
    """Steps of one way to train, measured.

    `peak_bytes` is of the second step and later ones. `seconds` is the median of steps that took turns with
    eager ones, whose median is `eager_seconds`: None where there is no room for those. `difference` says how
    the result of the first step is another than eager's, beyond rounding; None: it is not.
    """

    peak_bytes: int
    seconds: float
    eager_seconds: float | None
    first_seconds: float
    loss: float
    gradient_norm: float
    reserved_bytes: int | None = None
    difference: str | None = None


@dataclass(frozen=True)
class StepResult:
    """What came out of a step, in two numbers."""

    loss: float
    gradient_norm: float


@dataclass(frozen=True)
class EagerResult:
    """What comes out of eager training, and how far from it another way may be."""

    result: StepResult
    rounding: float  # of the narrowest type in it
    spread: StepResult  # what other random draws change; zero where nothing is drawn

    def difference(self, other: StepResult, draws_alike: bool) -> str | None:
        """How `other` is another result; it may have drawn other random numbers."""
        spreads = 0 if draws_alike else _SPREADS
        for what, mine, others, part, spread in (
            ("loss", self.result.loss, other.loss, self._loss_part, self.spread.loss),
            (
                "norm of all gradients",
                self.result.gradient_norm,
                other.gradient_norm,
                self._gradient_part,
                self.spread.gradient_norm,
            ),
        ):
            if math.isnan(mine) and math.isnan(others):
                continue
            if not abs(mine - others) <= part * abs(mine) + spreads * spread:
                return f"its {what} is {others:.6g}, eager's {mine:.6g}"
        return None

    @property
    def _loss_part(self) -> float:
        return max(_LOSS_PART, _LOSS_ROUNDINGS * self.rounding)

    @property
    def _gradient_part(self) -> float:
        return max(_GRADIENT_PART, _GRADIENT_ROUNDINGS * self.rounding)


@dataclass(frozen=True)
class PeerSteps:
    """A step to be trained in several ways; `put_back` has it start anew, and the optimizer is there."""

    spec: StepSpec
    where: torch.device
    put_back: Callable[[], None]
    repeats: int

    def another(self) -> nn.Module:
        """The model once more, with the same weights and buffers, but modules of its own.

        Raises:
            BadRequest: it cannot be copied.
        """
        model = self.spec.model
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        try:
            return copy.deepcopy(model, dict(shared))
        except (TypeError, RuntimeError) as error:
            raise BadRequest(
                f"each way to train is tried on a copy of the model, and it cannot be copied: {error}"
            ) from error

    def measured(self, model: nn.Module, draws_alike: bool = True) -> PeerReading:
        """Steps of `model`, a copy that trains in its own way.

        Raises:
            torch.OutOfMemoryError: the device has too little memory for it.
        """
        eager = self._eager  # before anything of the copy's is there
        step = self._step(model)
        gc.collect()
        first: list[StepResult] = []
        first_seconds = seconds_of(lambda: first.append(self._result(step)), self.where)
        peak_bytes, reserved_bytes = self._held(step)
        mine, eagers = [], []
        for turn in range(1 + self.repeats):
            if eager is not None:
                eagers.append(self._timed(self._step(self.spec.model))[0])
            seconds, held = self._timed(step)
            mine.append(seconds)
            peak_bytes = max(peak_bytes, held)
            if not turn:  # other blocks are cached now than a moment ago
                mine, eagers = [], []
        (result,) = first
        return PeerReading(
            peak_bytes=peak_bytes,
            seconds=statistics.median(mine),
            eager_seconds=statistics.median(eagers) if eagers else None,
            first_seconds=first_seconds,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            reserved_bytes=reserved_bytes,
            difference=eager.difference(result, draws_alike) if eager is not None else None,
        )

    def clean_up(self) -> None:
        """Let go of what a way to train has left behind."""
        self.spec.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.where.type == "cuda":
            torch.cuda.empty_cache()

    @cached_property
    def _eager(self) -> EagerResult | None:
        """What eager training makes; None where there is no room for it."""
        step = self._step(self.spec.model)
        on_cuda = self.where.type == "cuda"
        kinds = {parameter.dtype for parameter in self.spec.model.parameters()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            kinds.add(tensor.dtype)
            return tensor.detach()  # itself it would refer to the op that holds it

        try:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                self.put_back()
                before = _streams(self.where)
                result = self._result(step)
                after = _streams(self.where)
            drawn = not all(map(torch.equal, before, after))
            others = [self._result(step, seed) for seed in _SEEDS] if drawn else []
        except torch.OutOfMemoryError:
            return None
        finally:
            self.clean_up()
        return EagerResult(
            result,
            max([_TF32 * on_cuda, *(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)]),
            StepResult(
                max((abs(other.loss - result.loss) for other in others), default=0.0),
                max((abs(other.gradient_norm - result.gradient_norm) for other in others), default=0.0),
            ),
        )

    def _step(self, model: nn.Module) -> RealStep:
        return RealStep(replace(self.spec, model=model), warm_up=1)

    def _result(self, step: RealStep, seed: int | None = None) -> StepResult:
        """One step from the start that all have, or with other random numbers."""
        self.put_back()
        if seed is not None:
            torch.manual_seed(seed)
        loss = step.run()
        gradients = [
            parameter.grad for parameter in self.spec.model.parameters() if parameter.grad is not None
        ]
        return StepResult(float(loss), math.hypot(*map(_norm, gradients)))

    def _held(self, step: RealStep) -> tuple[int, int | None]:
        """The peak of the second step, and what the allocator has taken for it."""
        self.spec.model.zero_grad(set_to_none=True)
        if self.where.type == "cuda":
            gc.collect()
            peak_bytes = self._timed(step)[1]
            return peak_bytes, torch.cuda.max_memory_reserved(self.where)
        reading = measure(step.run, device=self.where)
        return reading.growth_bytes + self._resident_bytes, None

    def _timed(self, step: RealStep) -> tuple[float, int]:
        """The time of one step, and its peak, where the device keeps count."""
        self.spec.model.zero_grad(set_to_none=True)
        if self.where.type != "cuda":
            return seconds_of(step.run, self.where), 0
        torch.cuda.reset_peak_memory_stats(self.where)
        seconds = seconds_of(step.run, self.where)
        return seconds, torch.cuda.max_memory_allocated(self.where)

    @property
    def _resident_bytes(self) -> int:
        """Weights, buffers, batch and the optimizer's states."""
        spec = self.spec
        states = spec.optimizer.state.values() if isinstance(spec.optimizer, torch.optim.Optimizer) else ()
        tensors = [
            *spec.model.parameters(),
            *spec.model.buffers(),
            *named_inputs(spec.model, spec.example, spec.loss).values(),
            *(thing for state in states for thing in state.values() if isinstance(thing, torch.Tensor)),
        ]
        return sum({storage_key(each): each.untyped_storage().nbytes() for each in tensors}.values())


def _norm(gradient: torch.Tensor) -> float:
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    flat = torch.view_as_real(dense) if dense.is_complex() else dense
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64 if flat.is_cpu else torch.float32))


def _streams(where: torch.device) -> list[torch.Tensor]:
    streams = [torch.get_rng_state()]
    return [*streams, torch.cuda.get_rng_state(where)] if where.type == "cuda" else streams
