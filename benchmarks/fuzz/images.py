"""Parts for images, (batch, channels, height, width): convolutions, norms, pooling, places."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fuzz.parts import Maker, Part


def _convolution(rng: random.Random, c: int) -> nn.Module:
    groups, bias = rng.choice((1, 1, 2, c)), rng.random() < 0.5
    mode: Any = rng.choice(("zeros", "zeros", "zeros", "reflect", "circular", "replicate"))
    size, dilation = rng.choice(((1, 1), (3, 1), (3, 2), (5, 1))) if mode == "zeros" else (3, 1)
    return nn.Conv2d(c, c, size, 1, dilation * (size // 2), dilation, groups, bias, mode)


def _norm(rng: random.Random, c: int) -> nn.Module:
    kind = rng.choice(("batch", "batch", "group", "instance", "untracked", "layer"))
    if kind == "batch":
        return nn.BatchNorm2d(c, momentum=rng.choice((0.1, None)), affine=rng.random() < 0.8)
    if kind == "untracked":
        return nn.BatchNorm2d(c, track_running_stats=False)
    if kind == "group":
        return nn.GroupNorm(rng.choice((1, 2, c)), c)
    if kind == "instance":
        return nn.InstanceNorm2d(c, affine=rng.random() < 0.5, track_running_stats=rng.random() < 0.6)
    return Part(lambda m, x: m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(c))


def _activation(rng: random.Random) -> nn.Module:
    in_place = rng.choice((nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.ReLU6, nn.Hardswish))
    return rng.choice((nn.GELU(), nn.PReLU(), nn.Softplus(), in_place(inplace=True), in_place(inplace=True)))


def _block(rng: random.Random, c: int) -> nn.Module:
    return nn.Sequential(_convolution(rng, c), _norm(rng, c), _activation(rng))


def _residual(rng: random.Random, c: int) -> nn.Module:
    in_place = rng.random() < 0.5

    def run(m: Any, x: Tensor) -> Tensor:
        out = m.second(m.first(x))
        if in_place:
            out += x
            return F.relu(out, inplace=True)
        return F.relu(out + x)

    return Part(run, first=_block(rng, c), second=nn.Sequential(_convolution(rng, c), _norm(rng, c)))


def _pooled(rng: random.Random, c: int) -> nn.Module:
    def up(m: Any, x: Tensor, like: Tensor) -> Tensor:
        return F.interpolate(m.conv(x), size=like.shape[-2:], mode=how)

    how = rng.choice(("nearest", "bilinear", "bicubic"))
    runs = (
        lambda m, x: up(m, F.max_pool2d(x, 2), x),
        lambda m, x: up(m, F.avg_pool2d(x, 3, 2, 1), x),
        lambda m, x: up(m, F.adaptive_avg_pool2d(x, (2, 2)), x),
        lambda m, x: up(m, F.adaptive_max_pool2d(x, 2), x),
        lambda m, x: F.max_unpool2d(*F.max_pool2d(m.conv(x), 2, return_indices=True), [2, 2]),
        lambda m, x: up(m, F.lp_pool2d(x.abs() + 0.1, 2, 2), x),
    )
    return Part(rng.choice(runs), conv=nn.Conv2d(c, c, 1))


def _there_and_back(rng: random.Random, c: int) -> nn.Module:
    down, up = nn.Conv2d(c, 2 * c, 3, 2, 1), nn.ConvTranspose2d(2 * c, c, 2, 2)
    return nn.Sequential(down, _activation(rng), up)


def _shuffled(rng: random.Random, c: int) -> nn.Module:
    runs = (
        lambda m, x: F.pixel_unshuffle(F.pixel_shuffle(m.wide(x), 2), 2)[:, : x.shape[1]],
        lambda m, x: F.channel_shuffle(m.wide(x), 2)[:, ::4].contiguous(),
        lambda m, x: (
            F.fold(F.unfold(m.wide(x)[:, : x.shape[1]], 3, padding=1), x.shape[-2:], 3, padding=1) / 9
        ),
        lambda m, x: torch.cat([m.wide(x)[:, : x.shape[1] - 1], x.mean(1, keepdim=True)], 1),
    )
    return Part(rng.choice(runs), wide=nn.Conv2d(c, 4 * c, 1))


def _squeezed(rng: random.Random, c: int) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        scale = torch.sigmoid(m.up(F.relu(m.down(x.mean((2, 3), keepdim=True)))))
        return x * scale

    return Part(run, down=nn.Conv2d(c, c // 2, 1), up=nn.Conv2d(c // 2, c, 1))


def _sampled(rng: random.Random, c: int) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        turn = m.lin(x.mean((2, 3))).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=x.dtype, device=x.device)
        places = F.affine_grid(turn, list(x.shape), align_corners=False)
        return F.grid_sample(x, places, align_corners=False)

    return Part(run, lin=nn.Linear(c, 6))


def _attended(rng: random.Random, c: int) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).flatten(2).mT.chunk(3, -1)
        found: Tensor = x + F.scaled_dot_product_attention(q, k, v).mT.unflatten(2, x.shape[2:])
        return found

    return Part(run, qkv=nn.Conv2d(c, 3 * c, 1))


def _concatenated(rng: random.Random, c: int) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        one = m.one(x)
        two = m.two(torch.cat([x, one], 1))
        last: Tensor = m.last(torch.cat([x, one, two], 1))
        return last

    return Part(run, one=_block(rng, c), two=nn.Conv2d(2 * c, c, 3, padding=1), last=nn.Conv2d(3 * c, c, 1))


IMAGES: Mapping[str, Maker] = {
    "convolution, norm, activation": _block,
    "residual block": _residual,
    "pooled": _pooled,
    "down and up": _there_and_back,
    "shuffled": _shuffled,
    "squeezed": _squeezed,
    "sampled": _sampled,
    "attended": _attended,
    "concatenated": _concatenated,
}
