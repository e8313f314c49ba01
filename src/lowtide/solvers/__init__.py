"""Methods that choose what to recompute, one file per source, behind one door: `solve`."""

from lowtide.solvers.registry import default_method, is_scheduler, methods, schedulers, solve

__all__ = ["default_method", "is_scheduler", "methods", "schedulers", "solve"]
