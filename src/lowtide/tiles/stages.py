"""Stages: what of a region can run in one go over the slices, because nothing before has to be complete."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.ir.graph import Graph, Phase
from lowtide.tiles.region import Region, summed
from lowtide.tiles.rules import slots


def stages_of(graph: Graph, region: Region) -> dict[int, int]:
    """For each op of the region its stage."""
    stages: dict[int, int] = {}
    complete: dict[int, int] = {}  # the first stage that may have a value as a whole
    sums = summed(graph, region)
    base = 0
    phase: Phase | None = None
    for op in graph.ops:
        found = region.ops.get(op.id)
        if found is None:
            level = max((_available(value, stages, complete, graph, region) for value in op.reads), default=0)
            complete |= dict.fromkeys((*op.creates, *op.mutates), level)
            continue
        if phase is not None and op.phase is not phase:
            base = 1 + max(stages.values())
        phase = op.phase
        stage = base
        for slot, number in slots(op):
            value = graph.tensors[number].value
            maker = graph.creator.get(value)
            is_sliced = value in region.axes and value not in sums
            if found.takes.get(slot) is not None and maker in stages and is_sliced:
                stage = max(stage, stages[maker])
            else:
                stage = max(stage, _available(value, stages, complete, graph, region))
        stages[op.id] = stage
    return stages


def _available(
    value: int, stages: Mapping[int, int], complete: Mapping[int, int], graph: Graph, region: Region
) -> int:
    maker = graph.creator.get(value)
    if maker in stages and maker is not None:
        return stages[maker] + 1
    return complete.get(value, 0)
