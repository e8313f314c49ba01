"""Know, before it runs, how much memory a PyTorch training step needs, and make it need less.

Every public name can be had from here; the module that defines it is imported when the name is first
used, so that `import lowtide` (and with it `lowtide --help`) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lowtide._version import __version__

if TYPE_CHECKING:
    from lowtide.applying import apply, remove
    from lowtide.capturing import capture
    from lowtide.chain import Chain
    from lowtide.comparing import Comparison, compare
    from lowtide.cutting import Granularity
    from lowtide.errors import (
        BadFile,
        BadRequest,
        CannotApply,
        CannotCapture,
        CannotTrace,
        DeviceMissing,
        IllegalSchedule,
        InfeasibleBudget,
        LowtideError,
        MalformedGraph,
        MissingExtra,
        UnknownMethod,
        UnknownModel,
    )
    from lowtide.files import load_graph, load_solution, save_graph, save_solution
    from lowtide.fitting import Fit, fit
    from lowtide.graph import Graph, Op, Origin, Phase, Role, Tensor, Value
    from lowtide.measurement import Reading, measure
    from lowtide.planning import Rehearsal, optimize, plan
    from lowtide.plans import Plan, Segment
    from lowtide.profiling import profile
    from lowtide.savedvalues import Saved
    from lowtide.saving import saved
    from lowtide.schedule import Compute, Free, Schedule, straight
    from lowtide.simulation import Allocator, Category, Timeline, simulate
    from lowtide.solution import Confirmation, GraphSolution, Solution, Status
    from lowtide.solvers.frontier import frontier
    from lowtide.solvers.registry import methods, schedulers, solve
    from lowtide.tracing import Trace, dry_run
    from lowtide.units import format_bytes, parse_bytes
    from lowtide.validation import validate

__all__ = [
    "Allocator",
    "BadFile",
    "BadRequest",
    "CannotApply",
    "CannotCapture",
    "CannotTrace",
    "Category",
    "Chain",
    "Comparison",
    "Compute",
    "Confirmation",
    "DeviceMissing",
    "Fit",
    "Free",
    "Granularity",
    "Graph",
    "GraphSolution",
    "IllegalSchedule",
    "InfeasibleBudget",
    "LowtideError",
    "MalformedGraph",
    "MissingExtra",
    "Op",
    "Origin",
    "Phase",
    "Plan",
    "Reading",
    "Rehearsal",
    "Role",
    "Saved",
    "Schedule",
    "Segment",
    "Solution",
    "Status",
    "Tensor",
    "Timeline",
    "Trace",
    "UnknownMethod",
    "UnknownModel",
    "Value",
    "__version__",
    "apply",
    "capture",
    "compare",
    "dry_run",
    "fit",
    "format_bytes",
    "frontier",
    "load_graph",
    "load_solution",
    "measure",
    "methods",
    "optimize",
    "parse_bytes",
    "plan",
    "profile",
    "remove",
    "save_graph",
    "save_solution",
    "saved",
    "schedulers",
    "simulate",
    "solve",
    "straight",
    "validate",
]

# Modules are named by nouns: a function called like its module would be hidden by it once imported.
_NAMES_OF_MODULE = {
    "applying": ("apply", "remove"),
    "capturing": ("capture",),
    "chain": ("Chain",),
    "comparing": ("Comparison", "compare"),
    "cutting": ("Granularity",),
    "errors": (
        "BadFile",
        "BadRequest",
        "CannotApply",
        "CannotCapture",
        "CannotTrace",
        "DeviceMissing",
        "IllegalSchedule",
        "InfeasibleBudget",
        "LowtideError",
        "MalformedGraph",
        "MissingExtra",
        "UnknownMethod",
        "UnknownModel",
    ),
    "files": ("load_graph", "load_solution", "save_graph", "save_solution"),
    "fitting": ("Fit", "fit"),
    "graph": ("Graph", "Op", "Origin", "Phase", "Role", "Tensor", "Value"),
    "measurement": ("Reading", "measure"),
    "planning": ("Rehearsal", "optimize", "plan"),
    "plans": ("Plan", "Segment"),
    "profiling": ("profile",),
    "savedvalues": ("Saved",),
    "saving": ("saved",),
    "schedule": ("Compute", "Free", "Schedule", "straight"),
    "simulation": ("Allocator", "Category", "Timeline", "simulate"),
    "solution": ("Confirmation", "GraphSolution", "Solution", "Status"),
    "solvers.frontier": ("frontier",),
    "solvers.registry": ("methods", "schedulers", "solve"),
    "tracing": ("Trace", "dry_run"),
    "units": ("format_bytes", "parse_bytes"),
    "validation": ("validate",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


if not TYPE_CHECKING:  # to a type checker it would mean that every name exists

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module 'lowtide' has no attribute '{name}'")
        found: object = getattr(import_module(f"lowtide.{_MODULE_OF_NAME[name]}"), name)
        globals()[name] = found  # from now on without this detour
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
