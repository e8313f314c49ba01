"""Know, before it runs, how much memory a PyTorch training step needs, and make it need less.

Every public name can be had from here; the module that defines it is imported when the name is first
used, so that `import lowtide` (and with it `lowtide --help`) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lowtide._version import __version__

if TYPE_CHECKING:
    from lowtide.aot.capture import capture
    from lowtide.arena.batch_norm import normalise_from_output
    from lowtide.arena.layout import Layout, lay_out
    from lowtide.arena.tags import Sharing, share
    from lowtide.autodiff.reverse import Extended, forward_part, gradient
    from lowtide.chain.chain import Chain
    from lowtide.chain.cuts import Granularity
    from lowtide.chain.plan import Plan, Segment
    from lowtide.cost.measure import Reading, measure
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
        PlanDisagrees,
        RanksDisagree,
        ShapeMismatch,
        UnknownCard,
        UnknownFunction,
        UnknownMethod,
        UnknownModel,
    )
    from lowtide.execute.apply import apply
    from lowtide.execute.arena_step import ArenaReport, ArenaStep, in_arena
    from lowtide.execute.executor import Executor, evaluate
    from lowtide.execute.memory import Memory
    from lowtide.execute.ops_forward import plans_of, remove
    from lowtide.execute.padding import padded
    from lowtide.inductor.partitioner import Partitioner
    from lowtide.ir.graph import Graph, Op, Origin, Phase, Role, Tensor, Value
    from lowtide.ir.schedule import Compute, Free, Schedule, straight
    from lowtide.ir.simulate import Allocator, Category, Timeline, simulate
    from lowtide.ir.validate import validate
    from lowtide.planner.api import optimize, plan
    from lowtide.planner.batch import LargestBatch, largest_batch
    from lowtide.planner.batch_search import Reached
    from lowtide.planner.batch_steps import Batch
    from lowtide.planner.compare import Comparison, compare
    from lowtide.planner.fit import Fit, fit
    from lowtide.planner.layers import Rehearsal
    from lowtide.planner.lengths import best_classes
    from lowtide.planner.peers import PeerComparison, compare_peers
    from lowtide.planner.shape_classes import ShapeClass, ShapeClasses, shape_classes
    from lowtide.planner.worst import Epoch, LengthPeak, worst
    from lowtide.rehearsal.on_card import card
    from lowtide.rehearsal.outcome import Rehearsed
    from lowtide.solvers.files import load_graph, load_solution, save_graph, save_solution
    from lowtide.solvers.frontier import frontier
    from lowtide.solvers.registry import methods, schedulers, solve
    from lowtide.solvers.solution import Confirmation, GraphSolution, Solution, Status
    from lowtide.text.card import Card
    from lowtide.text.sizes import parse_bytes
    from lowtide.text.units import format_bytes
    from lowtide.trace.dry_run import Trace, dry_run
    from lowtide.trace.profile import profile
    from lowtide.trace.saved import saved
    from lowtide.trace.saved_report import Saved

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
    "Card",
    "Category",
    "Chain",
    "Comparison",
    "Compute",
    "Confirmation",
    "DeviceMissing",
    "Epoch",
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
    "LengthPeak",
    "LowtideError",
    "MalformedGraph",
    "Memory",
    "MissingExtra",
    "NotDifferentiable",
    "Op",
    "Origin",
    "Partitioner",
    "PeerComparison",
    "Phase",
    "Plan",
    "PlanDisagrees",
    "RanksDisagree",
    "Reached",
    "Reading",
    "Rehearsal",
    "Rehearsed",
    "Role",
    "Saved",
    "Schedule",
    "Segment",
    "ShapeClass",
    "ShapeClasses",
    "ShapeMismatch",
    "Sharing",
    "Solution",
    "Status",
    "Tensor",
    "Timeline",
    "Trace",
    "UnknownCard",
    "UnknownFunction",
    "UnknownMethod",
    "UnknownModel",
    "Value",
    "__version__",
    "apply",
    "best_classes",
    "capture",
    "card",
    "compare",
    "compare_peers",
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
    "padded",
    "parse_bytes",
    "plan",
    "plans_of",
    "profile",
    "remove",
    "save_graph",
    "save_solution",
    "saved",
    "schedulers",
    "shape_classes",
    "share",
    "simulate",
    "solve",
    "straight",
    "validate",
    "worst",
]

# Modules are named by nouns: a function called like its module would be hidden by it once imported.
_NAMES_OF_MODULE = {
    "execute.apply": ("apply",),
    "execute.ops_forward": ("plans_of", "remove"),
    "execute.padding": ("padded",),
    "execute.arena_step": ("ArenaReport", "ArenaStep", "in_arena"),
    "autodiff.reverse": ("Extended", "forward_part", "gradient"),
    "planner.batch": ("LargestBatch", "largest_batch"),
    "aot.capture": ("capture",),
    "chain.chain": ("Chain",),
    "planner.compare": ("Comparison", "compare"),
    "chain.cuts": ("Granularity",),
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
        "PlanDisagrees",
        "RanksDisagree",
        "ShapeMismatch",
        "UnknownCard",
        "UnknownFunction",
        "UnknownMethod",
        "UnknownModel",
    ),
    "execute.executor": ("Executor", "evaluate"),
    "solvers.files": ("load_graph", "load_solution", "save_graph", "save_solution"),
    "planner.fit": ("Fit", "fit"),
    "ir.graph": ("Graph", "Op", "Origin", "Phase", "Role", "Tensor", "Value"),
    "arena.layout": ("Layout", "lay_out"),
    "cost.measure": ("Reading", "measure"),
    "execute.memory": ("Memory",),
    "arena.batch_norm": ("normalise_from_output",),
    "inductor.partitioner": ("Partitioner",),
    "planner.api": ("optimize", "plan"),
    "planner.layers": ("Rehearsal",),
    "planner.lengths": ("best_classes",),
    "planner.peers": ("PeerComparison", "compare_peers"),
    "planner.shape_classes": ("ShapeClass", "ShapeClasses", "shape_classes"),
    "planner.worst": ("Epoch", "LengthPeak", "worst"),
    "chain.plan": ("Plan", "Segment"),
    "rehearsal.on_card": ("card",),
    "rehearsal.outcome": ("Rehearsed",),
    "trace.profile": ("profile",),
    "planner.batch_search": ("Reached",),
    "planner.batch_steps": ("Batch",),
    "trace.saved_report": ("Saved",),
    "trace.saved": ("saved",),
    "ir.schedule": ("Compute", "Free", "Schedule", "straight"),
    "arena.tags": ("Sharing", "share"),
    "ir.simulate": ("Allocator", "Category", "Timeline", "simulate"),
    "solvers.solution": ("Confirmation", "GraphSolution", "Solution", "Status"),
    "solvers.frontier": ("frontier",),
    "solvers.registry": ("methods", "schedulers", "solve"),
    "trace.dry_run": ("Trace", "dry_run"),
    "text.units": ("format_bytes",),
    "text.card": ("Card",),
    "text.sizes": ("parse_bytes",),
    "ir.validate": ("validate",),
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
