"""What of a step runs in slices, in words: which regions, in how many slices, what that spares and takes.

family   regions that differ in the numbers of layers alone, and are cut alike
stretch  the ops of a region that run one after the other: its forward and its backward are two, unless the
         backward runs with the forward
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.fusion.fuse import of_ops
from lowtide.ir.graph import Graph, Tile, Tiled
from lowtide.text.names import together, unnumbered, without_middle
from lowtide.text.rounding import unit_for
from lowtide.text.table import Table
from lowtide.text.units import format_seconds

_LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class RegionFamily:
    """Regions that are cut alike: `extent` of what they have one after the other, in `count` slices.

    `spared_bytes` are those of the largest tensor that is never there as a whole. `extra_seconds` is what
    the slices take beyond what their ops took at once; None if ops were not timed.
    """

    regions: tuple[str, ...]
    extent: int
    count: int
    stretches: int
    spared_bytes: int
    extra_seconds: float | None

    @property
    def name(self) -> str:
        """Its regions in few words."""
        return together(self.regions)


def families(graph: Graph) -> tuple[RegionFamily, ...]:
    """What of a graph runs in slices, what spares most first. Their extra seconds sum to the graph's."""
    graph = of_ops(graph)
    if graph.tiled is None:
        return ()
    tiles: dict[object, list[Tile]] = defaultdict(list)
    for tile in graph.tiled.blocks:
        tiles[_kind(tile)].append(tile)
    seconds = _extra_seconds(graph, graph.tiled)
    found = [
        RegionFamily(
            regions=tuple(dict.fromkeys(tile.where for tile in alike)),
            extent=alike[0].extent,
            count=alike[0].count,
            stretches=len(alike),
            spared_bytes=max(tile.spared_bytes for tile in alike),
            extra_seconds=None if seconds is None else seconds[kind],
        )
        for kind, alike in tiles.items()
    ]
    return tuple(sorted(found, key=lambda family: (-family.spared_bytes, family.name)))


def _kind(tile: Tile) -> object:
    return unnumbered(tile.where), tile.extent, tile.count


def _extra_seconds(graph: Graph, tiled: Tiled) -> dict[object, float] | None:
    """By family; what scales the results of one that ran ahead of its gradient belongs to it."""
    if not any(op.seconds for op in graph.ops):
        return None
    owner = {op: _kind(tile) for tile in tiled.blocks for op in tile.ops}
    within = {op: _kind(tile) for tile in tiled.blocks for op in range(tile.first, tile.stop)}
    terms: dict[object, list[float]] = defaultdict(list)
    for number, kind in owner.items():
        terms[kind].append(-tiled.plain.ops[number].seconds)
    behind: object = None
    for op in reversed(graph.ops):
        if tiled.origin[op.id] >= 0:
            continue
        made = (tiled.plain.creator.get(value) for value in (*op.creates, *op.mutates))
        behind = within.get(op.id) or next((owner[at] for at in made if at in owner), behind)
        terms[behind].append(op.seconds)
    return {kind: math.fsum(parts) for kind, parts in terms.items()}


def family_table(found: Sequence[RegionFamily]) -> Table:
    """Families as rows."""
    spared = [family.spared_bytes for family in found]
    unit = unit_for(max(spared))
    rows = tuple(
        (
            without_middle(family.name, _LONGEST_NAME),
            f"{len(family.regions)}",
            f"{family.extent:,}",
            f"{family.count}",
            f"{family.stretches}",
            unit.text(family.spared_bytes),
            "unknown" if family.extra_seconds is None else signed_seconds(family.extra_seconds),
        )
        for family in found
    )
    titles = (
        "in slices",
        "regions",
        "length",
        "slices",
        "stretches",
        f"largest spared {unit.name}",
        "extra time",
    )
    return Table(titles, rows, numbers=frozenset(range(1, len(titles))))


def signed_seconds(seconds: float) -> str:
    """A time that may be less than nothing: slices can be faster than what they are slices of."""
    text = format_seconds(abs(seconds))
    return f"-{text}" if seconds < 0 and text != format_seconds(0.0) else text


def counted(found: Sequence[RegionFamily]) -> str:
    """How much of a step is in slices: '2 regions in 4 stretches'."""
    regions = sum(len(family.regions) for family in found)
    stretches = sum(family.stretches for family in found)
    return (
        f"{regions} region{'s' if regions > 1 else ''} in {stretches} stretch{'es' if stretches > 1 else ''}"
    )
