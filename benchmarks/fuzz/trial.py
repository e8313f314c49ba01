"""One recipe, one way, one budget: trained plain and planned from equal states, and compared."""

from __future__ import annotations

import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import lowtide
from benchmarks.families.equality import (
    CLOSE,
    TO_THE_BIT,
    Outcome,
    compared,
    distances,
    draws,
    seed_everything,
)
from benchmarks.fuzz.recipe import AUTOCAST, Recipe
from benchmarks.fuzz.subjects import Subject, built
from benchmarks.fuzz.ways import BY_LAYERS, BYTES, WAYS, Planned, as_aot_eager, bytes_of, plain, step_of
from lowtide.aot.sections import compiling
from lowtide.compat.composites import as_they_run
from lowtide.compat.tensors import tensors_in

RIGHT, REFUSED, INFEASIBLE = "right", "refused", "infeasible"
WRONG, CRASH, OVER, NO_SUBJECT = "wrong", "crash", "over budget", "no subject"
OUTCOMES = (RIGHT, INFEASIBLE, REFUSED, WRONG, OVER, CRASH, NO_SUBJECT)
BAD = frozenset({WRONG, OVER, CRASH})

_STEPS = 2  # that are compared one by one; a third is measured, and a fourth is without the plan
_RATE = 0.01
_MOVES = 3  # of the weights, to see what is nothing but rounding
_ROUNDINGS = 8  # of bfloat16, which is what docs/limits.md allows under autocast
_UNPLANNED = ("may exceed the budget", "the peak may be another than the promised one")
_CONSTANT_BYTES = 8  # a number that new code holds on to, for each frame that Dynamo compiles
_LOCAL = re.compile(r"/[^\"\s]*/(?=(site-packages|src|benchmarks|lowtide)/)")
_FRAMES = 6

Row = dict[str, Any]


