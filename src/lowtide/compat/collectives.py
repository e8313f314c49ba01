"""Collectives and sharded tensors from within, for steps that run on one rank alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.distributed.tensor import DTensor

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._C._distributed_c10d.FakeWork", "a collective that is over as soon as it is waited for"),
    Private(
        "torch.distributed.distributed_c10d._get_default_store", "where ranks can leave each other a plan"
    ),
    Private("torch.distributed.tensor.DTensor._local_tensor", "what this rank holds of a tensor"),
)


def default_store() -> Store:
    """The store of the default process group."""
    found: Store = _get_default_store()
    return found


def finished_work() -> Any:
    """What a collective returns that is over as soon as it is waited for."""
    return torch._C._distributed_c10d.FakeWork().boxed()


def local_part(thing: object) -> object:
    """What this rank holds of a tensor; anything else as it is."""
    return thing._local_tensor if isinstance(thing, DTensor) else thing
