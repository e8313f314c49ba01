"""What is said when a planned step runs out of memory: what was planned, who held what, what to do.

PyTorch's error goes on as it is, with a note. What holds memory is found by looking at all there is: modules,
optimizers and tensors that are alive. Nothing is allocated for that, and nothing is let go of.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.compat.autograd import next_number, nodes_behind, number_of, saved_by
from lowtide.compat.tensors import storage_key
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.units import format_bytes
from lowtide.trace.owners import Owners, is_plain, of_module, states_of

_MARK = "lowtide: out of memory in "
_WORTH_SAYING = 50  # one part in so many of what is held


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the allocator and the device say of themselves."""

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    total_bytes: int

    @property
    def unused_bytes(self) -> int:
        """Reserved and not in use: cached, or between what is."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def elsewhere_bytes(self) -> int:
        """With others: other processes, and the CUDA context of this one."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)


@dataclass(frozen=True, slots=True)
class WhoHolds:
    """Bytes on the device of a model, by who holds them; each is counted once."""

    device: str
    parameters: int
    gradients: int
    states: int
    others: int
    other_models: tuple[str, ...]
    graphs: int
    earlier_graphs: int  # how many
    memory: DeviceMemory | None  # None on the CPU, where no allocator tells

    @property
    def named_bytes(self) -> int:
        """What is known to be somebody's."""
        return self.parameters + self.gradients + self.states + self.others + self.graphs


def device_memory(device: torch.device) -> DeviceMemory | None:
    """What there is to be known of a device; None where it has no caching allocator."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return DeviceMemory(allocated, reserved, free, total)


@contextmanager
def explained(
    model: nn.Module | None, solution: Solution | GraphSolution | None, doing: str, began: int | None = None
) -> Iterator[None]:
    """Add to an error of running out of memory in this block what is known of it.

    Autograd nodes below the number `began` are from before the forward.
    """
    first = next_number() if began is None else began
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
            error.add_note(told(solution, doing, who_holds(model, first)))
        raise


# What is held -------------------------------------------------------------------------------------------


class _Count:
    """Adds up storages on one device, each for the first who is found to hold it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[int] = set()

    def of(self, tensors: Iterable[torch.Tensor]) -> int:
        return sum(map(self._bytes, tensors))

    def _bytes(self, tensor: torch.Tensor) -> int:
        if not is_plain(tensor) or tensor.device != self._device or storage_key(tensor) in self._seen:
            return 0
        self._seen.add(storage_key(tensor))
        return tensor.untyped_storage().nbytes()


def who_holds(model: nn.Module | None, began: int) -> WhoHolds:
    """Who holds the memory of the device that `model` is on; without one, of what is alive."""
    owners = Owners()
    owners.look_around()
    own = [] if model is None else list(model.parameters())
    device = next((tensor.device for tensor in own), torch.device("cpu"))
    if model is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
    count, ids = _Count(device), {id(parameter) for parameter in own}
    buffers = [] if model is None else list(model.buffers())
    mine = [each for each in owners.optimizers if _works_on(each, ids)]
    parameters = count.of([*own, *buffers])
    gradients = count.of(parameter.grad for parameter in own if parameter.grad is not None)
    states = count.of(tensor for each in mine for tensor, *_ in states_of(each, {}))
    named: list[str] = []
    others = 0
    for root in owners.roots:
        held = count.of(tensor for tensor, *_ in of_module(root))
        others += held
        named += [type(root).__name__] if held else []
    others += count.of(tensor for each in owners.optimizers for tensor, *_ in states_of(each, {}))
    roots = list(_of_earlier_graphs(began))
    graphs = count.of(_kept_by(roots))
    return WhoHolds(
        str(device),
        parameters,
        gradients,
        states,
        others,
        tuple(named),
        graphs,
        len(_last_of(roots)) if graphs else 0,
        device_memory(device),
    )


def _works_on(optimizer: torch.optim.Optimizer, ids: set[int]) -> bool:
    return any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])


