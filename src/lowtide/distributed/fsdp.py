"""FSDP2 rehearsed: PyTorch's own `fully_shard` at work on fake tensors, in one process.

The engine itself runs: it shards the parameters, gathers them before a block needs them and gives them
back, reduces gradients and updates shards. Only the collectives do nothing, so no other rank is needed and
the memory of one rank is counted as it will be: shards with their padding, gathered blocks, the buffers
that a collective reads and writes, gradient and optimizer shards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.compat.collectives import finished_work, local_part
from lowtide.compat.dispatch import schema_of
from lowtide.compat.patches import patched
from lowtide.compat.tensors import key_of_storage, storage_key, tensors_in
from lowtide.ir.graph import Role
from lowtide.trace.dry_run import StepRecorder, Trace
from lowtide.trace.recorder import Spot
from lowtide.trace.step import Example, Loss, build_optimizer, training_step
from lowtide.trace.training import blaming_the_users_code

Shard = Callable[[nn.Module], nn.Module]  # puts `fully_shard` on a model and its blocks, and returns it

aten = torch.ops.aten
_COLLECTIVES = "c10d"
_WARMUP = 2  # in the first step the engine settles the order of its units, in the second states are there


def trace_sharded(
    model: nn.Module,
    example: Example,
    loss: Loss | None,
    shard: Shard,
    *,
    optimizer: str | None = None,
    device: str | torch.device | None = None,
    name: str | None = None,
) -> Trace:
    """A dry run of the step of one rank, with `model` sharded as `shard` does it. It has no costs yet.

    `model` becomes sharded: give one that nobody else needs, such as a `hollow` one.
    """
    return _ShardedRecorder([model], device, name).rehearse(model, example, loss, shard, optimizer, device)


def hollow(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters and buffers have shapes and types, and no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(empty, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else empty
        )
    return copy.deepcopy(model, memo)


class _ShardedRecorder(StepRecorder):
    """Writes down a step of a model that is sharded once it is fake."""

    def __init__(
        self, models: Sequence[nn.Module], device: str | torch.device | None, name: str | None
    ) -> None:
        super().__init__(models, device, name)
        self._sharded: nn.Module | None = None
        self._updates: torch.optim.Optimizer | None = None
        self._emptied: set[int] = set()

    def rehearse(
        self,
        model: nn.Module,
        example: Example,
        loss: Loss | None,
        shard: Shard,
        optimizer: str | None,
        device: str | torch.device | None,
    ) -> Trace:
        """What a step does once `model` is sharded; see `trace_sharded`."""
        trained: Callable[[], torch.Tensor] | None = None

        def step() -> torch.Tensor:
            nonlocal trained
            if trained is None:
                self._sharded = shard(model)
                self._updates = None if optimizer is None else build_optimizer(optimizer, model, device)
                trained = training_step(self._sharded, example, loss, self._updates)
                self._let_go_of_whole_parameters()
            model.zero_grad(set_to_none=True)
            return trained()

        with blaming_the_users_code(), self._storages_watched():
            return self.run(step, None, _WARMUP)

    def _let_go_of_whole_parameters(self) -> None:
        """The engine has replaced them, and so nobody would hold them."""
        self.register_residents()
        self._parameters.clear()
        self.twins.forget()

    # Collectives and storages -------------------------------------------------------------------------

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if getattr(func, "namespace", "") != _COLLECTIVES:
            return super()._run(func, args, kwargs)
        work = finished_work()
        return (args[0], work) if len(schema_of(func).returns) > 1 else work

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, spot: Spot
    ) -> Any:
        for tensor in tensors_in(args, kwargs):
            key = storage_key(tensor)
            if key in self._emptied and tensor.untyped_storage().nbytes():
                self._emptied.discard(key)
                super()._record(aten.empty.memory_format, (list(tensor.shape),), {}, tensor, spot)
        return super()._record(func, args, kwargs, result, spot)

    @contextmanager
    def _storages_watched(self) -> Iterator[None]:
        """Notice storages that the engine empties and fills again while tensors go on looking at them."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if not size and storage.nbytes():
                value = self.builder.forget(key_of_storage(storage))
                if value is not None:
                    self._emptied.add(key_of_storage(storage))
                    self.died(value)
            return resize(storage, size)

        why = "FSDP empties storages that tensors still look at"
        with patched(torch.UntypedStorage, "resize_", resize_, why=why, since="torch 2.11"):
            yield

    # Roles --------------------------------------------------------------------------------------------

    def _mark_gradients(self) -> None:
        for name, parameter in self._sharded.named_parameters() if self._sharded is not None else ():
            module = name.rpartition(".")[0]
            self._mark(local_part(parameter), Role.PARAMETER, name, module)
            self._mark(local_part(parameter.grad), Role.GRADIENT, f"{name}.grad", module)

    def _mark_optimizer_state(self, optimizer: torch.optim.Optimizer | None) -> None:
        assert self._sharded is not None
        names: dict[torch.Tensor, str] = {of: name for name, of in self._sharded.named_parameters()}
        self._mark_gradients()
        for parameter, state in self._updates.state.items() if self._updates is not None else ():
            name = names[parameter]
            for key, thing in state.items():
                module = name.rpartition(".")[0]
                self._mark(local_part(thing), Role.OPTIMIZER_STATE, f"{name}.{key}", module)
