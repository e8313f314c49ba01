"""Nested containers of tensors, as PyTorch walks through them."""

from __future__ import annotations

from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_leaves_with_path as tree_leaves_with_path
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_with_path as tree_map_with_path
from torch.utils._pytree import tree_unflatten as tree_unflatten

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch.utils._pytree.keystr", "writes the way to a tensor as Python would: ['labels']"),
    Private("torch.utils._pytree.tree_flatten", "finds the tensors among arguments, as Dynamo does"),
    Private("torch.utils._pytree.tree_leaves", "finds the tensors among arguments, as Dynamo does"),
    Private(
        "torch.utils._pytree.tree_leaves_with_path", "finds all things among arguments, and the way to them"
    ),
    Private("torch.utils._pytree.tree_map", "replaces the tensors among arguments"),
    Private("torch.utils._pytree.tree_map_with_path", "names the tensors among arguments"),
    Private("torch.utils._pytree.tree_unflatten", "puts what tree_flatten took apart together again"),
)
