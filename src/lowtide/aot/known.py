"""What is known of a captured graph's surroundings before it is traced."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowtide.ir.assumptions import Assumption, GradientLayouts, Layout, NoGradient, OfOneGraph, UseByUse


@dataclass(frozen=True)
class Known:
    """What was found out about one graph, if anything."""

    gradientless: tuple[int, ...] = ()  # outputs
    layouts: tuple[Layout | None, ...] = ()  # of the gradients that enter its backward
    use_by_use: tuple[int, ...] = ()  # inputs that enter once for each use


NOTHING = Known()


def known_of(graph: int, assumptions: Collection[Assumption]) -> Known:
    """What was found out about a graph, by its number."""
    found = [each for each in assumptions if isinstance(each, OfOneGraph) and each.graph == graph]
    return Known(
        tuple(each.output for each in found if isinstance(each, NoGradient)),
        next((each.layouts for each in found if isinstance(each, GradientLayouts)), ()),
        tuple(each.input for each in found if isinstance(each, UseByUse)),
    )
