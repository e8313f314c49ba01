"""A trainer's model within a budget, on however many ranks the trainer runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.distributed import Replicated
from lowtide.distributed import optimize as optimize_on_all_ranks
from lowtide.errors import BadRequest
from lowtide.planner.api import optimize


def replicated_by(wrapper: nn.Module | None) -> Replicated | None:
    """How a model is replicated; None if `wrapper`, which a trainer put around it, does not do so."""
    if not isinstance(wrapper, DistributedDataParallel):
        return None
    return Replicated(wrapper.gradient_as_bucket_view, wrapper.find_unused_parameters)


def optimize_where_it_trains(
    model: nn.Module, engine: Replicated | None, ahead: Mapping[str, Any], **request: Any
) -> None:
    """`lowtide.optimize`; replicated, all ranks have the first one's plan, and DDP's buckets are counted.

    What is known `ahead` of the lengths that will come is for one rank alone.

    Raises:
        BadRequest: it is known, and there are several.
    """
    if engine is None:
        optimize(model, **ahead, **request)
        return
    if ahead:
        raise BadRequest(
            "plans for classes of lengths are made on one device, and here DistributedDataParallel trains. "
            "Leave the lengths out, and pad to few: lowtide.padded, or pad_to_multiple_of."
        )
    optimize_on_all_ranks(model, engine=engine, **request)
