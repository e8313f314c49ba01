"""Methods that choose what to recompute, one file per source, behind one door: `solve`."""

from lowtide.solvers.registry import methods, solve

__all__ = ["methods", "solve"]
