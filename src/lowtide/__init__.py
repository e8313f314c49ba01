"""Know, before it runs, how much memory a PyTorch training step needs.

Every public name can be had from here; the module that defines it is imported when the name is first
used, so that `import lowtide` (and with it `lowtide --help`) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lowtide._version import __version__

if TYPE_CHECKING:
    from lowtide.capturing import capture
    from lowtide.errors import (
        BadFile,
        BadRequest,
        CannotCapture,
        CannotTrace,
        DeviceMissing,
        IllegalSchedule,
        LowtideError,
        MalformedGraph,
        MissingExtra,
        UnknownModel,
    )
    from lowtide.files import load_graph, save_graph
    from lowtide.fitting import Fit, fit
    from lowtide.graph import Graph, Op, Origin, Phase, Role, Tensor, Value
    from lowtide.measurement import Reading, measure
    from lowtide.profiling import profile
    from lowtide.schedule import Compute, Free, Schedule, straight
    from lowtide.simulation import Allocator, Category, Timeline, simulate
    from lowtide.tracing import Trace, dry_run
    from lowtide.units import format_bytes, parse_bytes
    from lowtide.validation import validate

__all__ = [
    "Allocator",
    "BadFile",
    "BadRequest",
    "CannotCapture",
    "CannotTrace",
    "Category",
    "Compute",
    "DeviceMissing",
    "Fit",
    "Free",
    "Graph",
    "IllegalSchedule",
    "LowtideError",
    "MalformedGraph",
    "MissingExtra",
    "Op",
    "Origin",
    "Phase",
    "Reading",
    "Role",
    "Schedule",
    "Tensor",
    "Timeline",
    "Trace",
    "UnknownModel",
    "Value",
    "__version__",
    "capture",
    "dry_run",
    "fit",
    "format_bytes",
    "load_graph",
    "measure",
    "parse_bytes",
    "profile",
    "save_graph",
    "simulate",
    "straight",
    "validate",
]

# Modules are named by nouns: a function called like its module would be hidden by it once imported.
_NAMES_OF_MODULE = {
    "capturing": ("capture",),
    "errors": (
        "BadFile",
        "BadRequest",
        "CannotCapture",
        "CannotTrace",
        "DeviceMissing",
        "IllegalSchedule",
        "LowtideError",
        "MalformedGraph",
        "MissingExtra",
        "UnknownModel",
    ),
    "files": ("load_graph", "save_graph"),
    "fitting": ("Fit", "fit"),
    "graph": ("Graph", "Op", "Origin", "Phase", "Role", "Tensor", "Value"),
    "measurement": ("Reading", "measure"),
    "profiling": ("profile",),
    "schedule": ("Compute", "Free", "Schedule", "straight"),
    "simulation": ("Allocator", "Category", "Timeline", "simulate"),
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
