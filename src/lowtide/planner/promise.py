"""What a budget must hold for a plan to be safe, and plans that are within a budget by that count."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lowtide.errors import InfeasibleBudget
from lowtide.ir.cuda_allocator import cached
from lowtide.ir.graph import Graph, Phase
from lowtide.ir.schedule import Schedule
from lowtide.solvers.solution import GraphSolution, Solution

Found = TypeVar("Found", Solution, GraphSolution)

_MARGIN = 100  # on CUDA one part in so many is left to the allocator
_TRIES = 6
_SAVING_A_NUMBER = (".mul.Tensor", ".mul_.Tensor", ".div.Tensor", ".div_.Tensor")
_NUMBER_BYTES = 16  # of the largest kind, a complex one


def allocated_bytes(graph: Graph, schedule: Schedule, peak_bytes: int) -> int:
    """What the device's allocator will say it held, where the values make up `peak_bytes`.

    CUDA's may hand out blocks larger than asked for. Where code is generated, which they are is not known
    before: blocks are taken over from one kernel to the next.
    """
    if not graph.device.startswith("cuda") or graph.fused is not None:
        return peak_bytes
    return max(peak_bytes, cached(graph, schedule).allocated_bytes)


def promised_bytes(peak_bytes: int, resident_bytes: int, device: str) -> int:
    """What a budget must hold: on CUDA a hundredth more than predicted, beside what is resident.

    There the allocator may hand out a block larger than asked for, by up to 1 MiB, and which one it
    has at hand depends on everything that the process did before.
    """
    if not device.startswith("cuda"):
        return peak_bytes
    return peak_bytes + (peak_bytes - resident_bytes) // _MARGIN


def numbers_bytes(graph: Graph) -> int:
    """What the numbers in an eager forward hold, of which a dry run sees nothing: at most so much.

    `x * 0.5` keeps the 0.5 for its backward, as a tensor of its own on the CPU. No checkpoint gives it back.
    """
    if graph.device != "cpu":
        return 0
    forward = (op for op in graph.ops if op.phase is Phase.FORWARD and op.target.endswith(_SAVING_A_NUMBER))
    taken = (argument for op in forward for argument in op.args[:2])
    return sum(_NUMBER_BYTES for number in taken if isinstance(number, int | float | complex))


def safe_peak_bytes(budget_bytes: int, resident_bytes: int, device: str) -> int:
    """A peak that may be aimed at: what is promised for it is within the budget."""
    if not device.startswith("cuda"):
        return budget_bytes
    return (_MARGIN * budget_bytes + resident_bytes) // (_MARGIN + 1)


def solved_within(
    budget_bytes: int,
    solve: Callable[[int | None], Found],
    promised: Callable[[Found], int],
    refusal: Callable[[Found], InfeasibleBudget],
    step_bytes: int = 0,
) -> Found:
    """What `solve` finds that is `promised` to be within the budget.

    `solve(bytes)` may count a little less than there is, so it is asked for less where its answer promises
    too much; or a little more, so that its lowest peak, `solve(None)`, is tried in the end. Where a lower
    peak does not promise as much less, each time by `step_bytes` at least, and twice that the next time.

    Raises:
        InfeasibleBudget: the lowest peak promises more than the budget; `refusal` says so.
    """
    aim = budget_bytes
    for _ in range(_TRIES):
        try:
            solution = solve(aim)
        except InfeasibleBudget:
            break
        excess = promised(solution) - budget_bytes
        if excess <= 0:
            return solution
        aim = solution.peak_bytes - max(excess, step_bytes)
        step_bytes *= 2
        if aim <= 0:
            break
    least = solve(None)
    if promised(least) <= budget_bytes:
        return least
    raise refusal(least)
