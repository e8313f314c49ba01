"""Methods that choose what to recompute, one file per source, behind one door: `solve`."""

from lowtide.solvers.registry import (
    OPS,
    at_effort,
    default_method,
    is_scheduler,
    methods,
    quickly,
    refuse_lowest,
    schedulers,
    solve,
)

__all__ = [
    "OPS",
    "at_effort",
    "default_method",
    "is_scheduler",
    "methods",
    "quickly",
    "refuse_lowest",
    "schedulers",
    "solve",
]
