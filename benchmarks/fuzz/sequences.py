"""Parts for sequences, (batch, places, channels): layers, attention, recurrence, shapes, places."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fuzz.parts import Maker, Part, weight

HEADS = 2

# Layers -------------------------------------------------------------------------------------------------

_PLAIN = (F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.elu, F.softplus, F.mish, F.hardswish)
_IN_PLACE = (nn.ReLU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Hardswish, nn.Mish, nn.Hardtanh, nn.CELU)


def _linear(rng: random.Random, c: int) -> nn.Module:
    act = rng.choice(_PLAIN)
    return Part(lambda m, x: act(m.lin(x)), lin=nn.Linear(c, c, bias=rng.random() < 0.7))


def _in_place_activation(rng: random.Random, c: int) -> nn.Module:
    return nn.Sequential(nn.Linear(c, c), rng.choice(_IN_PLACE)(inplace=True))


def _bottleneck(rng: random.Random, c: int) -> nn.Module:
    act = rng.choice(_PLAIN)
    return Part(lambda m, x: m.down(act(m.up(x))), up=nn.Linear(c, 2 * c), down=nn.Linear(2 * c, c))


def _gated(rng: random.Random, c: int) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        one, two = m.lin(x).chunk(2, dim=-1)
        gated: Tensor = one * F.silu(two)
        return gated

    return Part(run, lin=nn.Linear(c, 2 * c))


def _layer_norm(rng: random.Random, c: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(c, elementwise_affine=rng.random() < 0.7), nn.Linear(c, c))


def _rms_norm(rng: random.Random, c: int) -> nn.Module:
    return nn.Sequential(nn.RMSNorm(c), nn.Linear(c, c))


def _turned(norm: nn.Module) -> nn.Module:
    """A norm over channels that come second."""
    return Part(lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2), norm=norm)


def _batch_norm(rng: random.Random, c: int) -> nn.Module:
    momentum = rng.choice((0.1, 0.3, None))
    norm = nn.BatchNorm1d(c, momentum=momentum, track_running_stats=rng.random() < 0.8)
    return nn.Sequential(nn.Linear(c, c), _turned(norm))


def _group_norm(rng: random.Random, c: int) -> nn.Module:
    return nn.Sequential(nn.Linear(c, c), _turned(nn.GroupNorm(rng.choice((1, 2, 4)), c)))


def _instance_norm(rng: random.Random, c: int) -> nn.Module:
    norm = nn.InstanceNorm1d(c, affine=rng.random() < 0.5, track_running_stats=rng.random() < 0.7)
    return nn.Sequential(nn.Linear(c, c), _turned(norm))


def _convolution(rng: random.Random, c: int) -> nn.Module:
    groups = rng.choice((1, 2, c))
    conv = nn.Conv1d(c, c, 3, padding=1, groups=groups, padding_mode=rng.choice(("zeros", "circular")))
    return Part(lambda m, x: F.gelu(m.conv(x.mT).mT), conv=conv)


def _bilinear(rng: random.Random, c: int) -> nn.Module:
    return Part(
        lambda m, x: m.pair(x.to(m.pair.weight.dtype), torch.tanh(x).to(m.pair.weight.dtype)),
        pair=nn.Bilinear(c, c, c),
    )


# Attention ----------------------------------------------------------------------------------------------


def _split(x: Tensor) -> Tensor:
    found: Tensor = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return found


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _mask(kind: str, x: Tensor) -> Tensor | None:
    places = x.shape[1]
    if kind == "bool":
        return torch.ones(places, places, dtype=torch.bool, device=x.device).tril(1)
    if kind == "float":
        return torch.full((places, places), -1.0, device=x.device, dtype=x.dtype).triu(1)
    return None


def _attention(rng: random.Random, c: int) -> nn.Module:
    kind, dropout = rng.choice(("none", "causal", "bool", "float")), rng.choice((0.0, 0.0, 0.2))

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = map(_split, m.qkv(x).chunk(3, dim=-1))
        mask = _mask(kind, q.flatten(0, 1))
        found = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=kind == "causal")
        out: Tensor = m.out(_joined(found))
        return out

    return Part(run, qkv=nn.Linear(c, 3 * c), out=nn.Linear(c, c))


def _written_attention(rng: random.Random, c: int) -> nn.Module:
    causal, drops, in_place = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.3

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = map(_split, (m.q(x), m.k(x), m.v(x)))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            hide = scores.masked_fill_ if in_place else scores.masked_fill
            scores = hide(hidden, float("-inf"))
        weights = F.dropout(scores.softmax(-1), 0.1, m.training) if drops else scores.softmax(-1)
        return _joined(weights @ v)

    return Part(run, q=nn.Linear(c, c), k=nn.Linear(c, c), v=nn.Linear(c, c))


def _multihead(rng: random.Random, c: int) -> nn.Module:
    attention = nn.MultiheadAttention(c, HEADS, dropout=rng.choice((0.0, 0.1)), batch_first=True)
    weights, padded = rng.random() < 0.5, rng.random() < 0.4

    def run(m: Any, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if padded else None
        if padding is not None:
            padding[:, -1] = True
        found: Tensor = m.attention(x, x, x, key_padding_mask=padding, need_weights=weights)[0]
        return found

    return Part(run, attention=attention)


def _encoder_layer(rng: random.Random, c: int) -> nn.Module:
    first, dropout = rng.random() < 0.5, rng.choice((0.0, 0.1))
    return nn.TransformerEncoderLayer(c, HEADS, 2 * c, dropout, batch_first=True, norm_first=first)


# Recurrence ---------------------------------------------------------------------------------------------


def _recurrent(rng: random.Random, c: int) -> nn.Module:
    kind, both = rng.choice((nn.LSTM, nn.GRU, nn.RNN)), rng.random() < 0.3
    layers, width = rng.choice((1, 1, 2)), c // 2 if both else c
    dropout = 0.2 if layers > 1 and rng.random() < 0.5 else 0.0
    net = kind(c, width, layers, batch_first=True, bidirectional=both, dropout=dropout)
    return Part(lambda m, x: m.net(x)[0], net=net)


def _cells(rng: random.Random, c: int) -> nn.Module:
    long = rng.random() < 0.5

    def run(m: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], c)
        other, seen = state, []
        for place in range(min(x.shape[1], 4)):
            if long:
                state, other = m.cell(x[:, place], (state, other))
            else:
                state = m.cell(x[:, place], state)
            seen.append(state)
        return x + torch.stack(seen, 1).mean(1, keepdim=True)

    return Part(run, cell=(nn.LSTMCell if long else nn.GRUCell)(c, c))


def _scan(rng: random.Random, c: int) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        decay, state, seen = torch.sigmoid(m.decay), torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = decay * state + (1 - decay) * token
            seen.append(state)
        return torch.stack(seen, 1)

    return Part(run, decay=weight(c))


# Shapes and places --------------------------------------------------------------------------------------


def _moved(rng: random.Random, c: int) -> nn.Module:
    runs = (
        lambda m, x: torch.cat(m.lin(x).flip(1).chunk(2, dim=-1)[::-1], -1),
        lambda m, x: m.lin(x.roll(1, 1)).mT.contiguous().mT,
        lambda m, x: m.lin(x).unfold(2, 2, 2).mean(-1).repeat_interleave(2, dim=-1),
        lambda m, x: (m.lin(x).unsqueeze(2).expand(-1, -1, 3, -1) * m.scale).sum(2),
        lambda m, x: torch.einsum("btc,bsc,bsd->btd", x, torch.tanh(m.lin(x)), x) / x.shape[1],
        lambda m, x: torch.baddbmm(x, m.lin(x) @ x.mT, x, alpha=0.1),
        lambda m, x: m.lin(x) - x.mean(1, keepdim=True) / (x.std(1, keepdim=True) + 1),
        lambda m, x: m.lin(F.pad(x, (0, 0, 1, 0))[:, :-1]),
        lambda m, x: m.lin(x).cumsum(1) / x.shape[1],
        lambda m, x: m.lin(x) * x.logsumexp(-1, keepdim=True),
    )
    return Part(rng.choice(runs), lin=nn.Linear(c, c), scale=weight(3, 1))


def _gathered(rng: random.Random, c: int) -> nn.Module:
    runs = (
        lambda m, x: m.lin(x).index_select(1, torch.arange(x.shape[1]).flip(0)),
        lambda m, x: x.gather(-1, m.lin(x).argsort(-1)),
        lambda m, x: m.lin(x).sort(-1).values,
        lambda m, x: torch.where(x > 0, m.lin(x), x),
        lambda m, x: m.lin(x)[:, torch.arange(x.shape[1]) // 2],
        lambda m, x: m.lin(x) * x.topk(2, -1).values.sum(-1, keepdim=True),
        lambda m, x: m.lin(x).take_along_dim(x.argmax(1, keepdim=True), 1) + x,
        lambda m, x: m.lin(x).masked_fill(x.abs() > 1.5, 0.0),
        lambda m, x: torch.clamp(m.lin(x), -0.5, 0.5).maximum(x.amin(1, keepdim=True)),
    )
    return Part(rng.choice(runs), lin=nn.Linear(c, c))


def _scattered(rng: random.Random, c: int) -> nn.Module:
    def places(x: Tensor) -> Tensor:
        return torch.arange(x.shape[1]) // 2

    runs = (
        lambda m, x: torch.zeros_like(x).index_add(1, places(x), m.lin(x)),
        lambda m, x: torch.zeros_like(x).index_add_(1, places(x), m.lin(x)),
        lambda m, x: x.scatter_add(-1, x.argsort(-1), m.lin(x)),
        lambda m, x: x.scatter(1, x.argmax(1, keepdim=True), m.lin(x)[:, :1]),
        lambda m, x: x.scatter_reduce(1, x.argsort(1), m.lin(x), "mean"),
        lambda m, x: m.lin(x).index_put(
            (torch.arange(x.shape[0]), torch.zeros(x.shape[0], dtype=torch.long)), x[:, 1]
        ),
        lambda m, x: m.lin(x).index_copy(1, torch.tensor([0, 1]), x[:, :2]),
        lambda m, x: m.lin(x).slice_scatter(x[:, :1], 1, 0, 1),
    )
    return Part(rng.choice(runs), lin=nn.Linear(c, c))


def _experts(rng: random.Random, c: int) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares, chosen = m.router(tokens).softmax(-1).topk(1, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(m.experts):
            mine = (chosen == number).any(-1).to(tokens.dtype).unsqueeze(-1)
            out = out + expert(tokens) * shares * mine
        return out.view_as(x)

    return Part(run, router=nn.Linear(c, 3), experts=nn.ModuleList(nn.Linear(c, c) for _ in range(3)))


def _frequencies(rng: random.Random, c: int) -> nn.Module:
    def full(x: Tensor) -> Tensor:
        return x if x.dtype is torch.float64 else x.float()

    def conjugated(m: Any, x: Tensor) -> Tensor:
        turns = torch.view_as_complex(m.two)
        mixed = torch.complex(full(m.lin(x)), full(x)) @ torch.outer(turns, turns.conj())
        return torch.view_as_real(mixed.conj() * turns).sum(-1).to(x.dtype)

    runs = (
        lambda m, x: torch.fft.irfft(
            torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.two), n=x.shape[1], dim=1
        ),
        lambda m, x: m.lin(torch.fft.fft2(x).real),
        lambda m, x: m.lin(x) + torch.fft.rfft(x, dim=-1).abs().mean(-1, keepdim=True),
        lambda m, x: torch.fft.ifft(torch.fft.fft(m.lin(x), dim=1) * 0.5, dim=1).real + x,
        lambda m, x: torch.view_as_real(torch.polar(torch.ones_like(x), m.lin(x))).sum(-1),
        conjugated,
    )
    return Part(rng.choice(runs), lin=nn.Linear(c, c), two=weight(c, 2))


SEQUENCES: Mapping[str, Maker] = {
    "linear": _linear,
    "activation in place": _in_place_activation,
    "bottleneck": _bottleneck,
    "gated": _gated,
    "layer norm": _layer_norm,
    "rms norm": _rms_norm,
    "batch norm": _batch_norm,
    "group norm": _group_norm,
    "instance norm": _instance_norm,
    "convolution": _convolution,
    "bilinear": _bilinear,
    "attention": _attention,
    "written attention": _written_attention,
    "multihead attention": _multihead,
    "encoder layer": _encoder_layer,
    "recurrent": _recurrent,
    "cells": _cells,
    "scan": _scan,
    "moved": _moved,
    "gathered": _gathered,
    "scattered": _scattered,
    "experts": _experts,
    "frequencies": _frequencies,
}
