"""Costs for what was traced, be it a graph or a whole trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack, overload

import torch

from lowtide.cost.profile import Caps, Progress
from lowtide.cost.profile import profile as profile_graph
from lowtide.ir.graph import Graph
from lowtide.trace.dry_run import Trace


class Options(TypedDict, total=False):
    """What `profile` may be told."""

    device: str | torch.device | None
    cache: Path | None
    caps: Caps | None
    progress: Progress | None


@overload
def profile(traced: Graph, **options: Unpack[Options]) -> Graph: ...
@overload
def profile(traced: Trace, **options: Unpack[Options]) -> Trace: ...
def profile(traced: Graph | Trace, **options: Unpack[Options]) -> Graph | Trace:
    """Return `traced` (a graph, or a trace) with workspace bytes and seconds for every op.

    Each distinct (op, shapes, strides, dtypes, arguments) runs a few times on scratch tensors on
    `device`, by default the graph's own; nothing of the model is touched, and random streams are left
    as they were. Where a kernel's real outputs are larger or smaller than predicted (opaque reserves of
    cuDNN, say), the values are corrected. Costs are kept in `cache` and looked up there first.

    Ops above `caps` are measured at smaller sizes and extrapolated linearly (`op.extrapolated`). Ops
    whose kernel cannot be run on made-up arguments keep a cost of zero and are named in `graph.notes`.

    Where costs cannot be kept, `graph.notes` say so.

    Raises:
        BadRequest: the device is none that lowtide profiles on.
        DeviceMissing: the device is not on this machine.
        BadFile: `cache` was given and cannot be used.
    """
    if isinstance(traced, Trace):
        return replace(traced, graph=profile_graph(traced.graph, **options))
    return profile_graph(traced, **options)
