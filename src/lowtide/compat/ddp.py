"""The inside of DistributedDataParallel: buckets that it makes anew, and the old ones."""

from __future__ import annotations

import time
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lowtide.compat.private import Private

PRIVATE = (
    Private(
        "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
        "tells inside of which wrapper a forward runs",
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._join_config", "tells whether ranks may run out of batches"
    ),
    Private(
        "torch.nn.parallel.DistributedDataParallel._has_rebuilt_buckets", "tells whether the buckets are new"
    ),
)

_NOTICING_SECONDS = 0.3  # NCCL's thread looks ten times a second
_settled: WeakSet[DistributedDataParallel] = WeakSet()  # those whose buckets will not change any more


def active_wrapper() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running; None if there is none."""
    found: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return found


def let_go_of_old_buckets() -> None:
    """In a forward for training, inside a DistributedDataParallel whose buckets are new: free the old ones.

    Their memory belongs to the collectives that reduced them. NCCL lets go of it when a new one comes and a
    thread has noticed that the old ones are done; without this that would be when the backward is under way.
    So all ranks wait for that thread and reduce a single number, once in a training. Where ranks may have run
    out of batches (`join`), this is not done.
    """
    wrapper = active_wrapper()
    if wrapper is None or wrapper in _settled:
        return
    if wrapper._join_config.enable or not wrapper._has_rebuilt_buckets:
        return
    _settled.add(wrapper)
    device = next(wrapper.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        time.sleep(_NOTICING_SECONDS)
    number = torch.zeros(1, device=device)
    dist.all_reduce(number, group=wrapper.process_group)
