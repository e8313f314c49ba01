"""A plan put to the test before it is trusted: one step as it is, one as planned, from the same start.

Loss, gradients, buffers and random streams have to be the same to the last bit, and the peak within what was
promised. Where two plain steps differ, because a kernel is not deterministic, each number of the planned one
may be a few times as far from them as they are from each other, or as another order of sums explains; under
autocast, and in half precision, as far as rounding explains: some roundings, or what one rounding of the
weights makes of a number that is nothing but rounding (the gradient of a bias before a norm). A plan with
slices adds up in another order, and is rounded otherwise in full precision too.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from lowtide.cost.measure import present_device
from lowtide.errors import BadRequest, Difference, PlanDisagrees
from lowtide.execute.apply import apply, remove, set_aside
from lowtide.ir.graph import Graph
from lowtide.planner.as_found import as_found
from lowtide.planner.real_step import RealStep, bytes_before
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.trace.dry_run import Trace
from lowtide.trace.inputs import named_inputs
from lowtide.trace.spec import StepSpec

_SPREADS = 4  # times as far from a plain step as another plain one is
_ANOTHER_ORDER = 1e-4  # beside the largest number of a tensor: how far sums in another order are apart
_ROUNDINGS = 8  # of the narrowest type, beside the largest number of a tensor
_PART, _LEAST_BYTES = 200, 4096  # a prediction may be off by one part in so many, or by so much
_Key = tuple[str, str]  # what kind of thing, and its name


@dataclass(frozen=True)
class Verification:
    """A plan that was tried on a real step, and did what plain training does.

    `peak_bytes` was measured. `plain_fits` is false where the device had too little memory for the plain
    step: its numbers could then not be compared.
    """

    peak_bytes: int
    allowed_bytes: int
    to_the_bit: bool
    plain_fits: bool = True

    def __str__(self) -> str:
        if not self.plain_fits:
            return (
                "verified: one real step is within the promised peak; the plain one, too large, was not run"
            )
        how = "are" if self.to_the_bit else "are, but for rounding,"
        return f"verified on a real step: its numbers {how} those of plain training, its peak as promised"


def tried(spec: StepSpec, solution: Solution | GraphSolution, plain: Trace) -> Verification:
    """Try `solution` on the model and batch that are there, and leave all of that as it was.

    `plain` is a dry run of the step without a plan. A plan that the model has is set aside meanwhile.

    Raises:
        PlanDisagrees: the planned step does not do what the plain one does, or holds more than was promised.
        BadRequest: the model or the batch has no memory: it is on the meta device.
    """
    step = RealStep(_measurable(spec), warm_up=1)
    with set_aside(spec.model):
        in_slices = isinstance(solution, GraphSolution) and _adds_up_otherwise(solution.graph)
        alike = _numbers_of_plain(step, in_slices)
        apply(spec.model, solution, on_new_inputs="error", accumulate=spec.accumulate)
        try:
            with as_found(spec):
                numbers = _numbers(step)
            with as_found(spec):
                growth_bytes = step.measured().growth_bytes
        finally:
            remove(spec.model)
    peak_bytes, most_bytes = bytes_before(plain) + growth_bytes, allowed_bytes(solution)
    found = [] if alike is None else list(alike.differences(numbers))
    if peak_bytes > most_bytes:
        found.append(Difference("peak", "", peak_bytes - most_bytes, 0))
    if found:
        raise PlanDisagrees(solution.method, tuple(found))
    if alike is None:
        return _unseen(peak_bytes, most_bytes)
    return Verification(peak_bytes, most_bytes, to_the_bit=not alike.tolerant)


def _unseen(peak_bytes: int, most_bytes: int) -> Verification:
    warnings.warn(
        "lowtide: the plain step does not fit in memory, so the numbers of the planned one could not be "
        "compared with it; its peak could. Verify a smaller batch.",
        stacklevel=2,
    )
    return Verification(peak_bytes, most_bytes, to_the_bit=False, plain_fits=False)


def _measurable(spec: StepSpec) -> StepSpec:
    """The step where its model and batch are, if it can run there."""
    batch = list(named_inputs(spec.model, spec.example, spec.loss).values())
    held = [*spec.model.parameters(), *spec.model.buffers(), *batch]
    where = present_device(spec.device or (held[0].device if held else "cpu"), "verify")
    for tensor in held:
        if tensor.device.type == "meta":
            raise BadRequest(
                "cannot verify the plan: the model or the batch is on the meta device, and a step of it "
                "cannot be run. Build both for real, or leave verify out."
            )
    return replace(spec, device=where)


def allowed_bytes(solution: Solution | GraphSolution) -> int:
    """The budget; without one, what was predicted."""
    if solution.budget_bytes is not None:
        return solution.budget_bytes
    predicted = solution.peak_bytes
    if isinstance(solution, Solution) and solution.confirmation is not None:
        predicted = solution.confirmation.peak_bytes
    return predicted + max(predicted // _PART, _LEAST_BYTES)


# Numbers ------------------------------------------------------------------------------------------------


def _numbers(step: RealStep) -> dict[_Key, torch.Tensor | None]:
    """What one step leaves behind, on the CPU."""
    spec = step.spec
    loss = replace(step, spec=replace(spec, optimizer=None)).run()
    inputs = named_inputs(spec.model, spec.example, spec.loss)
    leaves = {**inputs, **dict(spec.model.named_parameters())}
    gradients = {("gradient", name): leaf.grad for name, leaf in leaves.items() if leaf.is_leaf}
    buffers = {("buffer", name): buffer for name, buffer in spec.model.named_buffers()}
    changed = {("input", name): tensor for name, tensor in inputs.items()}
    found = {("loss", ""): loss, **gradients, **buffers, **changed}
    streams = {("random state", "cpu"): torch.get_rng_state()}
    if torch.cuda.is_initialized():
        streams[("random state", "cuda")] = torch.cuda.get_rng_state(step.device)
    return {key: _copied(tensor) for key, tensor in {**found, **streams}.items()}


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    found = tensor.detach().to("cpu", copy=True)
    return found.to_dense() if found.layout is not torch.strided else found


def _numbers_of_plain(step: RealStep, another_order: bool) -> _Alike | None:
    """What the plain step leaves behind, and how far others may be from it; None if it has no room.

    Others may add up in `another_order`.
    """
    rounding = max(_rounding(step), torch.finfo(torch.float32).eps if another_order else 0.0)
    try:
        with as_found(step.spec) as put_back:
            first = _numbers(step)
            put_back()
            _round_otherwise(step, rounding)
            second = _numbers(step)
    except torch.OutOfMemoryError:
        gc.collect()
        return None
    return _Alike.of(first, second, max(_ROUNDINGS * rounding, _ANOTHER_ORDER if another_order else 0.0))


def _round_otherwise(step: RealStep, rounding: float) -> None:
    """Move every weight up or down by so large a part of itself."""
    if not rounding:
        return
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in step.spec.model.parameters():
            up_or_down = torch.randint(2, weight.shape, generator=generator).to(weight.device) * 2 - 1
            weight.mul_(1 + rounding * up_or_down)


@dataclass(frozen=True)
class _Alike:
    """What plain steps leave behind, and how far from that others may be, beside the largest number."""

    numbers: dict[_Key, torch.Tensor | None]
    part: float  # of the largest number of a tensor
    spread: dict[_Key, float]  # of each tensor, between plain steps

    @classmethod
    def of(
        cls, first: dict[_Key, torch.Tensor | None], second: dict[_Key, torch.Tensor | None], least: float
    ) -> _Alike:
        """Two plain steps; others may be at least a part of `least` away."""
        spread = {key: _apart(first[key], second[key]) for key in first}
        widest = max((apart / _scale(first[key]) for key, apart in spread.items()), default=0.0)
        return cls(first, max(_SPREADS * min(widest, _ANOTHER_ORDER), least), spread)

    @property
    def tolerant(self) -> bool:
        return self.part > 0

    def differences(self, others: dict[_Key, torch.Tensor | None]) -> Iterator[Difference]:
        """What of `others` is too far away."""
        for (what, name), number in self.numbers.items():
            apart = _apart(number, others[what, name])
            allowed = max(self.part * _scale(number), _SPREADS * self.spread[what, name])
            allowed = 0.0 if what == "random state" else allowed
            if apart > allowed:
                yield Difference(what, name, apart, allowed)


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """The largest difference; what is not a number agrees with what is not. Infinite if one is not there."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    unequal = (one != other) & ~((one != one) & (other != other))
    if not unequal.any():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart = float((one[unequal].to(wide) - other[unequal].to(wide)).abs().max())
    return math.inf if math.isnan(apart) else apart


def _scale(tensor: torch.Tensor | None) -> float:
    """The largest finite number of a tensor; not zero."""
    if tensor is None or not tensor.numel():
        return 1.0
    wide = tensor.abs().to(torch.float64) if tensor.is_complex() else tensor.to(torch.float64).abs()
    return float(wide.nan_to_num(0.0, 0.0, 0.0).max()) or 1.0


def _rounding(step: RealStep) -> float:
    """By what part of itself a number of the narrowest type may be off; nothing where bits are promised."""
    kinds = {tensor.dtype for tensor in step.spec.model.parameters()}
    if torch.is_autocast_enabled(step.device.type):
        kinds.add(torch.get_autocast_dtype(step.device.type))
    narrow = kinds & {torch.float16, torch.bfloat16}
    return max((torch.finfo(kind).eps for kind in narrow), default=0.0)


def _adds_up_otherwise(graph: Graph) -> bool:
    """Whether sums are added up in another order than in plain training: in slices, or by generated code."""
    return graph.tiled is not None or graph.fused is not None
