"""How a model calls a part: beside a skip, twice, frozen, hooked, by chance, depending on numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz.parts import Part

Wrapping = Callable[[random.Random, nn.Module], nn.Module]


def _as_it_is(rng: random.Random, part: nn.Module) -> nn.Module:
    return part


def _beside_a_skip(rng: random.Random, part: nn.Module) -> nn.Module:
    return Part(lambda m, x: x + m.part(x), part=part)


def _twice(rng: random.Random, part: nn.Module) -> nn.Module:
    return Part(lambda m, x: m.part(m.part(x)), part=part)


def _evaluated(rng: random.Random, part: nn.Module) -> nn.Module:
    """Its dropout is off, and its norms use what they know."""
    return Part(lambda m, x: m.part.eval()(x), part=part)


def _frozen(rng: random.Random, part: nn.Module) -> nn.Module:
    for parameter in part.parameters():
        parameter.requires_grad_(False)
    return part


def _checkpointed(rng: random.Random, part: nn.Module) -> nn.Module:
    """Not what has buffers: PyTorch's checkpoint changes them twice, and once where torch.compile sees it."""
    if next(part.buffers(), None) is not None:
        return part
    return Part(lambda m, x: checkpoint(m.part, x, use_reentrant=False), part=part)


def _hooked(rng: random.Random, part: nn.Module) -> nn.Module:
    seen: list[int] = []

    def changes(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * 0.9

    def looks(module: nn.Module, args: Any, out: Tensor) -> None:
        seen.append(out.numel())

    def before(module: nn.Module, args: Any) -> Any:
        return tuple(arg * 1.1 for arg in args)

    def backward(module: nn.Module, incoming: Any, outgoing: Any) -> Any:
        return tuple(None if gradient is None else gradient * 0.5 for gradient in incoming)

    which = rng.choice(("changes", "looks", "before", "backward"))
    if which == "before":
        part.register_forward_pre_hook(before)
    elif which == "backward":
        part.register_full_backward_hook(backward)
    else:
        part.register_forward_hook(changes if which == "changes" else looks)
    return part


def _by_chance(rng: random.Random, part: nn.Module) -> nn.Module:
    def python(m: Any, x: Tensor) -> Tensor:
        if random.random() < 0.3:
            return x
        found: Tensor = m.part(x)
        return found

    def tensor(m: Any, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.3:
            return x
        found: Tensor = m.part(x)
        return found

    return Part(rng.choice((python, tensor)), part=part)


def _depending(rng: random.Random, part: nn.Module) -> nn.Module:
    def branch(m: Any, x: Tensor) -> Tensor:
        found: Tensor = m.part(x) if x.mean() > -10 else x
        return found

    def item(m: Any, x: Tensor) -> Tensor:
        found: Tensor = m.part(x) * (1.0 + float(x.detach().mean()))
        return found

    def chosen(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.part(x)
        return out - out[x > 0].mean()

    def broken(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.part(x)
        torch._dynamo.graph_break()
        return out.tanh()

    return Part(rng.choice((branch, item, chosen, broken)), part=part)


# How often each is drawn.
WRAPPINGS: Mapping[str, tuple[int, Wrapping]] = {
    "": (14, _as_it_is),
    "beside a skip": (6, _beside_a_skip),
    "twice": (1, _twice),
    "evaluated": (1, _evaluated),
    "frozen": (1, _frozen),
    "checkpointed": (1, _checkpointed),
    "hooked": (1, _hooked),
    "by chance": (1, _by_chance),
    "depending on numbers": (1, _depending),
}
