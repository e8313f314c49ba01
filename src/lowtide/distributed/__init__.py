"""Plans for models that train on several devices, with PyTorch's own engines.

    model = lowtide.distributed.optimize(model, batch, loss=loss, budget="8GiB", engine=Replicated())
    model = DistributedDataParallel(model)

The plan is put on the plain model, and the engine is wrapped around it afterwards. All ranks call this
alike: the first one plans, the others are handed its plan. The budget is what one rank may hold, and
everything that the engine holds there is counted: buckets, or shards and gathered blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide._version import __version__
from lowtide.chain.cuts import Granularity
from lowtide.cost.profile import Progress
from lowtide.distributed.agreement import TIMEOUT_SECONDS, agreed
from lowtide.distributed.steps import (
    Engine,
    Replicated,
    ReplicatedBudget,
    ReplicatedRehearsal,
    Sharded,
    ShardedRehearsal,
)
from lowtide.errors import BadRequest
from lowtide.execute.identity import described_inputs, fingerprint
from lowtide.execute.ops_forward import Model, reroute
from lowtide.planner.api import ON_NEW_SHAPE, refuse_cutting, refuse_op_level_requests
from lowtide.planner.layers import Rehearsal
from lowtide.planner.on_card import expand_segments
from lowtide.solvers import default_method, is_scheduler
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.budget import Budget
from lowtide.text.card import Card
from lowtide.trace.spec import SpecOf, StepSpec
from lowtide.trace.step import (
    OPTIMIZERS,
    Arguments,
    Example,
    Loss,
    Updates,
    arguments,
    check_optimizer,
    optimizer_name,
)

__all__ = ["Engine", "Replicated", "Sharded", "optimize", "plan"]

_METHOD_FOR_SHARDS = "rotor"


def plan(
    model: nn.Module,
    example: Example,
    *,
    engine: Engine,
    budget: str | int | Card | None = None,
    method: str | None = None,
    loss: Loss | None = None,
    optimizer: Updates | None = None,
    accumulate: int = 1,
    granularity: str | Granularity = Granularity.LAYER,
    modules: Collection[str] | None = None,
    device: str | torch.device | None = None,
    profile: bool = True,
    progress: Progress | None = None,
    tiles: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Solution | GraphSolution:
    """Plan what every rank recomputes; the same plan on all of them.

    `budget` is what one rank may hold at the peak of its step. `model` is the plain model, not yet wrapped;
    `example` is this rank's batch, of the same shape on all. The other arguments are as in `lowtide.plan`.
    Under `Sharded` the model is cut around the modules that `shard` wraps, for they are what is gathered and
    given back as one, and planned by layers; under `Replicated` also op by op.

    Raises:
        RanksDisagree: models, batches or requests differ, or a rank has not come within `timeout_seconds`.
        InfeasibleBudget, CannotApply, CannotCapture, CannotTrace, BadRequest: as in `lowtide.plan`, on the
            rank that plans; the others raise RanksDisagree with its message.
    """
    spec_of = partial(
        StepSpec,
        loss=loss,
        optimizer=optimizer,
        accumulate=accumulate,
        device=device,
        profile=profile,
        progress=progress,
        tiles=tiles,
    )
    planner = _Planner(
        engine,
        Budget.parse(budget),
        method,
        spec_of,
        optimizer,
        accumulate,
        granularity,
        modules,
        tiles,
        timeout_seconds,
    )
    return planner(model, *arguments(example))


def optimize(
    model: Model,
    example: Example | None = None,
    *,
    engine: Engine,
    budget: str | int | Card | None = None,
    method: str | None = None,
    loss: Loss | None = None,
    optimizer: Updates | None = None,
    accumulate: int = 1,
    on_new_shape: str = "plan",
    granularity: str | Granularity = Granularity.LAYER,
    modules: Collection[str] | None = None,
    device: str | torch.device | None = None,
    profile: bool = True,
    progress: Progress | None = None,
    tiles: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Model:
    """Plan and apply at once: `model` itself, to be wrapped by the engine next.

    Inputs of another shape are planned for when they are met first, by all ranks together: a rank that meets
    them alone raises RanksDisagree once `timeout_seconds` have passed. With `on_new_shape="error"` they are
    refused at once. Without an example the first inputs of the training are planned for. Under `Sharded`
    neither can be, since the model is sharded by then: an example is needed, and other shapes are refused,
    whatever `on_new_shape` says. The other arguments are as in `lowtide.distributed.plan`.

    Raises:
        RanksDisagree and others: as in `lowtide.distributed.plan`.
        CannotApply: when they are met, inputs that are refused.
    """
    if on_new_shape not in ON_NEW_SHAPE:
        raise BadRequest(f"on_new_shape is {on_new_shape!r}; it is one of {', '.join(ON_NEW_SHAPE)}.")
    asked = Budget.parse(budget)
    if asked.card is not None:
        expand_segments(stacklevel=3)
    spec_of = partial(
        StepSpec,
        loss=loss,
        optimizer=optimizer,
        accumulate=accumulate,
        device=device,
        profile=profile,
        progress=progress,
        tiles=tiles,
    )
    planner = _Planner(
        engine,
        asked,
        method,
        spec_of,
        optimizer,
        accumulate,
        granularity,
        modules,
        tiles,
        timeout_seconds,
    )
    if example is None and isinstance(engine, Sharded):
        raise BadRequest(
            "a model is planned before it is sharded, and that needs an example of its batches. Give one."
        )
    solution = None if example is None else planner(model, *arguments(example))
    may_plan = on_new_shape == "plan" and isinstance(engine, Replicated)
    on_new_inputs = "warn" if may_plan else "error"
    return reroute(
        model,
        solution,
        on_new_inputs=on_new_inputs,
        accumulate=accumulate,
        replan=planner,
        of_layers=not planner.plans_ops,
    )


@dataclass
class _Planner:
    """Plans for inputs as they are met, with all ranks. What a budget means is settled by the first."""

    engine: Engine
    budget: Budget
    method: str | None
    spec_of: SpecOf
    optimizer: Updates | None
    accumulate: int
    granularity: str | Granularity
    modules: Collection[str] | None
    tiles: bool
    timeout_seconds: float
    plans_ops: bool = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.engine, Replicated | Sharded):
            raise BadRequest(
                f"the engine is {self.engine!r}; it is Replicated() for DistributedDataParallel, or "
                "Sharded(shard) for FSDP2."
            )
        check_optimizer(self.optimizer)
        sharded = isinstance(self.engine, Sharded)
        self.method = self.method or (_METHOD_FOR_SHARDS if sharded else default_method(self.budget))
        self.plans_ops = is_scheduler(self.method)
        if sharded and (self.modules is not None or self.granularity != Granularity.LAYER):
            raise BadRequest(
                "granularity and modules say how to cut a model into a chain; a sharded one is cut around "
                "the modules that `shard` wraps. Leave them out."
            )
        if sharded and not isinstance(self.optimizer, str | None):
            raise BadRequest(
                "an optimizer for shards is made once the model is sharded, so it has to be named here: "
                f"{', '.join(OPTIMIZERS)}."
            )
        if not self.plans_ops:
            refuse_op_level_requests(self.budget, self.accumulate, self.tiles)
        elif sharded:
            raise BadRequest(
                f"{self.method} plans op by op, and FSDP2 gathers weights module by module, so it needs a "
                f"plan of layers. Leave the method out, or choose one for chains ({_METHOD_FOR_SHARDS})."
            )
        else:
            refuse_cutting(self.granularity, self.modules)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Solution | GraphSolution:
        example = Arguments(args, kwargs)
        decide = self._ops if self.plans_ops else self._layers
        plan = agreed(lambda: decide(model, example), self._facts(model, example), self.timeout_seconds)
        if plan.budget_bytes is not None and self.budget.card is None:
            self.budget = Budget.parse(plan.budget_bytes)
        return plan

    def _facts(self, model: nn.Module, example: Arguments) -> Mapping[str, str]:
        return {
            "a model": f"{type(model).__name__} ({fingerprint(model)})",
            "inputs": ", ".join(described_inputs(example.args, example.kwargs)),
            "a budget of": str(self.budget),
            "the method": str(self.method),
            "tiles": str(self.tiles),
            "the optimizer": str(optimizer_name(self.optimizer)),
            "the engine": str(self.engine) if isinstance(self.engine, Replicated) else Sharded.__name__,
            "torch": torch.__version__,
            "lowtide": __version__,
        }

    def _ops(self, model: nn.Module, example: Arguments) -> GraphSolution:
        assert self.method is not None
        assert isinstance(self.engine, Replicated)
        step = ReplicatedBudget(self.spec_of(model, example), engine=self.engine)
        return step.within(self.method, self.budget)

    def _layers(self, model: nn.Module, example: Arguments) -> Solution:
        assert self.method is not None
        rehearsal = self._rehearsal(model, example)
        return rehearsal.within(rehearsal.chain(self.granularity, self.modules), self.method, self.budget)

    def _rehearsal(self, model: nn.Module, example: Arguments) -> Rehearsal:
        spec = self.spec_of(model, example)
        if isinstance(self.engine, Sharded):
            return ShardedRehearsal.of(spec, engine=self.engine)
        return ReplicatedRehearsal.of(spec, engine=self.engine)
