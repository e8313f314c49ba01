"""Laws of growth, fitted: memory against size, and against the number of segments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Points = Sequence[tuple[float, float]]


def exponent(points: Points) -> float:
    """The slope of a straight line through the logarithms: 1 for linear growth, ½ for a square root's."""
    sizes, values = np.log(np.array(points, np.float64).T)
    return float(np.polyfit(sizes, values, 1)[0])


@dataclass(frozen=True)
class Curve:
    """`values` / k + `crossings` · k + `always`, for k segments."""

    values: float  # of all segments together: one of them is held
    crossings: float  # of one segment: all are held
    always: float

    def at(self, count: float) -> float:
        return self.values / count + self.crossings * count + self.always

    @property
    def lowest(self) -> float:
        """The number of segments at which it is lowest."""
        return math.sqrt(self.values / self.crossings)


def fitted(points: Points) -> Curve:
    """The curve that misses the points least, each as a part of itself."""
    counts, values = np.array(points, np.float64).T
    terms = np.stack([1 / counts, counts, np.ones_like(counts)], axis=1) / values[:, None]
    found, *_ = np.linalg.lstsq(terms, np.ones_like(values))
    return Curve(*map(float, found))
