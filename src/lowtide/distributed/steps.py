"""A rank's step, rehearsed with everything that its engine holds there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowtide.chain.chain import Chain
from lowtide.chain.cuts import Granularity
from lowtide.chain.plan import Plan
from lowtide.cost.price import with_costs
from lowtide.distributed.ddp import copying_outputs, replicated, with_buckets
from lowtide.distributed.fsdp import Shard, hollow, trace_sharded
from lowtide.execute.apply import apply, set_aside
from lowtide.ir.graph import Graph
from lowtide.planner.layers import Rehearsal
from lowtide.planner.on_card import Beside
from lowtide.planner.ops import StepBudget
from lowtide.solvers.chains.worst import worst_moment
from lowtide.solvers.solution import Solution
from lowtide.trace.dry_run import Trace


@dataclass(frozen=True)
class Replicated:
    """DistributedDataParallel: every rank has the whole model, and buckets to reduce gradients in.

    `gradient_as_bucket_view` and `find_unused_parameters` are what DistributedDataParallel is given too. With
    the first, a plan of ops counts gradients beside the buckets all the same: it makes all of them before
    the first is copied. With the second, DDP hands out copies of the model's outputs.
    """

    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False

    def around(self, model: nn.Module) -> AbstractContextManager[None]:
        """`model` in this engine's hands, as far as that changes what it returns."""
        return copying_outputs(model) if self.find_unused_parameters else nullcontext()


@dataclass(frozen=True)
class Sharded:
    """FSDP2: every rank has a shard of each parameter. `shard` calls `fully_shard` on blocks and model.

    It is tried out on copies that hold no memory, and no collective runs: the mesh may be the real one.
    """

    shard: Shard


Engine: TypeAlias = Replicated | Sharded


@dataclass(frozen=True)
class ReplicatedBudget(StepBudget):
    """A step that is planned op by op, with DDP's buckets beside it."""

    engine: Replicated = field(default_factory=Replicated)

    @property
    def beside(self) -> Beside:
        """With what NCCL takes."""
        return Beside.of(distributed=True)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The plain model, with its outputs as DDP gives them out."""
        with super().set_aside(), self.engine.around(self.spec.model):
            yield

    def surrounded(self, graph: Graph) -> Graph:
        """With the buckets."""
        return with_buckets(graph, self.spec.model)


@dataclass(frozen=True)
class ReplicatedRehearsal(Rehearsal):
    """A step that is planned by layers, with DDP's buckets beside it."""

    engine: Replicated = field(default_factory=Replicated)

    @property
    def beside(self) -> Beside:
        """With what NCCL takes."""
        return Beside.of(distributed=True)

    def _trace(self, solution: Solution | None) -> Trace:
        with self.engine.around(self.model):
            trace = super()._trace(solution)
        return replicated(trace, self.model, as_views=self.engine.gradient_as_bucket_view)


@dataclass(frozen=True)
class ShardedRehearsal(Rehearsal):
    """A step that is planned by layers and tried out with the engine at work."""

    engine: Sharded = field(kw_only=True)

    @property
    def beside(self) -> Beside:
        """With what NCCL takes."""
        return Beside.of(distributed=True)

    def chain(
        self, granularity: str | Granularity = Granularity.LAYER, modules: Collection[str] | None = None
    ) -> Chain:
        """The chain of the model alone, cut around what is gathered as one.

        What is always there is made to differ by as much as the peaks of the two plain steps do. It is a
        starting point: what counts is what the engine does under the plan, and that is tried out.
        """
        chain = Rehearsal.of(self.spec).chain(granularity, self._units() or modules)
        difference = self.plain.peak_bytes - worst_moment(chain, Plan()).peak_bytes
        return replace(chain, base_bytes=max(0, chain.base_bytes + difference))

    def _hollow(self) -> nn.Module:
        with set_aside(self.model):
            return hollow(self.model)

    def _units(self) -> list[str]:
        """The paths of the modules below the model itself that the engine wraps."""
        sharded = self.engine.shard(self._hollow())
        return [path for path, module in sharded.named_modules() if path and isinstance(module, FSDPModule)]

    def _trace(self, solution: Solution | None) -> Trace:
        tried = self._hollow()
        if solution is not None:
            apply(tried, solution)
        assert self.optimizer is None or isinstance(self.optimizer, str), (
            "an optimizer that exists is over whole parameters"
        )
        trace = trace_sharded(
            tried,
            self.example,
            self.loss,
            self.engine.shard,
            optimizer=self.optimizer,
            device=self.device or _home(self.model),
            name=self.name,
        )
        return replace(trace, graph=with_costs(trace.graph, self.progress)) if self.profile else trace


def _home(model: nn.Module) -> torch.device | None:
    """Where a model is."""
    return next((parameter.device for parameter in model.parameters()), None)
