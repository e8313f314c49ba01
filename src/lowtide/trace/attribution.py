"""Which module of the user's model an op belongs to, and which part of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide.compat.autograd import in_backward, next_number, number_of, running_node, saving_hooks
from lowtide.compat.modules import has_forward_hooks
from lowtide.ir.graph import Call, Phase

Place = tuple[str, int]  # module path, how-maniest call of it
_NOWHERE: Place = ("", 0)


@dataclass(frozen=True, slots=True)
class _Running:
    """A call that has not ended: the op at which it began, what was called before, and what was saved how."""

    place: Place
    first: int
    calls_before: int
    hooks: object


class Attribution:
    """Follows module calls, autograd nodes and optimizer steps.

    In the forward an op belongs to the module whose call is innermost. In the backward it belongs to
    the module whose forward made the running autograd node: both carry the same sequence number.

    `clock` tells how many ops there have been; `calls` are the forward's calls of modules, each with the
    ops that ran in it, in the order in which they ended. `closed` are those among them that cannot be begun
    or ended by anybody else: they run in a module that checkpoints, or otherwise decides what is saved, or
    calls a custom function, between the modules that it calls.
    """

    def __init__(self, models: Sequence[nn.Module], clock: Callable[[], int] = int) -> None:
        self.calls: list[Call] = []
        self.closed: set[Place] = set()
        self._clock = clock
        self._paths = {id(module): path for model in models for path, module in model.named_modules()}
        self._owner: dict[int, str] = {}
        self._stack: list[_Running] = []
        self._whole: set[Place] = set()  # calls between whose calls something happens that is theirs alone
        self._calls: Counter[str] = Counter()
        self._place_of_node: dict[int, tuple[Place, int]] = {}
        self._optimizing = 0
        self._hooked: set[int] = set()

    def own(self, owners: Mapping[int, str]) -> None:
        """Tell which module owns each parameter, by the id of the tensor."""
        self._owner.update(owners)

    def begin(self) -> None:
        """The step that is recorded begins here: its calls are counted from zero."""
        self.calls.clear()
        self.closed.clear()
        self._calls.clear()
        self._place_of_node.clear()

    def only(self, place: Place) -> None:
        """A call that somebody else follows is all that is running."""
        self._stack = [_Running(place, first=0, calls_before=0, hooks=None)]

    @contextmanager
    def following(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Listen while the block runs, through PyTorch's global hooks.

        Those are called before a module's own. What a module's own hooks do belongs to its call, so where
        it has some, one more is added to the end of them, for as long as the block runs.
        """
        hooked = [module for model in models for module in model.modules() if has_forward_hooks(module)]
        self._hooked = {id(module) for module in hooked}
        handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_unless_hooked, always_call=True),
            *(module.register_forward_hook(self._leave_module, always_call=True) for module in set(hooked)),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def phase(self) -> Phase:
        """The part of the step that is running now."""
        if self._optimizing:
            return Phase.OPTIMIZER
        if not in_backward():
            return Phase.FORWARD
        # Backward formulas run without gradients; checkpointing turns them on to run the forward again.
        return Phase.RECOMPUTE if torch.is_grad_enabled() else Phase.BACKWARD

    def place(self, phase: Phase) -> Place:
        """The module that the op now being dispatched belongs to."""
        if phase is Phase.BACKWARD:
            node = running_node()
            return _NOWHERE if node is None else self.place_of(node)
        place = self._stack[-1].place if self._stack else _NOWHERE
        # The node of this op was numbered just before the op reached us. An op that makes no node (a
        # counter that is increased, say) finds the number of the op before it taken, and leaves it.
        number = next_number() - 1
        self._place_of_node.setdefault(number, (place, self._clock()))
        return place

    def forward_op(self) -> int | None:
        """The forward op whose backward is running now; None where that is not known."""
        node = running_node()
        return None if node is None else self.op_of(node)

    def op_of(self, node: Any) -> int | None:
        """The forward op that made an autograd node; None where that is not known, and for leaves."""
        found = None if hasattr(node, "variable") else self._place_of_node.get(number_of(node))
        return None if found is None else found[1]

    def place_of(self, node: Any) -> Place:
        """The module whose forward made an autograd node, or that owns the leaf it accumulates into."""
        variable = getattr(node, "variable", None)  # only the nodes that accumulate into a leaf have one
        if variable is not None:
            return (self._owner.get(id(variable), ""), 0)
        return self._place_of_node.get(number_of(node), (_NOWHERE, 0))[0]

    def _enter_module(self, module: nn.Module, args: object) -> None:
        path = self._paths.get(id(module), type(module).__name__)
        place = (path, self._calls[path])
        self._stack.append(_Running(place, self._clock(), len(self.calls), saving_hooks()))
        self._calls[path] += 1

    def _leave_unless_hooked(self, module: nn.Module, args: object, output: object) -> None:
        if id(module) not in self._hooked:
            self._leave_module(module, args, output)

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        ended = self._stack.pop()
        if ended.place in self._whole:
            self.closed.update((call.module, call.call) for call in self.calls[ended.calls_before :])
        if self._stack and ended.hooks != self._stack[0].hooks:
            self.closed.add(ended.place)
        if self.phase() is Phase.FORWARD and id(module) in self._paths:
            self.calls.append(Call(*ended.place, ended.first, self._clock()))

    def op_runs(self) -> None:
        """An op of the forward runs: whoever has decided anew what is saved is closed."""
        hooks = saving_hooks()
        if self._stack and hooks != self._stack[0].hooks:
            self._close()

    def function_runs(self) -> None:
        """A custom autograd function is called."""
        if self._stack and self.phase() is Phase.FORWARD:
            self._close()

    def _close(self) -> None:
        """The innermost of the running calls that began before somebody decided anew what is saved is whole.

        The model itself is not: what it does between its calls can be left out of every stretch.
        """
        before = takewhile(lambda running: running.hooks == self._stack[0].hooks, self._stack)
        self._whole.update([running.place for running in before][1:][-1:])

    def _enter_optimizer(self, optimizer: object, args: object, kwargs: object) -> None:
        self._optimizing += 1

    def _leave_optimizer(self, optimizer: object, args: object, kwargs: object) -> None:
        self._optimizing -= 1
