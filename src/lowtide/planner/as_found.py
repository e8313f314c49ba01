"""What steps change, put back as it was: run for a look, they use up nothing of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.trace.inputs import named_inputs
from lowtide.trace.put_back import random_streams, restorer
from lowtide.trace.spec import StepSpec


@contextmanager
def as_found(spec: StepSpec) -> Iterator[Callable[[], None]]:
    """Steps that are run in the block train the model; afterwards it is as it was.

    So are its gradients and attributes, the batch, the optimizer if it was given, and the random streams. In
    the block there are no gradients to begin with, and the function that is yielded puts back everything
    else, for another run from the same start. Copies are on the CPU, so that they take no part in what is
    measured on a device.
    """
    model, optimizer = spec.model, spec.optimizer
    batch = list(named_inputs(model, spec.example, spec.loss).values())
    states = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else {}
    of_states = [thing for state in states.values() for thing in state.values()]
    held = [*model.parameters(), *model.buffers(), *batch, *of_states]
    copies = [
        (tensor, tensor.detach().to("cpu", copy=True)) for tensor in held if isinstance(tensor, torch.Tensor)
    ]
    gradients = [(leaf, leaf.grad) for leaf in (*model.parameters(), *batch) if leaf.is_leaf]
    undo = [random_streams(), *map(restorer, model.modules())]
    undo += [_contents(states), *(_contents(state) for state in states.values())]

    def put_back() -> None:
        for leaf, _ in gradients:
            leaf.grad = None
        for restore in undo:
            restore()
        with torch.no_grad():
            for tensor, copy in copies:
                if not torch.equal(tensor, copy.to(tensor.device)):  # what is expanded cannot be written to
                    tensor.copy_(copy)

    for leaf, _ in gradients:
        leaf.grad = None
    try:
        yield put_back
    finally:
        put_back()
        for leaf, gradient in gradients:
            leaf.grad = gradient


def _contents(container: dict[Any, Any]) -> Callable[[], None]:
    before = dict(container)

    def restore() -> None:
        container.clear()
        container.update(before)

    return restore
