"""Costs for a graph, wherever its device is: measured on it, or known of it."""

from __future__ import annotations

import torch

from lowtide.cost.cuda_rules import price
from lowtide.cost.profile import Progress, profile
from lowtide.cost.roofline import with_estimated_seconds
from lowtide.ir.graph import Graph


def with_costs(graph: Graph, progress: Progress | None = None) -> Graph:
    """`graph` with costs: measured where its device is, else those that are known of it."""
    return profile(graph, progress=progress) if is_here(graph.device) else with_costs_by_rule(graph)


def with_costs_by_rule(graph: Graph) -> Graph:
    """`graph`, which is for CUDA, with the workspaces that are known, and seconds that are estimated."""
    return with_estimated_seconds(price(graph))


def is_here(device: str) -> bool:
    """Whether ops can be run on a device on this machine."""
    return not device.startswith("cuda") or torch.cuda.is_available()
