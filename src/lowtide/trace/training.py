"""A dry run of the usual training step: the user's model and loss, on fake tensors, with costs."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from lowtide.compat.undo import undone
from lowtide.cost.price import with_costs
from lowtide.errors import BadRequest, LowtideError
from lowtide.trace.dry_run import Trace, dry_run
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import CALLS_USERS_CODE, optimizer_of, training_step
from lowtide.trace.user_lines import OURS, is_users, shortened


def trace_training(spec: StepSpec) -> Trace:
    """A dry run of a step, with the costs of its ops if they are to be profiled."""
    updates = optimizer_of(spec.optimizer, spec.model, spec.device)
    step = training_step(spec.model, spec.example, spec.loss, updates)
    with empty_gradients(spec.model), blaming_the_users_code():
        trace = dry_run(
            step,
            model=spec.model,
            optimizer=updates,
            device=spec.device,
            warmup=0 if updates is None else 1,
            name=spec.name,
        )
    return replace(trace, graph=with_costs(trace.graph, spec.progress)) if spec.profile else trace


@contextmanager
def empty_gradients(model: nn.Module) -> Iterator[None]:
    """Without the gradients that an earlier step has left, while the block runs."""
    left = [(parameter, parameter.grad) for parameter in model.parameters()]
    with undone(partial(_give_gradients, left)):
        for parameter, _ in left:
            parameter.grad = None
        yield


def _give_gradients(gradients: list[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


@contextmanager
def blaming_the_users_code() -> Iterator[None]:
    """Turn what the user's code raises while the block runs into BadRequest, with the user's own frames."""
    try:
        yield
    except LowtideError:
        raise
    except Exception as error:  # the model and the loss are the user's code and may raise anything
        if _is_lowtides_bug(error):
            raise
        raise BadRequest(f"the training step raised an error.\n{shortened(error)}") from error


def _is_lowtides_bug(error: Exception) -> bool:
    """Whether an error comes from lowtide itself; the file that calls the user's code excepted."""
    origin = traceback.extract_tb(error.__traceback__)[-1].filename
    inside = origin.startswith(f"{OURS}/") and not is_users(origin)
    return inside and origin != CALLS_USERS_CODE
