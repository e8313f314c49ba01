"""Hugging Face Accelerate within a budget: `prepare`, and then a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lowtide.errors import BadRequest, MissingExtra
from lowtide.integrations.ranks import optimize_where_it_trains, replicated_by
from lowtide.planner.batch_steps import BatchOf
from lowtide.planner.lengths import Lengths
from lowtide.solvers.method import Method, Scheduler
from lowtide.text.card import Card
from lowtide.text.progress import bar_while_planning
from lowtide.trace.step import Loss

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, DynamoBackend
except ModuleNotFoundError as error:
    raise MissingExtra("accelerate", "accelerate", "preparing a model for Accelerate") from error

_WHOLE_PARAMETERS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    *others: Any,
    budget: str | int | Card,
    method: str | Method | Scheduler | None = None,
    loss: Loss | None = None,
    on_new_shape: str = "plan",
    progress: bool = True,
    tiles: bool = False,
    kernels: str = "eager",
    example_of: BatchOf | None = None,
    lengths: Lengths | None = None,
    length_key: str | None = None,
    classes: int | Sequence[int] | None = None,
) -> tuple[Any, ...]:
    """`accelerator.prepare(model, optimizer, *others)`, and the model trains within `budget`.

    What is returned, and in which order, is Accelerate's. The first batch is planned for when the model
    meets it. The optimizer's states and its step are counted, mixed precision is known, and so is gradient
    accumulation, if the accelerator was told of it (`gradient_accumulation_steps`). Several processes share
    one plan, and DDP's buckets are counted.

    `loss` makes one number of the model's output, as the loop does; it is used for planning alone, with the
    output of any batch. It may be left out if the output is the loss or carries it. `budget`,
    `method`, `on_new_shape`, `tiles` and `kernels` are as in `lowtide.optimize`, and so is what is raised
    later.

    With `lengths`, `length_key` and `classes` as in `lowtide.optimize`, and `example_of(n)`, a batch of
    length n, plans are made for classes of lengths at once, and the budget is settled on the worst. Not with
    several processes.

    `lowtide.remove(accelerator.unwrap_model(model))` takes the plan off.

    Raises:
        BadRequest: the accelerator shards parameters (FSDP, DeepSpeed, …) or compiles the model itself.
    """
    _refuse_what_does_not_go_together(accelerator)
    prepared = accelerator.prepare(model, optimizer, *others)
    optimize_where_it_trains(
        accelerator.unwrap_model(prepared[0]),
        replicated_by(prepared[0]),
        _ahead(example_of, lengths, length_key, classes),
        budget=budget,
        method=method,
        loss=loss,
        optimizer=prepared[1].optimizer,
        accumulate=accelerator.gradient_accumulation_steps,
        on_new_shape=on_new_shape,
        progress=bar_while_planning(progress and accelerator.is_local_main_process),
        tiles=tiles,
        kernels=kernels,
    )
    return tuple(prepared)


def _ahead(
    example_of: BatchOf | None,
    lengths: Lengths | None,
    length_key: str | None,
    classes: int | Sequence[int] | None,
) -> dict[str, Any]:
    """What `lowtide.optimize` is told of the lengths that will come."""
    said = {"example": example_of, "lengths": lengths, "length_key": length_key, "classes": classes}
    return {name: value for name, value in said.items() if value is not None}


def _refuse_what_does_not_go_together(accelerator: Accelerator) -> None:
    if accelerator.distributed_type not in _WHOLE_PARAMETERS:
        raise BadRequest(
            f"a plan is for whole parameters on one device, and this accelerator works with "
            f"{accelerator.distributed_type.value}. Train with DDP or on one device."
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise BadRequest(
            "this accelerator compiles the model, and a plan is itself compiled, op by op. Leave out "
            "dynamo_backend."
        )
