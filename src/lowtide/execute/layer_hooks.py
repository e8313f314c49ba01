"""A chain plan at work in eager PyTorch: segments of the user's own modules, checkpointed.

Hooks on the modules at which segments begin and end open and close PyTorch's own non-reentrant
checkpoints around whatever the user's code does between. What it does is written down on a tape (see
`taping`), for that is what has to be run again. The model keeps its class, its parameters and the keys
of its `state_dict`; where gradients are off, nothing happens at all.

PyTorch restores random streams and autocast when it recomputes. Two things are added here: buffers that
the forward changes, such as the running statistics of BatchNorm, are changed by the first run alone (see
`buffers`), and a forward that fails closes what it had opened.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowtide.chain.placement import Edge, SegmentPlacement, Unit, place
from lowtide.compat.autograd import checkpoint
from lowtide.compat.ddp import let_go_of_old_buckets
from lowtide.errors import BadRequest, CannotApply
from lowtide.execute.buffers import UnitBuffers, forget_scratch
from lowtide.execute.identity import described_inputs, fingerprint
from lowtide.execute.layer_pass import Pass, close
from lowtide.execute.tape import Tape, replay_tape
from lowtide.solvers.solution import Solution

Model = TypeVar("Model", bound=nn.Module)
Replan = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Solution]
ON_NEW_INPUTS = ("warn", "error", "ignore")

_ROOT: Unit = ("", 0)
_ATTRIBUTE = "_lowtide_segments"


def apply(
    model: Model, solution: Solution | None, *, on_new_inputs: str = "warn", replan: Replan | None = None
) -> Model:
    """Make `model` recompute as `solution` plans, in place, and return it.

    Class, parameters and `state_dict` keys stay; gradients are those of plain training, bit for bit
    where PyTorch is deterministic; random streams and running statistics advance once a step. A plan that
    was applied before is replaced, and `remove` takes it off. Wrap the model (DDP) after applying.

    The plan holds for inputs of the planned shapes, and for the path through the model that they took.
    With others gradients are still right, but the peak is not the promised one: `on_new_inputs` says
    whether to "warn" once, raise an "error" or "ignore" it. If `replan` is given it is called instead for
    new inputs, with the model and its arguments, and its plan takes over for these; see `lowtide.optimize`.
    With it there need not be a solution yet: the first inputs of the training are planned for, whatever
    they are.

    Raises:
        CannotApply: the plan was made for a model with other parameters.
        BadRequest: the plan's chain was made from sizes alone.
    """
    if on_new_inputs not in ON_NEW_INPUTS:
        raise BadRequest(f"on_new_inputs is {on_new_inputs!r}; it is one of {', '.join(ON_NEW_INPUTS)}.")
    course = None if solution is None else _course(model, solution)
    remove(model)
    runner = _Runner(course, on_new_inputs, replan)
    runner.attach(model)
    setattr(model, _ATTRIBUTE, runner)
    return model


def remove(model: nn.Module) -> None:
    """Take a plan off `model`, if it has one."""
    runner = model.__dict__.pop(_ATTRIBUTE, None)
    if isinstance(runner, _Runner):
        runner.detach()
    forget_scratch(model)


def plans_of(model: nn.Module) -> tuple[Solution, ...]:
    """The plans that `model` has, one for each kind of inputs, in the order in which it met them."""
    runner = model.__dict__.get(_ATTRIBUTE)
    known = runner.known.values() if isinstance(runner, _Runner) else ()
    return tuple(course.solution for course in known)


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """The plain model while the block runs; afterwards with the plan that it had before, if any."""
    runner = model.__dict__.pop(_ATTRIBUTE, None)
    if isinstance(runner, _Runner):
        runner.detach()
    try:
        yield
    finally:
        remove(model)
        if isinstance(runner, _Runner):
            runner.attach(model)
            setattr(model, _ATTRIBUTE, runner)


def by_layers(model: nn.Module, solution: Solution) -> _Runner:
    """What runs the forward of `model` as `solution` plans, for one who stands in the place of that.

    Raises:
        CannotApply: the plan was made for a model with other parameters.
    """
    return _Runner(_course(model, solution), "ignore", None)


@dataclass(frozen=True, slots=True)
class _LayerCourse:
    """What a plan means for a model: where its segments are, and which inputs it was made for."""

    solution: Solution
    placement: SegmentPlacement

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.solution.chain.inputs


def _course(model: nn.Module, solution: Solution) -> _LayerCourse:
    placement = place(solution.chain, solution.plan)
    if solution.chain.fingerprint != fingerprint(model):
        raise CannotApply(
            f"the plan was made for another model than this {type(model).__name__}: their parameters or "
            "buffers differ in name, shape or type. Plan this model."
        )
    return _LayerCourse(solution, placement)


class _Runner:
    """The hooks of one applied plan.

    It refers to modules by their paths alone: the model refers to it, and a circle would keep both alive.
    """

    def __init__(self, course: _LayerCourse | None, on_new_inputs: str, replan: Replan | None) -> None:
        self.course = course
        self.on_new_inputs = on_new_inputs
        self.replan = replan
        self.known = {} if course is None else {course.inputs: course}
        self.told: set[str] = set()
        self.handles: list[RemovableHandle] = []
        self.around_units: list[tuple[RemovableHandle, RemovableHandle]] = []
        self.buffers: dict[str, UnitBuffers] = {}
        self.local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, local=threading.local())

    # Hooks ----------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> None:
        self._hook(model, self._begin, self._end)
        self._attach_inside(model)

    def _attach_inside(self, model: nn.Module) -> None:
        if self.course is None:
            return
        modules = dict(model.named_modules(remove_duplicate=False))
        placement = self.course.placement
        units = {path for path, _ in placement.units}
        involved = units | {edge.unit[0] for edge in placement.edges}
        for path in sorted(involved - {""}):
            if path not in modules:
                raise CannotApply(f"the plan speaks of a module '{path}', which the model does not have.")
            pair = self._hook(modules[path], partial(self._enter, path), partial(self._leave, path))
            if path in units:
                self.around_units.append(pair)
        changed = self.course.solution.chain.changed_buffers
        self.buffers = {path: UnitBuffers(path, modules[path], changed) for path in units}

    def run(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `forward` returns, with the hooks there while it runs."""
        self._attach_inside(model)
        try:
            self._begin(model, args, kwargs)
            output = forward(*args, **kwargs)
            self._end(model, args, output)
        except BaseException:
            self._end(model, args, None)
            raise
        finally:
            self.detach()
        return output

    def _hook(
        self, module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
    ) -> tuple[RemovableHandle, RemovableHandle]:
        pair = (
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        )
        self.handles += pair
        return pair

    def _stay_outermost(self) -> None:
        """A unit is run again with its hooks: those that others have added since belong to its call too."""
        for enter, leave in self.around_units:
            _move_to_end(enter, last=False)
            _move_to_end(leave, last=True)

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.around_units.clear()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stale = self._passing()
        if stale is not None:  # an interrupt ended it, and no hook heard of it
            stale.abandon()
        self.local.passing = None
        if not torch.is_grad_enabled() or self._is_replaying():
            return
        let_go_of_old_buckets()
        self._suit(model, args, kwargs)
        if self.course is None:
            return
        self._stay_outermost()
        passing = Pass(self.course.placement, self.buffers, self.opened)
        self.local.passing = passing
        passing.cross(Edge(_ROOT, ends=False), (args, kwargs))

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        passing = self._passing()
        if passing is None or self._is_replaying():
            return
        self.local.passing = None
        if _has_failed(output):
            passing.abandon()
        else:
            passing.cross(Edge(_ROOT, ends=True), output)
            if not passing.finish() and model.training:
                self._unsuited(f"{type(model).__name__} took another path than the one that was planned")

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passing = self._passing()
        if passing is not None and not self._is_replaying():
            passing.enter(path, module, args, kwargs)

    def _leave(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        passing = self._passing()
        if passing is not None and not self._is_replaying() and not _has_failed(output):
            passing.leave(path, module, output)

    def _passing(self) -> Pass | None:
        found: Pass | None = getattr(self.local, "passing", None)
        return found

    def _is_replaying(self) -> bool:
        return bool(getattr(self.local, "replaying", 0))

    # Inputs ---------------------------------------------------------------------------------------------

    def _suit(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the plan that was made for these inputs, or do what is to be done where there is none."""
        given = described_inputs(args, kwargs)
        if not model.training or (self.course is not None and given == self.course.inputs):
            return
        if given in self.known:
            self._switch(model, self.known[given])
            return
        if self.course is not None:
            difference = (
                f"{type(model).__name__} was planned for inputs {', '.join(self.course.inputs)} and is given "
                f"{', '.join(given)}"
            )
            if self.replan is None or self.on_new_inputs == "error":
                self._unsuited(difference)
                return
            self._tell("replan", f"{difference}. New inputs are planned for when they are met first.")
        assert self.replan is not None, "without a solution there is someone to make one"
        self.known[given] = _course(model, self.replan(model, args, kwargs))
        self._switch(model, self.known[given])

    def _switch(self, model: nn.Module, course: _LayerCourse) -> None:
        self.detach()
        self.course = course
        self.attach(model)

    def _unsuited(self, difference: str) -> None:
        message = f"{difference}: gradients are right, but the peak is not the promised one."
        if self.on_new_inputs == "error":
            raise CannotApply(f'{message} Plan for this, or apply with on_new_inputs="warn".')
        if self.on_new_inputs == "warn":
            self._tell("unsuited", message)

    def _tell(self, subject: str, message: str) -> None:
        """Say it once, however often it happens."""
        if subject not in self.told:
            self.told.add(subject)
            warnings.warn(message, stacklevel=7)

    # Segments -------------------------------------------------------------------------------------------

    def opened(self, tape: Tape, tensors: Sequence[torch.Tensor]) -> Generator[None, None, None]:
        """PyTorch's checkpoint around what happens from now on, to be recomputed from `tape`."""
        generator = checkpoint(partial(self._recompute, tape), tensors)
        next(generator)
        return generator

    def _recompute(self, tape: Tape, *tensors: torch.Tensor) -> None:
        self.local.replaying = getattr(self.local, "replaying", 0) + 1
        try:
            replay_tape(tape, tensors, self._recompute_nested)
        finally:
            self.local.replaying -= 1

    def _recompute_nested(self, tape: Tape, tensors: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        generator = self.opened(tape, tensors)
        try:
            run()
        except BaseException:
            generator.close()
            raise
        close(generator)


def _move_to_end(handle: RemovableHandle, last: bool) -> None:
    """Have a hook called last of all that there are in its place, or first."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None:  # a handle does not keep its module alive
        hooks.move_to_end(handle.id, last=last)


def _has_failed(output: Any) -> bool:
    """Whether a forward hook that is always called is called because the forward raised."""
    return output is None and sys.exc_info()[0] is not None
