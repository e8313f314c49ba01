"""The ways to train that the lecture compares: schedules, how each gives out memory, and what it then takes.

no optimisation, in-place, sharing    every op once; what differs is who gets which memory
drop bn-relu, √n, recursive           of Chen et al., arXiv 1604.06174: Sec. 4.2, Eq. 1, Eq. 2 and 3
ours                                  lowtide's `auto`: the lowest peak, and the lowest for 30 % more time
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.lecture.graphs import features_only, gradient_sums
from lowtide.arena.layout import lay_out
from lowtide.arena.tags import share
from lowtide.ir.graph import Graph, Op
from lowtide.ir.notation import schedule_from_json, schedule_to_json
from lowtide.ir.schedule import Schedule, straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.ops.segments import recursive, segmented, without
from lowtide.solvers.refereed import extra_seconds
from lowtide.solvers.registry import solve
from lowtide.text.budget import LOWEST
from lowtide.text.documents import Reader, read_document, understanding, write_document

RESNET: Final = "resnet"
LSTM: Final = "lstm"
MORE_TIME: Final = 0.3
NEAR_ENOUGH: Final = 1.01  # budgets nearer to each other than this are not told apart
DROPPED: Final = frozenset(
    {"aten.native_batch_norm.default", "aten.cudnn_batch_norm.default", "aten.relu.default"}
)
Json = dict[str, Any]


@dataclass(frozen=True)
class Scheme:
    """One way to train. `plan` makes the schedule for a graph, given the network and its size."""

    name: str
    plan: Callable[[Graph, str, int], Schedule]
    in_place: bool = True
    sharing: bool = True
    networks: tuple[str, ...] = (RESNET, LSTM)
    is_searched: bool = False  # planning takes long: the schedule is worth keeping

    @property
    def slug(self) -> str:
        """The name as part of a file's."""
        return "-".join(re.findall(r"\w+", self.name))


def square_root(graph: Graph, network: str, size: int) -> Schedule:
    """√n segments, where n are the layers of the ResNet, or the steps of the LSTM: its size."""
    return segmented(graph, round(math.sqrt(size)))


def halves(graph: Graph, network: str, size: int) -> Schedule:
    """Halved until a block of the ResNet is left, which has three layers, or a step of the LSTM."""
    return recursive(graph, size // 3 if network == RESNET else size)


def is_dropped(op: Op) -> bool:
    """Whether it is a batch normalisation or a ReLU."""
    return op.target in DROPPED


def lowest_for(graph: Graph, more_time: float) -> Schedule:
    """The lowest peak that `auto` finds for at most so much more time, as a part of the plain step's."""
    lowest = solve(graph, "auto", LOWEST)
    if lowest.extra_seconds_ratio <= more_time:
        return lowest.schedule
    low, found = lowest.peak_bytes, straight(graph)
    high = simulate(graph, found).peak_bytes
    while high > NEAR_ENOUGH * low:
        tried = solve(graph, "auto", math.isqrt(low * high))
        if tried.extra_seconds_ratio <= more_time:
            found, high = tried.schedule, tried.peak_bytes
        else:
            low = math.isqrt(low * high)
    return found


SCHEMES: Final = (
    Scheme("no optimisation", lambda graph, *_: straight(graph), in_place=False, sharing=False),
    Scheme("in-place", lambda graph, *_: straight(graph), sharing=False),
    Scheme("sharing", lambda graph, *_: straight(graph)),
    Scheme("drop bn-relu", lambda graph, *_: without(graph, is_dropped), networks=(RESNET,)),
    Scheme("√n", square_root),
    Scheme("recursive", halves),
    Scheme("ours, min", lambda graph, *_: solve(graph, "auto", LOWEST).schedule, is_searched=True),
    Scheme("ours, +30 % time", lambda graph, *_: lowest_for(graph, MORE_TIME), is_searched=True),
)


@dataclass(frozen=True)
class Planned:
    """A schedule, and how long it took to make."""

    schedule: Schedule
    seconds: float


def planned(scheme: Scheme, graph: Graph, network: str, size: int, kept: Path | None = None) -> Planned:
    """What `scheme` makes of `graph`. One that is searched for is kept in the file `kept`, and read from it.

    Raises:
        BadFile: there is such a file, and it cannot be read.
    """
    if kept is not None and scheme.is_searched and kept.exists():
        document = read_document(kept, "schedule", ("steps", "seconds"))
        with understanding(kept):
            fields = Reader(document, "schedule")
            return Planned(schedule_from_json(fields["steps"]), fields["seconds"].of(float))
    started = time.perf_counter()
    found = Planned(scheme.plan(graph, network, size), time.perf_counter() - started)
    if kept is not None and scheme.is_searched:
        write_document(
            kept, "schedule", {"steps": schedule_to_json(found.schedule), "seconds": found.seconds}
        )
    return found


def estimated(scheme: Scheme, graph: Graph, plan: Planned) -> Json:
    """What `scheme` takes for feature maps, counted in several ways, and what it costs.

    `feature_bytes` is by nnvm's planner, as in the paper; `arena_bytes` by lowtide's layout, where memory is
    shared; `live_bytes` the most that is live at once. None counts parameters, their gradients or workspaces.
    `growth_bytes` counts gradients as well.
    """
    bare = features_only(graph)
    started = time.perf_counter()
    shared = share(bare, plan.schedule, in_place=scheme.in_place, sharing=scheme.sharing)
    share_seconds = time.perf_counter() - started
    layout = lay_out(bare, plan.schedule) if scheme.sharing else None
    layout_seconds = time.perf_counter() - started - share_seconds
    ran = Counter(plan.schedule.computed)
    return {
        "ops": len(graph.ops),
        "feature_bytes": shared.total_bytes,
        "arena_bytes": layout and layout.arena_bytes,
        "arena_least_bytes": layout and layout.lower_bound_bytes,
        "live_bytes": simulate(bare, plan.schedule).growth_bytes,
        "growth_bytes": simulate(graph, plan.schedule).growth_bytes,
        "gradient_bytes": sum(graph.counted_bytes(value) for value in gradient_sums(graph)),
        "ops_again": sum(ran.values()) - len(ran),
        "extra_time": extra_seconds(graph, plan.schedule) / sum(op.seconds for op in graph.ops),
        "planning_seconds": plan.seconds,
        "share_seconds": share_seconds,
        "layout_seconds": layout_seconds if layout else None,
    }


def cost_curve(graph: Graph, counts: Sequence[int]) -> list[tuple[int, int]]:
    """The most feature bytes live at once for each number of segments."""
    bare = features_only(graph)
    return [(count, simulate(bare, segmented(bare, count)).growth_bytes) for count in counts]
