"""Which kernel PyTorch would choose, and kernels that are not meant to be called by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._C._select_conv_backend", "tells whether cuDNN does a convolution"),
    Private("torch._C._select_batch_norm_backend", "tells whether cuDNN does a BatchNorm"),
    Private("torch._C._get_cudnn_allow_tf32", "a setting that cuDNN's convolution is handed"),
    Private("torch.ops.aten._scaled_dot_product_cudnn_attention", "CUDA's attention in half precision"),
    Private("torch.ops.aten._scaled_dot_product_efficient_attention", "CUDA's attention in single precision"),
    Private("torch.ops.aten._native_batch_norm_legit_functional", "the BatchNorm that AOTAutograd captures"),
    Private("torch.ops.aten._to_copy", "a copy in another type or place"),
    Private("torch._C._AutoDispatchBelowAutograd", "calls a kernel in grad mode without recording it"),
)

cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
copied_to = torch.ops.aten._to_copy
functional_batch_norm = torch.ops.aten._native_batch_norm_legit_functional


def is_cudnn_convolution(args: Sequence[Any]) -> bool:
    """Whether PyTorch would hand a convolution with the arguments of `aten.convolution` to cuDNN."""
    return str(torch._C._select_conv_backend(*args)).endswith("Cudnn")


def is_cudnn_batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, epsilon: Any
) -> bool:
    """Whether PyTorch would hand a BatchNorm in training to cuDNN."""
    backend = torch._C._select_batch_norm_backend(x, weight, bias, mean, variance, True, epsilon)
    return str(backend).endswith("Cudnn")


def cudnn_allows_tf32() -> bool:
    """Whether cuDNN may round what it multiplies to 19 bits."""
    return bool(torch._C._get_cudnn_allow_tf32())


def rnn_layer_for_training(*args: Any) -> Any:
    """oneDNN's recurrent layer, as autograd would call it.

    It leaves what its backward needs in grad mode alone, which is off where captured graphs run.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)
