"""A chain plan at work in eager PyTorch: segments of the user's own modules, checkpointed.

Hooks on the modules at which segments begin and end, there while the model's forward runs, open and close
PyTorch's own non-reentrant checkpoints around whatever the user's code does between. What it does is written
down on a tape (see `tape`), for that is what has to be run again.

PyTorch restores random streams and autocast when it recomputes. Added here: what the model keeps is changed
by the first run alone, and seen again as that run saw it (see `unit_state` and `originals`), and whatever
ends a forward, an error or an interrupt, nothing that was opened stays open.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.chain.placement import place
from lowtide.compat.ambient import Ambient
from lowtide.compat.autograd import checkpoint, next_number
from lowtide.compat.undo import undone
from lowtide.errors import CannotApply
from lowtide.execute.identity import fingerprint
from lowtide.execute.layer_pass import Pass, close, enter
from lowtide.execute.out_of_memory import explained
from lowtide.execute.streams import Streams
from lowtide.execute.tape import Tape, replay_tape
from lowtide.execute.unit_state import UnitState
from lowtide.solvers.solution import Solution


class LayerCourse:
    """A plan of layers at work in one model. `astray` is told how the model has left the planned path.

    It refers to the model by paths, and weakly: the model refers to it, and a circle would keep both alive.

    Raises:
        CannotApply: the plan was made for a model with other parameters.
        BadRequest: the plan's chain was made from sizes alone.
    """

    def __init__(self, model: nn.Module, solution: Solution, astray: Callable[[str], None]) -> None:
        self._placement = place(solution.chain, solution.plan)
        if solution.chain.fingerprint != fingerprint(model):
            raise CannotApply(
                f"the plan was made for another model than this {type(model).__name__}: their parameters or "
                "buffers differ in name, shape or type. Plan this model."
            )
        self._astray = astray
        self._solution = solution
        self._model = weakref.ref(model)
        self._began = 0
        self._written = solution.chain.changed_buffers
        self._states: dict[str, UnitState] = {}
        self._replaying = threading.local()
        self._draws = True  # from streams outside of PyTorch: until a forward was seen that does not
        list(self._followed(model))

    def run(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `forward`, which is the model's own, returns; run as planned."""
        self._began = next_number()
        streams, unheard = Streams((), shared=True), threading.Event()
        opened = partial(self._opened, unheard)
        passing = Pass(self._placement, self._state_of, opened, self._is_replaying, self._draws)
        with undone(passing.abandon):
            for path, module in self._followed(model):
                passing.attach(path, module)
            passing.begin((args, kwargs))
            output = forward(*args, **kwargs)
            passing.end()
        if streams.moved() and not passing.draws:
            unheard.set()
        self._draws = streams.moved()
        if passing.stray:
            self._astray(passing.stray)
        return output

    def _followed(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose calls matter: of the plan, and those with parameters that it does not know.

        Raises:
            CannotApply: the plan speaks of a module that is not there.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        units = {path for path, _ in self._placement.units}
        planned = units | {path for path, _ in self._placement.entered}
        for path in sorted(planned):
            if path not in modules:
                raise CannotApply(f"the plan speaks of a module '{path}', which the model does not have.")
            yield path, modules[path]
        within = "."  # no path begins like that
        for path, module in model.named_modules():
            known = self._placement.called if path.startswith(within) else planned
            if path in units:
                within = f"{path}."
            elif path and path not in known and any(True for _ in module.parameters()):
                yield path, module

    def _state_of(self, path: str, module: nn.Module) -> UnitState:
        known = self._states.get(path)
        if known is None or not known.is_of(module):
            known = self._states[path] = UnitState(path, module, self._written)
        return known

    def _is_replaying(self) -> bool:
        return bool(getattr(self._replaying, "depth", 0))

    # Segments -------------------------------------------------------------------------------------------

    def _opened(
        self, unheard: threading.Event, tape: Tape, tensors: Sequence[torch.Tensor]
    ) -> Generator[None, None, None]:
        """PyTorch's checkpoint around what happens between its two steps, to be recomputed from `tape`.

        `unheard` is set if the forward drew random numbers that nobody looked out for.
        """
        return checkpoint(partial(self._recompute, unheard, tape), tensors)

    def _recompute(self, unheard: threading.Event, tape: Tape, *tensors: torch.Tensor) -> None:
        depth = getattr(self._replaying, "depth", 0)
        streams = Streams((), shared=unheard.is_set())
        try:
            self._replaying.depth = depth + 1
            with explained(self._model(), self._solution, "the backward, running a part again,", self._began):
                replay_tape(tape, tensors, partial(self._recompute_nested, unheard))
        finally:
            self._replaying.depth = depth
            if streams.moved():
                streams.put_back()
                raise CannotApply(
                    "a module of the model has drawn from Python's or numpy's random numbers for the first "
                    "time, so that it cannot be run again in this backward. The next step can be run."
                )

    def _recompute_nested(
        self, unheard: threading.Event, tape: Tape, tensors: Sequence[torch.Tensor], run: Callable[[], None]
    ) -> None:
        ambient, generator = Ambient(), self._opened(unheard, tape, tensors)
        try:
            enter(generator)
            run()
            close(generator)
        finally:
            generator.close()
            ambient.restore()
