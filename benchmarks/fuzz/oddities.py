"""Parts for tensors of any rank whose last or second dimension is the channels: what goes wrong if it can.

In-place ops, views, buffers that change, random draws, custom gradients, parametrizations, frozen parts.
Each works elementwise, or through `mix`, a layer that mixes the channels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz.parts import Part, weight

Odd = Callable[[random.Random, nn.Module], nn.Module]  # made around a layer that mixes the channels

# In place, and views -----------------------------------------------------------------------------------


def _in_place(rng: random.Random, mix: nn.Module) -> nn.Module:
    def sliced(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.mix(x)
        out[:, ::2] *= 2
        out[:, 0] = 0.5
        return out

    def row_by_row(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.mix(x).clone()
        for number in range(out.shape[0]):
            out[number].mul_(1 + number)
        return out

    def filled(m: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.mul(x, 2.0, out=out) if not x.requires_grad else out.copy_(x).mul_(2.0)
        found: Tensor = m.mix(out)
        return found

    def written(m: Any, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:1] = m.mix(x)[:1]
        out[1:] += x[1:]
        return out

    runs = (
        lambda m, x: m.mix(x).mul_(0.5).add_(x),
        lambda m, x: m.mix(x).relu_().mul(1.5).clamp_(max=2.0),
        lambda m, x: m.mix(x).masked_fill_(x > 1, 0.0),
        lambda m, x: m.mix(x).transpose(0, -1).mul_(0.5).transpose(0, -1),
        lambda m, x: m.mix(x).addcmul_(x, x, value=0.1).div_(2),
        lambda m, x: m.mix(x).flatten().sub_(0.1).view_as(x),
        sliced,
        row_by_row,
        filled,
        written,
    )
    return Part(rng.choice(runs), mix=mix)


def _views(rng: random.Random, mix: nn.Module) -> nn.Module:
    runs = (
        lambda m, x: m.mix(x).detach() + m.mix(x),
        lambda m, x: m.mix(x)[:, 1:].sum() + x,
        lambda m, x: torch.stack((m.mix(x), x)).select(0, 0) + x.narrow(0, 0, 1),
        lambda m, x: m.mix(x).reshape(-1)[: x.numel()].reshape(x.shape),
        lambda m, x: m.mix(x.contiguous().as_strided(x.shape, x.contiguous().stride())),
        lambda m, x: m.mix(x).diagonal(0, 0, 1).mean() * x,
        lambda m, x: m.mix(x) * x.new_tensor([1.5]),
    )
    return Part(rng.choice(runs), mix=mix)


# State -------------------------------------------------------------------------------------------------


def _buffer_in_place(rng: random.Random, mix: nn.Module) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        out = m.mix(x)
        m.count.add_(1)
        m.mean.mul_(0.9).add_(out.detach().mean().to(m.mean.dtype), alpha=0.1)
        found: Tensor = out - m.mean if reads else out
        return found

    reads = rng.random() < 0.5
    return Part(run, mix=mix, count=torch.zeros((), dtype=torch.long), mean=torch.zeros(1))


def _buffer_anew(rng: random.Random, mix: nn.Module) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        out = m.mix(x)
        m.mean = 0.9 * m.mean + 0.1 * out.detach().mean().to(m.mean.dtype)
        found: Tensor = out * (1 + m.mean) if reads else out
        return found

    reads = rng.random() < 0.5
    return Part(run, mix=mix, mean=torch.zeros(1))


def _remembered(rng: random.Random, mix: nn.Module) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        m.last = m.mix(x)
        m.calls = getattr(m, "calls", 0) + 1
        found: Tensor = m.last + x
        return found

    return Part(run, mix=mix)


def _tied(rng: random.Random, mix: nn.Module) -> nn.Module:
    return nn.Sequential(mix, nn.Tanh(), mix)


def _frozen(rng: random.Random, mix: nn.Module) -> nn.Module:
    for parameter in mix.parameters():
        parameter.requires_grad_(False)
    return mix


def _no_grad(rng: random.Random, mix: nn.Module) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = m.mix(x).abs().mean()
        found: Tensor = x * scale
        return found

    return Part(run, mix=mix)


# Random numbers -----------------------------------------------------------------------------------------


def _dropped(rng: random.Random, mix: nn.Module) -> nn.Module:
    p = rng.choice((0.1, 0.5))
    runs = (
        lambda m, x: F.dropout(m.mix(x), p, m.training),
        lambda m, x: F.dropout(m.mix(x), p, m.training, inplace=True),
        lambda m, x: F.alpha_dropout(m.mix(x), p, m.training),
        lambda m, x: F.feature_alpha_dropout(m.mix(x), p, m.training),
        lambda m, x: F.dropout1d(m.mix(x).flatten(2) if x.dim() == 4 else m.mix(x), p, m.training).view_as(x),
        lambda m, x: F.rrelu(m.mix(x), training=m.training),
        lambda m, x: m.mix(x) * torch.bernoulli(torch.full_like(x[:1], 1 - p)),
        lambda m, x: (
            m.mix(x) * x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - p).div_(1 - p)
        ),
        lambda m, x: m.mix(x) * (torch.rand_like(x) > p),
        lambda m, x: m.mix(x) + 0.1 * torch.randn(x.shape, dtype=x.dtype),
        lambda m, x: m.mix(x)[torch.randperm(x.shape[0])],
        lambda m, x: F.gumbel_softmax(m.mix(x), dim=-1),
        lambda m, x: m.mix(x + torch.empty_like(x).normal_(0, 0.1)),
    )
    return Part(rng.choice(runs), mix=mix)


def _unused_draw(rng: random.Random, mix: nn.Module) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        torch.rand(3) if draws else torch.randn_like(x)
        out: Tensor = m.mix(x)
        return out

    draws = rng.random() < 0.5
    return Part(run, mix=mix)


def _number_of_python(rng: random.Random, mix: nn.Module) -> nn.Module:
    runs = (
        lambda m, x: m.mix(x) * random.uniform(0.5, 1.5),
        lambda m, x: m.mix(x) * float(np.random.uniform(0.5, 1.5)),
    )
    return Part(rng.choice(runs), mix=mix)


# Gradients of its own -----------------------------------------------------------------------------------


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return (2 * ctx.scale * x * gradient if ctx.needs_input_grad[0] else None), None


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient


def _custom_gradient(rng: random.Random, mix: nn.Module) -> nn.Module:
    runs = (
        lambda m, x: _Square.apply(m.mix(x), 0.5),  # type: ignore[no-untyped-call]
        lambda m, x: _Rounded.apply(m.mix(x)),  # type: ignore[no-untyped-call]
        lambda m, x: _Reversed.apply(m.mix(x)),  # type: ignore[no-untyped-call]
        lambda m, x: m.mix(x) + (m.mix(x).round() - m.mix(x)).detach(),
    )
    return Part(rng.choice(runs), mix=mix)


def _checkpointed(rng: random.Random, mix: nn.Module) -> nn.Module:
    """Without a BatchNorm: its statistics advance twice, and once where torch.compile sees the checkpoint."""
    if next(mix.buffers(), None) is not None:
        mix = next(module for module in mix.modules() if isinstance(module, nn.Linear | nn.Conv2d))

    def inside(m: Any, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(m.mix(x)), 0.2 if drops else 0.0, m.training)

    drops, reentrant = rng.random() < 0.5, rng.random() < 0.2
    return Part(lambda m, x: checkpoint(inside, m, x, use_reentrant=reentrant), mix=mix)


def _normed_weight(rng: random.Random, mix: nn.Module) -> nn.Module:
    layer = next(module for module in mix.modules() if isinstance(module, nn.Linear | nn.Conv2d))
    norms: list[Callable[..., Any]] = [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        spectral_norm,
    ]
    norms += [parametrizations.orthogonal] if isinstance(layer, nn.Linear) else []
    rng.choice(norms)(layer)
    return mix


def _gradient_hook(rng: random.Random, mix: nn.Module) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.mix(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 0.5)
        return out

    return Part(run, mix=mix)


def _learned(rng: random.Random, mix: nn.Module) -> nn.Module:
    runs = (
        lambda m, x: m.mix(x) * m.scale + m.shift,
        lambda m, x: m.mix(x * torch.exp(m.scale)),
        lambda m, x: torch.lerp(x.float(), m.mix(x).float(), torch.sigmoid(m.shift).float()).to(x.dtype),
        lambda m, x: m.mix(x) / (m.scale.square() + 1).sqrt(),
    )
    return Part(rng.choice(runs), mix=mix, scale=weight(1), shift=weight(1), unused=weight(2))


ODDITIES: Mapping[str, Odd] = {
    "in place": _in_place,
    "views": _views,
    "buffer changed in place": _buffer_in_place,
    "buffer assigned anew": _buffer_anew,
    "attribute remembered": _remembered,
    "called twice": _tied,
    "frozen": _frozen,
    "no grad": _no_grad,
    "dropped": _dropped,
    "unused draw": _unused_draw,
    "number of python": _number_of_python,
    "custom gradient": _custom_gradient,
    "checkpointed": _checkpointed,
    "weight normed": _normed_weight,
    "gradient hook": _gradient_hook,
    "learned": _learned,
}
