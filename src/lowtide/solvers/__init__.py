"""Methods that choose what to recompute, one file per source, behind one door: `solve`."""

from lowtide.solvers.registry import default_method, methods, solve

__all__ = ["default_method", "methods", "solve"]
