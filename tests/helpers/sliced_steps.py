"""Steps with something large in the middle, and how near they are to what exact arithmetic would make."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import lowtide
from lowtide.execute.memory import Memory
from lowtide.ir.graph import Graph, Op, Phase, StepName
from lowtide.tiles.early import early
from lowtide.tiles.region import Region, grown, largest
from lowtide.tiles.tile import tile
from tests.helpers.sliced import results_of

TRIALS = 6
Function = Callable[[nn.ParameterDict, Mapping[str, Tensor]], Tensor]


class Step(nn.Module):
    """A loss as a function of parameters and a batch."""

    def __init__(self, function: Function, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function = function
        self.owned = nn.ParameterDict({name: nn.Parameter(each) for name, each in parameters.items()})

    def forward(self, **batch: Tensor) -> Tensor:
        return self.function(self.owned, batch)


@dataclass(frozen=True)
class Case:
    """A step, and along what its largest tensor is sliced: all dimensions but the last, if nothing is said.

    `ahead` says whether its backward may run with its forward. The gradient of the loss is `scale`.
    """

    function: Function
    parameters: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    dims: tuple[int, ...] = ()
    ahead: bool = False
    scale: float = 3.0


def exactly(tensor: Tensor) -> Tensor:
    """In float32, as losses are computed; the reference is in float64 already."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def in_type(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}


def captured(case: Case, dtype: torch.dtype) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of a step, and what it is given."""
    model = Step(case.function, in_type(case.parameters, dtype))
    batch = in_type(case.batch, dtype)
    graph = lowtide.capture(model, dict(batch))
    known = {graph.values[value].name for value in graph.resident}
    loss_dtype = {name: graph.tensors[number].dtype for name, number in graph.results}[StepName.LOSS]
    scale = torch.tensor(case.scale, dtype=getattr(torch, loss_dtype))
    given = {**dict(model.named_parameters()), **batch, StepName.LOSS_GRADIENT: scale}
    return graph, {name: each.detach() for name, each in given.items() if name in known}


@dataclass(frozen=True)
class Trial:
    """What a step is given, and what is made of it: by the plain step, and by exact arithmetic."""

    given: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]


def trials(case: Case, dtype: torch.dtype, graph: Graph, given: Mapping[str, Tensor]) -> list[Trial]:
    """The same step with its parameters in several orders: how a single number is rounded is luck."""
    found = []
    for number in range(TRIALS):
        generator = torch.Generator().manual_seed(number)
        orders = {
            name: torch.randperm(each.numel(), generator=generator) for name, each in case.parameters.items()
        }
        other = {name: each.flatten()[orders[name]].view_as(each) for name, each in case.parameters.items()}
        own = dict(Step(case.function, in_type(other, dtype)).named_parameters())
        mine = {**given, **{name: each.detach() for name, each in own.items() if name in given}}
        found.append(Trial(mine, results_of(graph, mine), exact(replace(case, parameters=other), dtype)))
    return found


def exact(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Loss and gradients in float64, of numbers that are rounded to `dtype`."""
    rounded = in_type(in_type(case.parameters, dtype), torch.float64)
    model = Step(case.function, copy.deepcopy(rounded))
    loss = model(**in_type(in_type(case.batch, dtype), torch.float64))
    (loss * case.scale).backward()
    found = {f"{name}.grad": each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {StepName.LOSS: loss.detach(), **found}


def region_at_the_largest(graph: Graph, dims: tuple[int, ...]) -> Region:
    """The region around the op of the forward that makes or takes most."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]

    def size(op: Op) -> int:
        return graph.values[graph.tensors[largest(graph, op)[1]].value].bytes

    seed = max(forward, key=size)
    shape = graph.tensors[largest(graph, seed)[1]].shape
    leading = tuple(range(len(shape) - 1))
    region = grown(graph, seed.id, tuple(dim % len(shape) for dim in dims) or leading)
    assert isinstance(region, Region), region
    return region


def assert_as_near(tiled: Graph, trials: list[Trial], dtype: torch.dtype) -> None:
    """Errors are at most half as large again as those of plain training in `dtype`, over all trials together.

    In float32 but for a last rounding, which may be all the error that plain training has.
    """
    found = [results_of(tiled, trial.given) for trial in trials]
    last = torch.finfo(dtype).eps / 2 if dtype is torch.float32 else 0.0
    for name in trials[0].exact:
        rights = [trial.exact[name] for trial in trials]
        mine = _off([each[name] for each in found], rights)
        plain = _off([trial.plain[name] for trial in trials], rights)
        allowed = 1.5 * plain + last * math.hypot(*(right.norm().item() for right in rights))
        assert mine <= allowed, f"{name}: off by {mine:.2e}, plain training by {plain:.2e}"
    assert {*found[0]} == {*trials[0].plain}


def _off(found: list[Tensor], rights: list[Tensor]) -> float:
    return math.hypot(
        *((mine.double() - right).norm().item() for mine, right in zip(found, rights, strict=True))
    )


def assert_trains_in_slices(case: Case, dtype: torch.dtype) -> list[Graph]:
    """A step whose largest tensors are never there as a whole is as exact as the plain one.

    Its graphs: in two and in three slices; and with the backward in the forward where that may be.
    """
    graph, given = captured(case, dtype)
    region = region_at_the_largest(graph, case.dims)
    ahead = early(graph, region)
    assert (ahead is not None) == case.ahead
    tried = trials(case, dtype, graph, given)
    biggest = max(graph.values[value].bytes for op in graph.ops for value in op.creates)
    found = []
    for count, way in ((2, None), (3, None), *(((3, ahead),) if ahead else ())):
        tiled = tile(graph, region, count, way)
        assert tiled.tiled is not None
        assert max(block.spared_bytes for block in tiled.tiled.blocks) == biggest
        assert_as_near(tiled, tried, dtype)
        direct = results_of(tiled, given)
        for name, tensor in results_of(tiled, given, Memory.STATIC).items():
            assert torch.equal(tensor, direct[name]), f"{name} is another in static memory"
        found.append(tiled)
    return found