def _of_earlier_graphs(began: int) -> Iterator[torch.Tensor]:
    """Tensors that the program still has from steps before, with the graphs that they were made by."""
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.grad_fn is not None and number_of(thing.grad_fn) < began:
            yield thing


def _kept_by(roots: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Such tensors, and what their graphs have saved for a backward."""
    yield from roots
    for node in nodes_behind(roots):
        yield from (packed for _, packed in saved_by(node) if isinstance(packed, torch.Tensor))


def _last_of(roots: list[torch.Tensor]) -> set[Any]:
    """The nodes of these tensors from which no other of their graphs goes on."""
    followed = {each for node in nodes_behind(roots) for each, _ in node.next_functions}
    return {root.grad_fn for root in roots} - followed


# What is said -------------------------------------------------------------------------------------------


def told(solution: Solution | GraphSolution | None, doing: str, held: WhoHolds) -> str:
    """All of it, as the text of a note."""
    lines = [f"{_MARK}{doing} of a step that {_planned(solution)}.", f"Held on {held.device} then:"]
    lines += [f"{format_bytes(size):>12}  {who}" for who, size in _rows(held) if size]
    lines += ["What to do:", *(f"- {advice}" for advice in _advice(solution, held))]
    return "\n".join(lines)


def _planned(solution: Solution | GraphSolution | None) -> str:
    if solution is None:
        return "runs in one arena, planned ahead"
    how = "op by op" if isinstance(solution, GraphSolution) else "layer by layer"
    within = "" if solution.budget_bytes is None else f" within {format_bytes(solution.budget_bytes)}"
    peak = format_bytes(predicted_bytes(solution))
    return f"was planned {how} ({solution.method}){within}, with a predicted peak of {peak}"


def predicted_bytes(solution: Solution | GraphSolution) -> int:
    """The peak that was predicted for a plan: where it was tried out, what that has shown."""
    confirmed = solution.confirmation if isinstance(solution, Solution) else None
    return solution.peak_bytes if confirmed is None else confirmed.peak_bytes


def _rows(held: WhoHolds) -> Iterator[tuple[str, int]]:
    yield "this model's parameters and buffers", held.parameters
    yield "their gradients", held.gradients
    yield "states of their optimizers", held.states
    others = "other models" if held.parameters else "models"
    yield f"{others} ({', '.join(sorted(set(held.other_models)))}) and their optimizers", held.others
    yield (
        f"autograd graphs from before this forward ({held.earlier_graphs}), with results",
        held.graphs,
    )
    if held.memory is not None:
        rest = max(0, held.memory.allocated_bytes - held.named_bytes)
        yield "what this step has made, and other tensors of the program", rest
        yield "reserved by PyTorch and not in use: its cache, and gaps", held.memory.unused_bytes
        yield "other processes, and the CUDA context of this one", held.memory.elsewhere_bytes


def _advice(solution: Solution | GraphSolution | None, held: WhoHolds) -> Iterator[str]:
    memory = held.memory
    whole = memory.total_bytes if memory is not None else held.named_bytes

    def matters(size: int) -> bool:
        return size * _WORTH_SAYING > whole

    if matters(held.graphs):
        yield "let go of what earlier steps have made: keep losses as numbers (loss.item()), outputs detached"
    if held.parameters and matters(held.others):
        yield "let go of the other models, or move them to the CPU; a plan does not count them"
    if memory is not None and matters(memory.unused_bytes):
        yield "set PYTORCH_ALLOC_CONF=expandable_segments:True: what is reserved is then of more use"
    budget_bytes = None if solution is None else solution.budget_bytes
    if memory is not None and budget_bytes is not None and budget_bytes > _within_reach(memory):
        reach = format_bytes(_within_reach(memory))
        yield f"plan within less than {reach}: this process cannot get more while others hold the rest"
    yield "plan within a lower budget, or train on a smaller batch"
    yield "`lowtide rehearse` shows a whole training on a card, part by part"


def _within_reach(memory: DeviceMemory) -> int:
    return memory.free_bytes + memory.reserved_bytes
