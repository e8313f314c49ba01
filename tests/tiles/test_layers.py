"""Layers in slices along what they treat independently: as exact as plain training."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.sliced_steps import Case, Function, assert_trains_in_slices, exactly

Batch = Mapping[str, Tensor]
WIDTH, HIDDEN, HEADS = 8, 40, 4


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def weights(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: numbers(*shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def loss_of(output: Tensor) -> Tensor:
    return exactly(output).square().mean()


def mlp(p: nn.ParameterDict, batch: Batch) -> Tensor:
    hidden = F.gelu(F.linear(batch["x"] @ p["enter"], p["up"], p["up_bias"]))
    return loss_of(F.linear(hidden, p["down"], p["down_bias"]))


def gated_mlp(p: nn.ParameterDict, batch: Batch) -> Tensor:
    x = batch["x"] @ p["enter"]
    return loss_of(F.linear(F.silu(F.linear(x, p["up"])) * F.linear(x, p["gate"]), p["down"]))


def normed_mlp(p: nn.ParameterDict, batch: Batch) -> Tensor:
    x = batch["x"] @ p["enter"]
    hidden = F.relu(F.linear(F.layer_norm(x, (WIDTH,), p["scale"], p["bias"]), p["up"], p["up_bias"]))
    return loss_of(x + F.linear(hidden, p["down"], p["down_bias"]))


def chain(p: nn.ParameterDict, batch: Batch) -> Tensor:
    return loss_of(((batch["x"] @ p["up"].t()).sin() + p["up_bias"]).tanh().exp() @ p["down"].t())


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = exactly(x)
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def between_rms_norms(p: nn.ParameterDict, batch: Batch) -> Tensor:
    x = rms_norm(batch["x"] @ p["enter"], p["scale"])
    return loss_of(rms_norm(x @ p["up"].t(), p["up_bias"]))


def between_layer_norms(p: nn.ParameterDict, batch: Batch) -> Tensor:
    x = F.layer_norm(batch["x"] @ p["enter"], (WIDTH,), p["scale"], p["bias"])
    return loss_of(F.layer_norm((x @ p["up"].t()).exp(), (HIDDEN,), p["up_bias"]) @ p["down"].t())


MLP = weights(enter=(WIDTH, WIDTH), up=(HIDDEN, WIDTH), gate=(HIDDEN, WIDTH), down=(WIDTH, HIDDEN))
MLP |= weights(up_bias=(HIDDEN,), down_bias=(WIDTH,), scale=(WIDTH,), bias=(WIDTH,))
BATCH = {"x": numbers(2, 12, WIDTH)}
TOKENS, FEATURES = -2, -1


def attention(masked: str) -> Function:
    def loss(p: nn.ParameterDict, batch: Batch) -> Tensor:
        x = batch["x"] @ p["enter"]
        heads = (x @ p[name] for name in ("query", "key", "value"))
        query, key, value = (each.view(2, 16, HEADS, -1).transpose(1, 2) for each in heads)
        scores = (query @ key.transpose(-1, -2)) * 0.5
        if masked == "causal":
            scores = scores.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), float("-inf"))
        if masked == "padding":
            scores = scores + batch["mask"].to(scores.dtype)
        made = (scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 16, WIDTH)
        return loss_of(made @ p["leave"])

    return loss


ATTENTION = weights(**dict.fromkeys(("enter", "query", "key", "value", "leave"), (WIDTH, WIDTH)))
LONG = torch.arange(16) < torch.tensor([[9], [16]])
SENTENCES = {"x": numbers(2, 16, WIDTH), "mask": torch.where(LONG, 0.0, -1e4)[:, None, None]}


def pooled(p: nn.ParameterDict, batch: Batch) -> Tensor:
    x = F.max_pool2d(F.relu(F.conv2d(batch["x"], p["first"], p["bias"], padding=1)), 2)
    return loss_of(F.conv2d(x, p["second"]))


def grouped(p: nn.ParameterDict, batch: Batch) -> Tensor:
    x = F.conv2d(F.conv2d(batch["x"], p["first"]), p["grouped"], groups=2)
    return loss_of(F.avg_pool2d(F.silu(x), 2))


def transposed(p: nn.ParameterDict, batch: Batch) -> Tensor:
    x = F.conv2d(batch["x"], p["first"])
    return loss_of(F.relu(F.conv_transpose2d(x, p["grouped"], p["bias"][:4], stride=2)))


def group_normed(p: nn.ParameterDict, batch: Batch) -> Tensor:
    return loss_of(F.relu(F.group_norm(F.conv2d(batch["x"], p["first"]), 2, p["scale"], p["bias"])))


def of_sound(p: nn.ParameterDict, batch: Batch) -> Tensor:
    x = F.conv1d(batch["sound"], p["line"], p["bias"])
    return loss_of(F.gelu(F.conv1d(x, p["second_line"])))


CONVOLUTIONS = weights(first=(8, 3, 3, 3), second=(4, 8, 3, 3), grouped=(8, 4, 3, 3))
CONVOLUTIONS |= weights(line=(8, 3, 3), second_line=(8, 8, 2), bias=(8,), scale=(8,))
IMAGES = {"x": numbers(4, 3, 8, 8), "sound": numbers(4, 3, 12)}
CHANNELS_LAST = {**IMAGES, "x": IMAGES["x"].to(memory_format=torch.channels_last)}

CASES: dict[str, Case] = {
    "an MLP along tokens": Case(mlp, MLP, BATCH),
    "an MLP along features": Case(mlp, MLP, BATCH, (FEATURES,)),
    "a gated MLP along tokens": Case(gated_mlp, MLP, BATCH),
    "a gated MLP along features": Case(gated_mlp, MLP, BATCH, (FEATURES,)),
    "a normed MLP along tokens": Case(normed_mlp, MLP, BATCH),
    "a normed MLP along features": Case(normed_mlp, MLP, BATCH, (FEATURES,)),
    "a chain along tokens": Case(chain, MLP, BATCH),
    "a chain along features": Case(chain, MLP, BATCH, (FEATURES,)),
    "between RMS norms along tokens": Case(between_rms_norms, MLP, BATCH),
    "between layer norms along tokens": Case(between_layer_norms, MLP, BATCH),
    "attention along batch and heads": Case(attention("nothing"), ATTENTION, SENTENCES, (0,)),
    "attention along queries": Case(attention("nothing"), ATTENTION, SENTENCES, (1,)),
    "causal attention along batch and heads": Case(attention("causal"), ATTENTION, SENTENCES, (0,)),
    "causal attention along queries": Case(attention("causal"), ATTENTION, SENTENCES, (1,)),
    "padded attention along batch and heads": Case(attention("padding"), ATTENTION, SENTENCES, (0,)),
    "padded attention along queries": Case(attention("padding"), ATTENTION, SENTENCES, (1,)),
    "a convolution and a pool": Case(pooled, CONVOLUTIONS, IMAGES, (0,)),
    "a convolution with channels last": Case(pooled, CONVOLUTIONS, CHANNELS_LAST, (0,)),
    "a grouped convolution": Case(grouped, CONVOLUTIONS, IMAGES, (0,)),
    "a transposed convolution": Case(transposed, CONVOLUTIONS, IMAGES, (0,), ahead=True),
    "a group norm": Case(group_normed, CONVOLUTIONS, IMAGES, (0,), ahead=True),
    "a convolution of sound": Case(of_sound, CONVOLUTIONS, IMAGES, (0,), ahead=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_layers_that_treat_a_dimension_independently(name: str, dtype: torch.dtype) -> None:
    assert_trains_in_slices(CASES[name], dtype)
