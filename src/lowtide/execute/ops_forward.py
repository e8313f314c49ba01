"""A model whose forward runs as it was planned.

The model's `forward` is replaced, on this one instance, by an object that runs it by a plan for what it is
called with: hands it to Dynamo with a backend of ours, or follows the calls of its modules (see `courses`).
Class, parameters, hooks and the keys of `state_dict` stay. Where gradients are off, or the model is in
another mode than when it was planned, nothing happens at all.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from lowtide.aot.graph_backend import Spares
from lowtide.compat.ambient import without_saving_hooks
from lowtide.compat.ddp import let_go_of_old_buckets
from lowtide.compat.modules import ASKED_BY_JIT, is_replica, module_being_called
from lowtide.compat.patches import ONE_THREAD
from lowtide.compat.undo import undone
from lowtide.errors import BadRequest, CannotApply
from lowtide.execute.circumstances import circumstances
from lowtide.execute.courses import Course, OpsCourse, check_layers, course_of
from lowtide.execute.identity import but_for_numbers, fingerprint
from lowtide.execute.out_of_memory import explained
from lowtide.solvers.solution import GraphSolution, Solution

Model = TypeVar("Model", bound=nn.Module)
Replan = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Solution | GraphSolution]
ON_NEW_INPUTS = ("warn", "error", "ignore")
MOST_PLANS = 32  # kinds of inputs that plans are held for at once, where new ones are planned for
_FORWARD = "forward"
_OF_FUNCTIONS = ("__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__", "__name__")


def reroute(
    model: Model,
    solution: Solution | GraphSolution | None,
    *,
    on_new_inputs: str = "warn",
    accumulate: int = 1,
    replan: Replan | None = None,
    of_layers: bool = False,
    spares: Spares | None = None,
    others: Sequence[Solution | GraphSolution] = (),
) -> Model:
    """Make `model` train as `solution` plans, in place, and return it; see `lowtide.apply`.

    Without a solution, `replan` makes one for the first inputs of its training, whatever they are. Its plans
    may be of layers, and `of_layers` says that all are: these run hooks as they come. What it has taken apart
    for them is in `spares`. `others` are plans for other inputs.
    """
    if on_new_inputs not in ON_NEW_INPUTS:
        raise BadRequest(f"on_new_inputs is {on_new_inputs!r}; it is one of {', '.join(ON_NEW_INPUTS)}.")
    if isinstance(solution, GraphSolution):
        check(model, solution)
    elif solution is not None:
        check_layers(model, solution)
    before = model.__dict__.get(_FORWARD)
    remove(model)
    planned = () if solution is None else (solution, *others)
    solutions = {_inputs(model, each, of_layers): each for each in planned}
    route = _Route(model, solutions, on_new_inputs, accumulate, replan, of_layers, spares or Spares())
    if isinstance(before, _Route) and before.model is model:
        route.take_over(before)
    model.__dict__[_FORWARD] = route
    return model


def remove(model: nn.Module) -> None:
    """Take a plan off `model`, if it has one."""
    route = model.__dict__.get(_FORWARD)
    if isinstance(route, _Route):
        del model.__dict__[_FORWARD]
        if route.own is not None:
            model.__dict__[_FORWARD] = route.own


def plans_of(model: nn.Module) -> tuple[Solution | GraphSolution, ...]:
    """The plans that `model` trains by, one for each kind of inputs, in the order in which it met them.

    None are there before the first batch of a model that was optimized without an example.
    """
    route = model.__dict__.get(_FORWARD)
    return tuple(route.solutions.values()) if isinstance(route, _Route) else ()


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """The plain model while the block runs; afterwards with the plan that it had before, if any."""
    route = model.__dict__.get(_FORWARD)

    def put_back() -> None:
        remove(model)
        if isinstance(route, _Route):
            model.__dict__[_FORWARD] = route

    with undone(put_back):
        remove(model)
        yield


def check(model: Model, solution: GraphSolution) -> Model:
    """`model`, if `solution` was made for it."""
    if not solution.fingerprint:
        raise BadRequest(
            f"this plan is for the graph {solution.graph.name} alone, and does not say for which model and "
            "batch. Plan the model with lowtide.plan."
        )
    if solution.fingerprint != fingerprint(model):
        raise CannotApply(
            f"the plan was made for another model than this {type(model).__name__}: their parameters or "
            "buffers differ in name, shape or type. Plan this model."
        )
    here = torch.__version__.partition("+")[0]
    if solution.torch_version != here:
        raise CannotApply(
            f"the plan was made with torch {solution.torch_version}, and this is torch {here}, which may "
            "capture other ops. Plan the model again."
        )
    where = next((tensor.device.type for tensor in model.parameters()), solution.graph.device)
    if where != solution.graph.device.partition(":")[0]:
        raise CannotApply(
            f"the plan was made for {solution.graph.device}, and the model is on {where}. Move the model, or "
            "plan it there."
        )
    return model


class _Route:
    """Stands in for the forward of one model.

    It refers to the model weakly: the model refers to it, and a circle would keep both alive. Copies of the
    model that were made by copying its attributes have the very same object: the first call of such a
    copy gives it one of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        solutions: Mapping[tuple[str, ...], Solution | GraphSolution],
        on_new_inputs: str,
        accumulate: int,
        replan: Replan | None,
        of_layers: bool,
        spares: Spares,
    ) -> None:
        self.own: Callable[..., Any] | None = model.__dict__.get(_FORWARD)
        self.__signature__ = inspect.signature(model.forward)  # trainers look at it
        self._model = weakref.ref(model)
        self._training = model.training if solutions else True  # what is not planned yet will train
        self.solutions = dict(solutions)
        self._on_new_inputs = on_new_inputs
        self._accumulate = accumulate
        self._replan = replan
        self._of_layers = of_layers
        self._spares = spares
        self._courses: dict[tuple[str, ...], Course] = {}
        self._told: set[str] = set()
        self._sharing: tuple[str, ...] | None = None  # inputs that run by the plan for other numbers
        self._followed: Solution | GraphSolution | None = None  # by the forward that runs
        self._apart: set[tuple[str, ...]] = set()  # those whose ops are others than that plan's

    @torch.compiler.disable(reason="it runs by a plan: lowtide.remove(model)")  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():  # what is exported has no backward
            return self.__wrapped__(*args, **kwargs)
        model, called = self.model, module_being_called()
        if called is not None and called is not model and self._is_copy(called):
            return self._for_copy(called)(*args, **kwargs)
        assert model is not None, "a model's forward is called by the model"
        if not torch.is_grad_enabled() or model.training != self._training:
            return self._plain(model)(*args, **kwargs)
        let_go_of_old_buckets()
        self._tell_of_gradients(model)
        plain = self._plain(model)
        with ONE_THREAD:
            course = self._course(model, args, kwargs)
            if course is not None:
                with explained(model, self._followed, "the forward"):
                    return course.run(model, plain, args, kwargs)
        return plain(*args, **kwargs)

    @property
    def model(self) -> nn.Module | None:
        """The model that this is for, as long as there is one."""
        return self._model()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward without a plan: what `inspect`, and all that read source code, are to look at."""
        model = self.model
        if model is None:
            raise AttributeError("the model is gone")
        return self._plain(model)

    def __getattr__(self, name: str) -> Any:
        """What functions have, `__code__` say: torch.export asks forwards for it."""
        if name in _OF_FUNCTIONS:
            return getattr(self.__wrapped__, name)
        if name == ASKED_BY_JIT:
            raise CannotApply(
                "torch.jit wants a forward whose source code it can read, and this model's runs by a plan. "
                "Take the plan off first, lowtide.remove(model), or use torch.export."
            )
        raise AttributeError(f"the forward of a planned model has no {name}")

    def take_over(self, before: _Route) -> None:
        """Go on with what was compiled for an earlier plan of the same graphs: only the schedule is new."""
        for inputs, solution in self.solutions.items():
            course = before._courses.get(inputs)
            if not isinstance(course, OpsCourse) or not isinstance(solution, GraphSolution):
                continue
            if course.execution.graph == solution.graph:
                course.execution.follow(solution.schedule)
                self._courses[inputs] = course

    def _plain(self, model: nn.Module) -> Callable[..., Any]:
        return self.own or MethodType(type(model).forward, model)

    def _course(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Course | None:
        """How to run the model on these arguments; None: as if there was no plan."""
        inputs = self._planned_as(circumstances(model, args, kwargs, with_hooks=not self._of_layers))
        if inputs in self._courses:
            self._courses[inputs] = self._courses.pop(inputs)  # the one that was used last is the last
            return self._taken(inputs)
        if inputs not in self.solutions:
            if self._replan is None or (self.solutions and self._on_new_inputs == "error"):
                self._refuse_or_warn(inputs)
                if not self._of_layers:
                    return None
                inputs = next(iter(self.solutions))  # layers can be run again whatever the batch is
            else:
                self.solutions[inputs] = self._planned(self._replan, inputs, model, args, kwargs)
        if inputs not in self._courses:
            solution, spares = self.solutions[inputs], self._spares.handed_on()
            self._courses[inputs] = course_of(model, solution, self.own, self._teller(), spares)
            self._let_go_of_oldest()
        return self._taken(inputs)

    def _taken(self, inputs: tuple[str, ...]) -> Course:
        self._followed = self.solutions[inputs]
        return self._courses[inputs]

    def _let_go_of_oldest(self) -> None:
        """Hold no more than `MOST_PLANS`, and what was compiled for them, where each can be made anew."""
        if self._replan is None or len(self._courses) <= MOST_PLANS:
            return
        oldest = next(iter(self._courses))
        del self._courses[oldest], self.solutions[oldest]
        self._tell(
            "many plans",
            f"the model has met more than {MOST_PLANS} kinds of inputs. The plan that was not used for the "
            "longest time is let go of for each that is new, and made anew if its inputs come again. Pad to "
            "a few lengths (lowtide.padded), and plans are made once.",
        )

    def _planned_as(self, inputs: tuple[str, ...]) -> tuple[str, ...]:
        """The inputs whose plan is for these: themselves, or such as differ in floating-point numbers."""
        self._sharing = None
        if inputs in self.solutions or inputs in self._apart:
            return inputs
        meant = but_for_numbers(inputs)
        for known in self.solutions:
            if but_for_numbers(known) == meant:
                self._sharing = inputs
                return known
        return inputs

    def _teller(self) -> Callable[[str], None]:
        """What a course tells of another path. Dynamo holds on to courses, so they refer to this weakly."""
        reference = weakref.ref(self)

        def astray(how: str) -> None:
            route = reference()
            if route is not None:
                route._astray(how)

        return astray

    def _astray(self, how: str) -> None:
        if self._sharing is not None and self._replan is not None:  # they get a plan when they come again
            self._apart.add(self._sharing)
            return
        self._unplanned(
            f"the model took another path than the one that was planned: {how}.",
            "Plan for the path that it takes.",
            follows_a_plan=True,
        )

    def _planned(
        self,
        replan: Replan,
        inputs: tuple[str, ...],
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Solution | GraphSolution:
        """A plan for inputs that there is none for."""
        if model.__dict__.get(_FORWARD) is not self:
            raise CannotApply(
                f"the forward of this {type(model).__name__} was wrapped by another library after "
                "lowtide.optimize, so that it cannot be planned alone. Let that library have the model first "
                "(accelerator.prepare, say), and then call lowtide.optimize."
            )
        if self.solutions and self._on_new_inputs == "warn":
            self._tell(
                "new inputs",
                f"the model meets inputs without a plan ({_difference(inputs, self.solutions)}). They are "
                "planned for now, under the same budget, and remembered; so are others from now on.",
            )
        try:
            with without_saving_hooks():  # a checkpoint around the model is no part of it
                return replan(model, args, kwargs)
        except BadRequest:
            with torch.no_grad():  # what is wrong with the user's own code is told in its own words
                self._plain(model)(*args, **kwargs)
            raise

    def _refuse_or_warn(self, inputs: tuple[str, ...]) -> None:
        self._unplanned(
            f"the plan is not for these inputs: {_difference(inputs, self.solutions)}.",
            "Plan for them, or use lowtide.optimize, which plans for new inputs when it meets them.",
            follows_a_plan=self._of_layers,
        )

    def _unplanned(self, problem: str, what_to_do: str, follows_a_plan: bool = False) -> None:
        if self._on_new_inputs == "error":
            raise CannotApply(f"{problem} {what_to_do}")
        if self._on_new_inputs == "warn":
            outcome = (
                "Gradients are right, but the peak may be another than the promised one."
                if follows_a_plan
                else "The model runs without a plan, and may exceed the budget."
            )
            self._tell(problem, f"{problem} {outcome} {what_to_do}")

    def _tell_of_gradients(self, model: nn.Module) -> None:
        if self._of_layers or self._accumulate > 1 or "gradients" in self._told:
            return
        if any(parameter.grad is not None for parameter in model.parameters()):
            self._tell(
                "gradients",
                "gradients of an earlier backward are still there when a forward begins, and the plan does "
                "not count them: the budget may be exceeded by their size. Declare it with accumulate=2 or "
                "more when planning, or set them to None between steps.",
            )

    def _tell(self, subject: str, text: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            warnings.warn(f"lowtide: {text}", stacklevel=4)

    def _is_copy(self, called: nn.Module) -> bool:
        """Whether `called` is no module that calls the model's forward by itself, but has taken it over."""
        return _FORWARD in vars(called) and (self.model is None or type(called) is type(self.model))

    def _for_copy(self, copied: nn.Module) -> Callable[..., Any]:
        """The forward of a module that was given the attributes of the model, this object among them."""
        taken_over: object = copied.__dict__[_FORWARD]
        if taken_over is not self:
            raise CannotApply(
                f"this {type(copied).__name__} is a copy of one whose forward was wrapped by another library "
                "after lowtide.optimize. Copy the model first, or use copy.deepcopy."
            )
        own = self.own
        if isinstance(own, MethodType) and own.__self__ is self.model:
            own = MethodType(own.__func__, copied)
        made = self._again_for(copied, own)
        if is_replica(copied):
            self._unplanned(
                "the model is a replica that torch.nn.DataParallel has made.",
                "Use DistributedDataParallel, or take the plan off: lowtide.remove(model).",
            )
            return made._plain(copied)
        copied.__dict__[_FORWARD] = made
        return made

    def _again_for(self, copied: nn.Module, own: Callable[..., Any] | None) -> _Route:
        made = _Route.__new__(_Route)
        made.__dict__.update(self.__dict__)
        made.__dict__.update(own=own, _model=weakref.ref(copied), _courses={}, _told=set(), _apart=set())
        made.solutions = dict(self.solutions)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> _Route:
        """For the copy of the model, which is being made."""
        copied = memo.get(id(self.model))
        if copied is None:
            raise CannotApply("the forward of a planned model cannot be copied by itself. Copy the model.")
        return self._again_for(copied, copy.deepcopy(self.own, memo))

    def __reduce__(self) -> Any:
        if self._of_layers:
            return _unpickled, ({**vars(self), "_model": None, "_courses": {}, "__signature__": None},)
        raise pickle.PicklingError(
            "a model with a plan cannot be pickled whole. Save its state_dict, or take the plan off first: "
            "lowtide.remove(model)."
        )


def _unpickled(attributes: dict[str, Any]) -> _Route:
    """What stood in for the forward of a model that was pickled, until that one's copy is called."""
    route = _Route.__new__(_Route)
    route.__dict__.update(attributes, _model=lambda: None)
    return route


def _inputs(model: nn.Module, solution: Solution | GraphSolution, of_layers: bool) -> tuple[str, ...]:
    """The circumstances that a plan was made for; a plan of layers is taken to be made here and now."""
    if isinstance(solution, GraphSolution):
        return solution.inputs
    return (*solution.chain.inputs, *circumstances(model, (), {}, with_hooks=not of_layers))


def _difference(inputs: tuple[str, ...], known: Mapping[tuple[str, ...], Any]) -> str:
    first = next(iter(known))
    return f"{', '.join(inputs) or 'none'} instead of {', '.join(first) or 'none'}"
