"""A trainer's model within a budget, on however many ranks the trainer runs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from lowtide.distributed import Replicated
from lowtide.distributed import optimize as optimize_on_all_ranks
from lowtide.planning import optimize


def optimize_where_it_trains(model: nn.Module, **request: Any) -> None:
    """`lowtide.optimize`; with several ranks all have the first one's plan, and DDP's buckets are counted."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        optimize_on_all_ranks(model, engine=Replicated(), **request)
    else:
        optimize(model, **request)