def tried(recipe: Recipe, way: str, budget: str) -> Row:
    """What came of it; nothing is raised but what ends the process."""
    started = time.process_time()
    row: Row = {"seed": recipe.seed, "way": way, "budget": budget, "recipe": str(recipe)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        row |= _outcome(recipe, way, budget)
    said = [str(each.message) for each in told if str(each.message).startswith("lowtide:")]
    if row["outcome"] == OVER and any(words in text for words in _UNPLANNED for text in said):
        row |= {"outcome": RIGHT, "note": "over the budget, as a warning said"}
    return row | {"told": said[:3], "seconds": round(time.process_time() - started, 2)}


def _outcome(recipe: Recipe, way: str, budget: str) -> Row:
    try:
        expected, deterministic, plain_bytes = _plain(recipe)
    except Exception as error:  # noqa: BLE001  a random module may raise anything
        return {"outcome": NO_SUBJECT, "reason": _message(error)}
    asked = bytes_of(budget, plain_bytes) if way == "backend" or budget == BYTES else budget
    close = _close(recipe, deterministic)
    row = _within_budget(recipe, way, asked, expected, close)
    if way == "backend" and row["outcome"] in BAD:
        row = _as_compiled(recipe, row, asked, expected, close)
    return row


def _within_budget(recipe: Recipe, way: str, asked: str | int, expected: list[Outcome], close: float) -> Row:
    """A row for the budget that was asked for, or for the least that is said to be possible.

    Where that is said of one graph, and then of the step with all of its graphs, it is the latter.
    """
    row = _planned(recipe, way, asked, expected, close)
    while row["outcome"] == INFEASIBLE and (isinstance(asked, str) or row["least_bytes"] > asked):
        asked = int(row["least_bytes"])
        row = _planned(recipe, way, asked, expected, close) | {"note": "below the least, so the least"}
    return row


def _as_compiled(recipe: Recipe, row: Row, asked: str | int, expected: list[Outcome], close: float) -> Row:
    """The row of what torch.compile makes different by itself: held against its own `aot_eager`.

    Only where that differs from eager too, or fails. What stays different then is lowtide's.
    """
    torch.compiler.reset()
    subject = built(recipe)
    try:
        compiled = _Training(subject, as_aot_eager(subject)).run(to_measure=False)
    except Exception as error:  # noqa: BLE001  it fails for stock torch.compile as well, maybe alike
        fails_alike = row["outcome"] == CRASH and _first_line(_raised(error)) == _first_line(row)
        return {**row, "outcome": NO_SUBJECT, "note": "aot_eager fails alike"} if fails_alike else row
    own = _difference(compiled, expected, close)
    if own is None:
        return row
    wanted = [_without_zeros(mine, eager) for mine, eager in zip(compiled, expected, strict=True)]
    held = _within_budget(recipe, "backend", asked, wanted, close)
    return held | {"note": f"held against aot_eager, which differs from eager: {own}"}


def _without_zeros(compiled: Outcome, eager: Outcome) -> Outcome:
    """None for gradients that eager has none of, which `aot_eager` makes of zeros and lowtide does not."""
    gradients = {
        name: None if eager.gradients.get(name) is None and not _is_any(gradient) else gradient
        for name, gradient in compiled.gradients.items()
    }
    return replace(compiled, gradients=gradients)


def _is_any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _first_line(row: Row) -> str:
    return str(row["reason"]).partition("\n")[0]


def _planned(recipe: Recipe, way: str, budget: str | int, expected: list[Outcome], close: float) -> Row:
    """The same, for a budget, of what plain steps leave behind."""
    torch.compiler.reset()
    counters.clear()
    subject = built(recipe)
    try:
        before = _state(subject)
        planned = WAYS[way](subject, budget)
        if (changed := _changed(before, _state(subject))) is not None:
            return {"outcome": WRONG, "reason": f"planning changed {changed}"}
        training = _Training(subject, planned)
        found = training.run()
    except Exception as error:  # noqa: BLE001  what it raises is the answer
        return _raised(error)
    row: Row = {"how": training.how}
    shown = _all_of_it if planned.gives_output else _of_model
    found, wanted = [*map(shown, found)], [*map(shown, expected)]
    if (wrong := _difference(found, wanted, close)) is not None:
        # the compiled backend is held against aot_eager itself, which under autocast rounds otherwise too
        exactly = training.how == BY_LAYERS or (way == "backend" and not close)
        spreads = None if exactly else _spreads(recipe, expected, close)
        if spreads is None or _difference(found, wanted, close or CLOSE, spreads) is not None:
            return row | {"outcome": WRONG, "reason": wrong}
        row |= {"note": f"another rounding is as far from plain: {wrong}"}
    if (left := _left_behind(subject)) is not None:
        return row | {"outcome": WRONG, "reason": left}
    return row | training.memory()


def _plain(recipe: Recipe) -> tuple[list[Outcome], bool, int]:
    """The outcomes of plain steps, whether they are the same again, and their peak."""
    subject = built(recipe)
    training = _Training(subject, plain(subject))
    first = training.run()
    again = built(recipe)
    second = _Training(again, plain(again)).run(to_measure=False)
    same = _difference(second, first, 0.0) is None
    return first, same, training.resident_bytes + training.growth_bytes


def _spreads(recipe: Recipe, expected: list[Outcome], close: float) -> list[dict[str, float]] | None:
    """How far from plain steps others may be, by another rounding alone; None where no other is to be.

    Another rounding is excused under autocast, and where AOTAutograd alone has captured the steps and rounds
    otherwise. It makes every op a pure function, whose result is laid out anew: gates of a GRUCell, which
    eager PyTorch computes in place in parts of one tensor, are then taken together by kernels that round
    otherwise. A number that is nothing but rounding, as the gradient of a bias before a norm, is then
    another one altogether: how far it may be is seen where weights are moved by as much.
    """
    captured: list[dict[str, float]] | None = [{} for _ in expected]
    if not close:
        # taken apart as running does, some steps fail; as tracing does, some forget dropouts
        ways = (_spreads_of_captured(recipe, expected, apart) for apart in (as_they_run, nullcontext))
        captured = next((spreads for spreads in ways if spreads is not None), None)
    if captured is None:
        return None
    moved = (_spreads_of_moved(recipe, expected, seed) for seed in range(_MOVES))
    return [_widest(spreads) for spreads in zip(captured, *moved, strict=True)]


def _widest(spreads: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(spread.get(name, 0.0) for spread in spreads) for name in set().union(*spreads)}


def _spreads_of_moved(recipe: Recipe, expected: list[Outcome], seed: int) -> list[dict[str, float]]:
    """How far from plain steps those are whose weights begin by one rounding elsewhere."""
    subject = built(recipe)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in subject.model.parameters():
            eps = torch.finfo(torch.bfloat16 if recipe.kind == AUTOCAST else weight.dtype).eps
            up_or_down = torch.randint(2, weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + eps * up_or_down)
    return [*map(distances, _Training(subject, plain(subject)).run(to_measure=False), expected)]


def _spreads_of_captured(
    recipe: Recipe, expected: list[Outcome], apart: Callable[[], AbstractContextManager[None]]
) -> list[dict[str, float]] | None:
    """How far from plain steps those of `torch.compile(backend="aot_eager")` are, if they are near at all."""
    torch.compiler.reset()
    subject = built(recipe)
    step = step_of(subject, torch.compile(subject.model, backend="aot_eager", dynamic=False))
    try:
        with compiling(), apart():  # by itself it fails at a BatchNorm of transposed places
            found = _Training(subject, replace(plain(subject), step=step)).run(to_measure=False)
    except Exception:  # noqa: BLE001  it may not be able to, and then it tells nothing
        return None
    if any(
        mine.gradients.keys() != other.gradients.keys() for mine, other in zip(found, expected, strict=True)
    ):
        return None
    found = [_without_zeros(mine, eager) for mine, eager in zip(found, expected, strict=True)]
    spreads = [*map(distances, found, expected)]
    is_near = all(spread["the loss"] < CLOSE for spread in spreads)
    differs = any(any(spread.values()) for spread in spreads)
    return spreads if is_near and differs else None


class _Training:
    """Some steps of one subject."""

    def __init__(self, subject: Subject, planned: Planned) -> None:
        self.subject, self.planned = subject, planned
        self.resident_bytes = _bytes_of(subject)
        self.growth_bytes = 0
        self.how = ""

    def run(self, to_measure: bool = True) -> list[Outcome]:
        """What each step leaves behind; the last is run after the plan was taken off."""
        seed_everything()
        outcomes = [self._stepped(*self._step()) for _ in range(_STEPS)]
        if to_measure:
            self.growth_bytes, outcome = self._measured()
        else:
            outcome = self._stepped(*self._step())
        self.promise, self.how = self.planned.promise(), self.planned.how()
        self.planned.take_off()
        last = plain(self.subject).step
        self._cleared()
        return [*outcomes, outcome, self._stepped(*last())]

    def memory(self) -> Row:
        """Whether the peak was as promised."""
        promise = self.promise
        if promise is None:
            return {"outcome": RIGHT}
        before = self.resident_bytes if promise.resident_bytes is None else promise.resident_bytes
        measured = before + self.growth_bytes
        row = {"measured_bytes": measured, "allowed_bytes": promise.allowed_bytes}
        if measured <= promise.allowed_bytes:
            return row | {"outcome": RIGHT}
        return row | {
            "outcome": OVER,
            "reason": f"{self.how}: over by {measured - promise.allowed_bytes} bytes",
        }

    def _step(self) -> tuple[Tensor, Any]:
        self._cleared()
        return self.planned.step()

    def _measured(self) -> tuple[int, Outcome]:
        results: list[tuple[Tensor, Any]] = []
        self._cleared()
        frames = counters["frames"]["total"]
        reading = lowtide.measure(lambda: results.append(self.planned.step()), device="cpu")
        compiled = counters["frames"]["total"] - frames
        if not compiled:
            return reading.growth_bytes, self._stepped(*results.pop())
        growth_bytes = _peak_beside_random_states(reading.timeline) - reading.timeline[0]
        return growth_bytes - compiled * _CONSTANT_BYTES, self._stepped(*results.pop())

    def _cleared(self) -> None:
        for leaf in (*self.subject.model.parameters(), *self.subject.batch):
            leaf.grad = None

    def _stepped(self, loss: Tensor, output: Any) -> Outcome:
        """What the step left behind; the parameters have been updated."""
        model = self.subject.model
        gradients = {name: _copied(parameter.grad) for name, parameter in model.named_parameters()}
        for number, tensor in enumerate(self.subject.batch):
            gradients |= {f"input {number}": _copied(tensor.grad), f"batch {number}": _copied(tensor)}
        for number, tensor in enumerate(tensors_in(output)):
            gradients[f"output {number}"] = _copied(tensor)
        gradients |= {name: _copied(tensor) for name, tensor in _attributes(self.subject)}
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=_RATE)
        return Outcome(loss.detach().clone(), gradients, buffers, draws(loss.device))


