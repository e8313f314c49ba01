"""Know, before it runs, how much memory a PyTorch training step needs, and make it need less.

Every public name can be had from here; the module that defines it is imported when the name is first
used, so that `import lowtide` (and with it `lowtide --help`) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lowtide._version import __version__

if TYPE_CHECKING:
    from lowtide.applying import apply, plans_of, remove
    from lowtide.arena import ArenaReport, ArenaStep, in_arena
    from lowtide.autodiff import Extended, forward_part, gradient
    from lowtide.batching import LargestBatch, largest_batch
    from lowtide.capturing import capture
    from lowtide.chain import Chain
    from lowtide.comparing import Comparison, compare
    from lowtide.cutting import Granularity
    from lowtide.errors import (
        ArenaTooSmall,
        BadFile,
        BadRequest,
        CannotApply,
        CannotCapture,
        CannotRun,
        CannotTrace,
        DeviceMissing,
        IllegalLayout,
        IllegalSchedule,
        InfeasibleBudget,
        LowtideError,
        MalformedGraph,
        MissingExtra,
        NotDifferentiable,
        RanksDisagree,
        ShapeMismatch,
        UnknownFunction,
        UnknownMethod,
        UnknownModel,
    )
    from lowtide.executor import Executor, evaluate
    from lowtide.files import load_graph, load_solution, save_graph, save_solution
    from lowtide.fitting import Fit, fit
    from lowtide.graph import Graph, Op, Origin, Phase, Role, Tensor, Value
    from lowtide.layout import Layout, lay_out
    from lowtide.measurement import Reading, measure
    from lowtide.memories import Memory
    from lowtide.normalising import normalise_from_output
    from lowtide.planning import Rehearsal, optimize, plan
    from lowtide.plans import Plan, Segment
    from lowtide.profiling import profile
    from lowtide.reaching import Reached
    from lowtide.sampling import Batch
    from lowtide.savedvalues import Saved
    from lowtide.saving import saved
    from lowtide.schedule import Compute, Free, Schedule, straight
    from lowtide.sharing import Sharing, share
    from lowtide.simulation import Allocator, Category, Timeline, simulate
    from lowtide.solution import Confirmation, GraphSolution, Solution, Status
    from lowtide.solvers.frontier import frontier
    from lowtide.solvers.registry import methods, schedulers, solve
    from lowtide.tracing import Trace, dry_run
    from lowtide.units import format_bytes, parse_bytes
    from lowtide.validation import validate

__all__ = [
    "Allocator",
    "ArenaReport",
    "ArenaStep",
    "ArenaTooSmall",
    "BadFile",
    "BadRequest",
    "Batch",
    "CannotApply",
    "CannotCapture",
    "CannotRun",
    "CannotTrace",
    "Category",
    "Chain",
    "Comparison",
    "Compute",
    "Confirmation",
    "DeviceMissing",
    "Executor",
    "Extended",
    "Fit",
    "Free",
    "Granularity",
    "Graph",
    "GraphSolution",
    "IllegalLayout",
    "IllegalSchedule",
    "InfeasibleBudget",
    "LargestBatch",
    "Layout",
    "LowtideError",
    "MalformedGraph",
    "Memory",
    "MissingExtra",
    "NotDifferentiable",
    "Op",
    "Origin",
    "Phase",
    "Plan",
    "RanksDisagree",
    "Reached",
    "Reading",
    "Rehearsal",
    "Role",
    "Saved",
    "Schedule",
    "Segment",
    "ShapeMismatch",
    "Sharing",
    "Solution",
    "Status",
    "Tensor",
    "Timeline",
    "Trace",
    "UnknownFunction",
    "UnknownMethod",
    "UnknownModel",
    "Value",
    "__version__",
    "apply",
    "capture",
    "compare",
    "dry_run",
    "evaluate",
    "fit",
    "format_bytes",
    "forward_part",
    "frontier",
    "gradient",
    "in_arena",
    "largest_batch",
    "lay_out",
    "load_graph",
    "load_solution",
    "measure",
    "methods",
    "normalise_from_output",
    "optimize",
    "parse_bytes",
    "plan",
    "plans_of",
    "profile",
    "remove",
    "save_graph",
    "save_solution",
    "saved",
    "schedulers",
    "share",
    "simulate",
    "solve",
    "straight",
    "validate",
]

# Modules are named by nouns: a function called like its module would be hidden by it once imported.
_NAMES_OF_MODULE = {
    "applying": ("apply", "plans_of", "remove"),
    "arena": ("ArenaReport", "ArenaStep", "in_arena"),
    "autodiff": ("Extended", "forward_part", "gradient"),
    "batching": ("LargestBatch", "largest_batch"),
    "capturing": ("capture",),
    "chain": ("Chain",),
    "comparing": ("Comparison", "compare"),
    "cutting": ("Granularity",),
    "errors": (
        "ArenaTooSmall",
        "BadFile",
        "BadRequest",
        "CannotApply",
        "CannotCapture",
        "CannotRun",
        "CannotTrace",
        "DeviceMissing",
        "IllegalLayout",
        "IllegalSchedule",
        "InfeasibleBudget",
        "LowtideError",
        "MalformedGraph",
        "MissingExtra",
        "NotDifferentiable",
        "RanksDisagree",
        "ShapeMismatch",
        "UnknownFunction",
        "UnknownMethod",
        "UnknownModel",
    ),
    "executor": ("Executor", "evaluate"),
    "files": ("load_graph", "load_solution", "save_graph", "save_solution"),
    "fitting": ("Fit", "fit"),
    "graph": ("Graph", "Op", "Origin", "Phase", "Role", "Tensor", "Value"),
    "layout": ("Layout", "lay_out"),
    "measurement": ("Reading", "measure"),
    "memories": ("Memory",),
    "normalising": ("normalise_from_output",),
    "planning": ("Rehearsal", "optimize", "plan"),
    "plans": ("Plan", "Segment"),
    "profiling": ("profile",),
    "reaching": ("Reached",),
    "sampling": ("Batch",),
    "savedvalues": ("Saved",),
    "saving": ("saved",),
    "schedule": ("Compute", "Free", "Schedule", "straight"),
    "sharing": ("Sharing", "share"),
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
