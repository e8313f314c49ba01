"""Everything that decides which ops a model runs, in words that can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.compat.modules import hooks_below
from lowtide.execute.identity import inputs_of

_MOST_NAMED = 3  # hooks or modules in a row; more of them are told apart by a digest


def circumstances(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: str | None = None,
    *,
    with_hooks: bool = True,
) -> tuple[str, ...]:
    """Everything that decides which ops a model runs: its inputs, autocast, modes, what is frozen, and hooks.

    The modes are those of submodules that differ from the model's own: a BatchNorm in evaluation while the
    model trains. The model's own hooks run around its forward and are not among them. `device` is where it
    will run, if it is not there yet: a model on meta knows of no autocast.
    """
    found = [*inputs_of(model, args, kwargs)]
    parameters = list(model.named_parameters())
    device = device or (parameters[0][1].device.type if parameters else "cpu")
    if device != "meta" and torch.is_autocast_enabled(device):
        found.append(f"autocast {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}")
    frozen = [name for name, parameter in parameters if not parameter.requires_grad]
    if frozen:
        found.append(f"frozen {_digest(frozen)}")
    modules = list(model.named_modules())
    others = [path for path, module in modules if module.training != model.training]
    if others:
        mode = "in evaluation" if model.training else "in training"
        found.append(f"{mode}: {_digest(others) if len(others) > _MOST_NAMED else ', '.join(others)}")
    hooked = hooks_below(modules) if with_hooks else ()
    hooks = [f"{_name(hook)} on {path or 'all modules'}" for path, hook in hooked]
    if hooks:
        found.append(f"hooks {_digest(hooks) if len(hooks) > _MOST_NAMED else ', '.join(hooks)}")
    return tuple(found)


def _name(hook: object) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(lines).encode()).hexdigest()[:16]