def _peak_beside_random_states(timeline: Sequence[int]) -> int:
    """The peak of a step in which Dynamo compiled, without the copies of the random state that it makes.

    Its code counts the steps, say, and is compiled for each. A GPU holds none of these copies.
    """
    copy_bytes, copies, peak_bytes = torch.get_rng_state().nbytes, 0, timeline[0]
    for before, now in pairwise(timeline):
        if now - before == copy_bytes:
            copies += 1
        elif before - now == copy_bytes and copies:
            copies -= 1
        peak_bytes = max(peak_bytes, now - copies * copy_bytes)
    return peak_bytes


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _attributes(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules have as plain attributes."""
    for path, module in subject.model.named_modules():
        for name, thing in vars(module).items():
            if isinstance(thing, Tensor):
                yield f"attribute {path}.{name}", thing


def _all_of_it(outcome: Outcome) -> Outcome:
    return outcome


def _of_model(outcome: Outcome) -> Outcome:
    kept = {
        name: tensor
        for name, tensor in outcome.gradients.items()
        if not name.startswith(("output", "attribute", "input"))
    }
    return replace(outcome, gradients=kept)


def _bytes_of(subject: Subject) -> int:
    """What is there before a step."""
    model = subject.model
    held = (*model.parameters(), *model.buffers(), *subject.batch, *subject.targets)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
    return sum(storages.values())


# What is compared ---------------------------------------------------------------------------------------


def _close(recipe: Recipe, deterministic: bool) -> float:
    if recipe.kind == AUTOCAST:
        return _ROUNDINGS * torch.finfo(torch.bfloat16).eps
    return 0.0 if deterministic else CLOSE


def _difference(
    found: list[Outcome],
    expected: list[Outcome],
    close: float,
    spreads: Sequence[Mapping[str, float]] = ({},) * (_STEPS + 2),
) -> str | None:
    """Where the first step differs that does; with `spreads`, by more than a few times as much."""
    for step, (mine, other, spread) in enumerate(zip(found, expected, spreads, strict=True)):
        if others := sorted(set(mine.gradients) ^ set(other.gradients)):
            return f"step {step}: other outputs or attributes: {others}"
        same = compared(mine, other, close, spread)
        if same.startswith("wrong") or (close == 0 and same != TO_THE_BIT):
            return f"step {step}: {same}"
    return None


def _state(subject: Subject) -> dict[str, Any]:
    """Everything that planning should leave alone."""
    model = subject.model
    named = (*model.named_parameters(), *model.named_buffers(), *_attributes(subject))
    tensors = {name: _copied(tensor) for name, tensor in named}
    tensors |= {f"gradient of {name}": _copied(leaf.grad) for name, leaf in model.named_parameters()}
    for number, tensor in enumerate(subject.batch):
        tensors |= {f"batch {number}": _copied(tensor), f"gradient of batch {number}": _copied(tensor.grad)}
    numpy_state = import_module("numpy").random.get_state()
    streams = {"random numbers of python": random.getstate(), "of numpy": (*map(str, numpy_state),)}
    return {**tensors, "random numbers of torch": torch.get_rng_state(), **streams}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    for name in before.keys() | after.keys():
        one, other = before.get(name), after.get(name)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            same = one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        else:
            same = one is other is None or (type(one) is type(other) and one == other)
        if not same:
            return name
    return None


def _left_behind(subject: Subject) -> str | None:
    """What is still there of a plan that was taken off."""
    for path, module in subject.model.named_modules():
        if "forward" in vars(module):
            return f"a forward is left on {path or 'the model'}"
    fresh = dict(built(subject.model.recipe).model.named_modules())  # type: ignore[arg-type]
    for path, module in subject.model.named_modules():
        if _hooks(module) != _hooks(fresh[path]):
            return f"hooks are left on {path or 'the model'}"
    return None


def _hooks(module: torch.nn.Module) -> dict[str, int]:
    return {name: len(hooks) for name, hooks in vars(module).items() if name.endswith("_hooks")}


# What was raised ----------------------------------------------------------------------------------------


def _raised(error: Exception) -> Row:
    """Refused on purpose, below what is possible, or a crash."""
    meant = next((each for each in _chain(error) if isinstance(each, lowtide.LowtideError)), None)
    if isinstance(meant, lowtide.InfeasibleBudget):
        return {"outcome": INFEASIBLE, "least_bytes": meant.least_bytes, "reason": _message(meant)}
    reason = f"{type(meant or error).__name__}: {_message(meant or error)}"
    if meant is not None:
        return {"outcome": REFUSED, "reason": reason}
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = [f"{_LOCAL.sub('', frame.filename)}:{frame.lineno}" for frame in frames]
    return {"outcome": CRASH, "reason": reason, "where": where}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was made from: Dynamo wraps what a backend raises."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        yield following
        seen.append(following)
        following = getattr(following, "inner_exception", None) or following.__cause__


def _message(error: BaseException) -> str:
    return _LOCAL.sub("", str(error))[:600]
