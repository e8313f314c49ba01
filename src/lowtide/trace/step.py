"""The usual training step: forward, loss, backward, optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lowtide.compat.trees import tree_map
from lowtide.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Arguments:
    """Positional and keyword arguments of a model, where it takes both."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LossWithTargets:
    """A loss of output and targets, for one batch."""

    loss: Callable[..., torch.Tensor]
    targets: tuple[Any, ...]

    def __call__(self, output: Any) -> torch.Tensor:
        return self.loss(output, *self.targets)


Example: TypeAlias = tuple[Any, ...] | Mapping[str, Any] | torch.Tensor | Arguments
Loss: TypeAlias = Callable[..., torch.Tensor]  # of the output, and of targets if it takes some
Updates: TypeAlias = str | torch.optim.Optimizer  # one that lowtide knows by name, or the one that there is

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
NOTHING_TO_TRAIN = (
    "does not depend on anything that requires gradients, so there is nothing to train. "
    "Are all parameters frozen, or does the forward run under torch.no_grad()?"
)
CALLS_USERS_CODE = __file__  # an error that arises in this file is the user's: a loss that takes nothing, say


def training_step(
    model: nn.Module,
    example: Example,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backwards: int = 1,
) -> Callable[[], torch.Tensor]:
    """The step that nearly every training loop runs; it returns the loss.

    The model's output stays referenced until the step ends, as it does in a loop that gives it a name; that
    of earlier `backwards`, whose gradients are added to, does not. Where the example wants a gradient, the
    step's backward ends there, whatever the example was made from.
    """

    given = arguments(example)

    def step() -> torch.Tensor:
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        for _ in range(backwards - 1):
            args, kwargs = tree_map(_beginning, given)
            _go_back(loss_of(model(*args, **kwargs), loss))
        args, kwargs = tree_map(_beginning, given)
        output = model(*args, **kwargs)
        number = loss_of(output, loss)
        _go_back(number)
        if optimizer is not None:
            optimizer.step()
        return number.detach()

    return step


def _go_back(loss: torch.Tensor) -> None:
    """The backward, after the autocast that the forward ran under: as PyTorch says it should be.

    What that has cast of the weights is let go of when it ends, and cast anew in the next step.
    """
    with ExitStack() as stack:
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            torch.clear_autocast_cache()
            stack.enter_context(torch.autocast(device, enabled=False))
        loss.backward()


def _beginning(thing: Any) -> Any:
    """A tensor that wants a gradient as one that autograd begins at; everything else as it is."""
    wants_one = isinstance(thing, torch.Tensor) and thing.requires_grad
    return thing.detach().requires_grad_() if wants_one else thing


def arguments(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that an example stands for."""
    if isinstance(example, Arguments):
        return example.args, dict(example.kwargs)
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, tuple):
        return example, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    raise BadRequest(
        f"the example is a {type(example).__name__}. "
        "Give a tuple of the model's arguments, (images,), or a dict of its keyword arguments."
    )


def declared(example: Example, loss: Loss | None, target: Any = None) -> tuple[Example, Loss | None]:
    """What the model is called with, and a loss of its output alone.

    A loss that takes more than the output (`nn.CrossEntropyLoss()`) is given the `target`, or the last of
    the example's elements: `(images, labels)` is what a training loop has.

    Raises:
        BadRequest: there is no target for such a loss, or a target for none.
    """
    if target is not None:
        if loss is None:
            raise BadRequest("a target is given, and no loss that compares the model's output with it.")
        return example, LossWithTargets(loss, (target,))
    wanted = targets_wanted(loss)
    if not wanted:
        return example, loss
    assert loss is not None
    if not isinstance(example, (tuple, list)) or len(example) <= wanted:
        raise BadRequest(
            "the loss takes targets beside the model's output, and the example has none. Give them as "
            "target=labels, or last in the example: (images, labels)."
        )
    return tuple(example[:-wanted]), LossWithTargets(loss, tuple(example[-wanted:]))


def targets_wanted(loss: Loss | None) -> int:
    """How many arguments a loss must be given beside the model's output."""
    if loss is None:
        return 0
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters
    except ValueError:  # built into PyTorch, and says nothing of itself
        return 0
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in parameters.values() if each.kind in places and each.default is each.empty]
    return max(0, len(required) - 1)


def carried_loss(output: Any) -> torch.Tensor | None:
    """The one number that a model's output is, or carries as `.loss`, `["loss"]` or its first element."""
    if isinstance(output, torch.Tensor):
        found: object = output
    elif isinstance(output, Mapping):
        found = output.get("loss")
    else:
        found = getattr(output, "loss", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def loss_of(output: Any, loss: Loss | None) -> torch.Tensor:
    """The number that the backward begins from: what `loss` makes of a model's output, or what that carries.

    Raises:
        BadRequest: there is no such number, or nothing in it can be trained.
    """
    if loss is not None:
        return _scalar(loss(output))
    found = carried_loss(output)
    if found is None:
        raise BadRequest(
            f"the model's output ({_described(output)}) is not a loss and carries none. "
            "Beside model and example, give a loss: a function that makes one number of the output."
        )
    return _scalar(found)


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise BadRequest(f"the loss must be a tensor of one number, but it is {_described(loss)}.")
    if not loss.requires_grad:
        raise BadRequest(f"the loss {NOTHING_TO_TRAIN}")
    return loss


def _described(thing: object) -> str:
    if isinstance(thing, torch.Tensor):
        return f"a tensor of shape {tuple(thing.shape)}"
    return f"of type {type(thing).__name__}"


def optimizer_of(
    updates: Updates | None, model: nn.Module, device: str | torch.device | None = None
) -> torch.optim.Optimizer | None:
    """The optimizer that is given, or that is meant by a name; see `build_optimizer`."""
    check_optimizer(updates)
    return build_optimizer(updates, model, device) if isinstance(updates, str) else updates


def optimizer_name(updates: Updates | None) -> str | None:
    """What to call an optimizer in a report."""
    return type(updates).__name__ if isinstance(updates, torch.optim.Optimizer) else updates


def check_optimizer(updates: object) -> None:
    """Raise BadRequest unless `updates` is an optimizer, the name of one, or None."""
    if isinstance(updates, str) and updates not in OPTIMIZERS:
        raise BadRequest(f"there is no optimizer '{updates}'. Choose one of {', '.join(OPTIMIZERS)}.")
    if not isinstance(updates, str | torch.optim.Optimizer | None):
        raise BadRequest(
            f"the optimizer is a {type(updates).__name__}. Give one of torch.optim.Optimizer, or one of the "
            f"names {', '.join(OPTIMIZERS)}."
        )


def build_optimizer(
    name: str, model: nn.Module, device: str | torch.device | None = None
) -> torch.optim.Optimizer:
    """The optimizer of that name over what `model` trains, as it will work on `device`."""
    check_optimizer(name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise BadRequest("no parameter of the model requires gradients, so there is nothing to optimize.")
    # On CUDA torch.optim works on all parameters at once, with temporaries as large as all of them.
    # It decides so by looking at their type and device, and fake ones would not convince it.
    return OPTIMIZERS[name](trained, foreach=True if _on_cuda(model, device) else None)


def _on_cuda(model: nn.Module, device: str | torch.device | None) -> bool:
    if device is not None:
        return str(device).partition(":")[0] == "cuda"
    return any(parameter.is_cuda for parameter in model.parameters())
