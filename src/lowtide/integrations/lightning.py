"""Lightning within a budget: a callback that plans the whole `training_step`.

In Lightning the loss is computed in `training_step`, outside of any `forward`. So that is what is planned:
as the forward of a module around the user's, which Dynamo follows through everything but `log`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.compat.fake import is_fake_now
from lowtide.compat.lightning import is_compiled
from lowtide.compat.patches import patched
from lowtide.errors import BadRequest, MissingExtra
from lowtide.execute.apply import plans_of, remove
from lowtide.integrations.epoch import WorstBatch, look_ahead
from lowtide.integrations.ranks import optimize_where_it_trains, replicated_by
from lowtide.solvers import is_scheduler
from lowtide.solvers.method import Scheduler
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.card import Card
from lowtide.text.progress import bar_while_planning
from lowtide.trace.step import Loss

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ModuleNotFoundError as error:
    raise MissingExtra("lightning", "lightning", "a callback for Lightning's Trainer") from error

_LOGGING = ("log", "log_dict", "print")


class LowtideCallback(Callback):  # type: ignore[misc]
    """Keeps `training_step` within `budget`: `Trainer(callbacks=[LowtideCallback("8GiB")])`.

    The first batch is planned for when it comes, new shapes when they come, and no data is looked at before.
    Everything is counted that a step holds: parameters, optimizer states, gradients (those of the
    step before too, since Lightning drops them only after the next forward), the batch, activations and
    temporaries. Gradient accumulation, precision and the optimizer are the Trainer's. Several processes share
    one plan, and DDP's buckets are counted.

    Losses and weights are those of a training without it; bit for bit where PyTorch is deterministic and
    there is no mixed precision (see `lowtide.apply`). While a plan is made, `training_step` runs on fake
    tensors: `self.log`, `self.log_dict` and `self.print` are silent then, and attributes of modules are put
    back. A `training_step` that decides by `batch_idx` or `self.global_step` is compiled anew for each of
    their values, and refused (CannotApply) where these change what it computes.

    `module` names a submodule to plan in its stead ("net"), with a `loss` that makes one number of its
    output, unless that carries one: for a `training_step` that cannot be captured. What happens
    outside of the module is not counted then. `budget`, `method`, for ops, `on_new_shape`, `tiles` and
    `kernels` are as in `lowtide.optimize`. With `progress` a terminal shows how far planning is.

    With a `length_key` a sample of the training data has its length, or its tokens, under that key, and the
    data is looked at before the first step, every sample once: the longest batch that can come is named
    (`worst`, and a warning), and the budget is settled on it rather than on the batch that comes first. Plans
    are made for `classes` of lengths, how many (4) or which, when the first batch comes; batches of other
    lengths follow the plan of a class, as in `lowtide.optimize`. Not with several processes, nor with
    `module`.

    `plans` has what was planned, one plan for each shape of batch, from the first batch on; also after the
    training. The plan is taken off the module when the training ends, or an exception ends it.

    Raises, when the training begins:
        BadRequest: optimization is manual, the strategy shards parameters, the module is compiled, there
            is no such submodule, or an argument makes no sense.
    Raises, in the first step: what `lowtide.optimize` does, InfeasibleBudget above all.
    """

    def __init__(
        self,
        budget: str | int | Card,
        *,
        module: str | None = None,
        loss: Loss | None = None,
        method: str | Scheduler | None = None,
        on_new_shape: str = "plan",
        progress: bool = True,
        tiles: bool = False,
        kernels: str = "eager",
        length_key: str | None = None,
        classes: int | Sequence[int] | None = None,
    ) -> None:
        if method is not None and not is_scheduler(method):
            raise BadRequest(f"{method} plans layers; Lightning's steps are planned op by op: try auto.")
        if loss is not None and module is None:
            raise BadRequest("training_step returns the loss; `loss` is for a `module` that has none.")
        if length_key is not None and module is not None:
            raise BadRequest(
                "length_key is for batches, and a module is given what training_step makes of one. Leave one "
                "of the two out."
            )
        self.budget = budget
        self.length_key = length_key
        self.classes = classes
        self.worst: WorstBatch | None = None
        self.module = module
        self.loss = loss
        self.method = method
        self.on_new_shape = on_new_shape
        self.progress = progress
        self.tiles = tiles
        self.kernels = kernels
        self.plans: tuple[Solution | GraphSolution, ...] = ()
        self._planned: nn.Module | None = None
        self._undo = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put a plan on the module that will be made when the first batch comes."""
        _refuse_what_does_not_go_together(trainer, pl_module)
        planned = _TrainingStep(pl_module) if self.module is None else _submodule(pl_module, self.module)
        loader = trainer.train_dataloader
        self.worst, ahead = look_ahead(loader, self.length_key, self.classes, _in_place_of_first)
        optimize_where_it_trains(
            planned,
            replicated_by(trainer.strategy.model),
            ahead,
            budget=self.budget,
            method=self.method,
            loss=self.loss,
            optimizer=trainer.optimizers[0] if trainer.optimizers else None,
            accumulate=max(2, trainer.accumulate_grad_batches),  # the step before leaves its gradients
            on_new_shape=self.on_new_shape,
            progress=bar_while_planning(self.progress and trainer.is_global_zero),
            tiles=self.tiles,
            kernels=self.kernels,
        )
        self._planned = planned
        self._undo.callback(remove, planned)
        if isinstance(planned, _TrainingStep):
            for name in _LOGGING:
                self._stand_in(pl_module, name, _unless_planning(getattr(pl_module, name)))
            self._stand_in(pl_module, "training_step", planned.as_method())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        """Look up what has been planned."""
        if self._planned is not None:
            self.plans = plans_of(self._planned)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the plan off."""
        self._take_off()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the plan off."""
        self._take_off()

    def _stand_in(self, pl_module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        """Replace a method on this one instance."""
        why = "Lightning computes the loss in training_step, outside of any forward"
        self._undo.enter_context(patched(pl_module, name, function, why=why, since="lightning 2.4"))

    def _take_off(self) -> None:
        self._undo.close()
        self._planned = None


@dataclass(frozen=True, eq=False)
class _Counters:
    """`batch_idx` and the like. They are no inputs: a batch with another number is planned for already."""

    values: tuple[int, ...]


def _in_place_of_first(
    batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `_TrainingStep` is called with for another batch than the first."""
    return (batch, *args[1:]), kwargs


class _TrainingStep(nn.Module):
    """The training step of a LightningModule as the forward of a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.own: Callable[..., Any] = module.training_step  # type: ignore[assignment]

    def forward(self, batch: Any, counters: _Counters) -> Any:
        return self.own(batch, *counters.values)

    def as_method(self) -> Callable[..., Any]:
        """What Lightning calls, and looks at, in place of the module's own training step."""

        @functools.wraps(self.own)
        def training_step(batch: Any, *counters: int) -> Any:
            return self(batch, _Counters(counters))

        return training_step


def _unless_planning(method: Callable[..., None]) -> Callable[..., None]:
    """`method`, which is not compiled, and does nothing where its arguments are fakes."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> None:
        if not is_fake_now():
            method(*args, **kwargs)

    uncompiled: Callable[..., None] = torch.compiler.disable(call)
    return uncompiled


def _submodule(pl_module: nn.Module, path: str) -> nn.Module:
    try:
        return pl_module.get_submodule(path)
    except AttributeError:
        children = ", ".join(name for name, _ in pl_module.named_children())
        raise BadRequest(f"{type(pl_module).__name__} has no module '{path}'. It has: {children}.") from None


def _refuse_what_does_not_go_together(trainer: Any, pl_module: Any) -> None:
    name = type(pl_module).__name__
    if not pl_module.automatic_optimization:
        raise BadRequest(
            f"{name} optimizes manually: its training_step calls backward and optimizer itself, and a plan "
            "is for what comes before these. Call lowtide.optimize(network, …) for each network that it "
            "trains, or let Lightning optimize (automatic_optimization)."
        )
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise BadRequest(
            f"a plan is for whole parameters on one device, and the strategy is "
            f"{type(trainer.strategy).__name__}. Train with DDP or on one device."
        )
    if is_compiled(pl_module):
        raise BadRequest(f"{name} is compiled, and so is a plan. Give the Trainer the module as it is.")
