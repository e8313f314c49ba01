"""A dispatch mode that writes a step down while it runs on fake tensors.

It sees every op on its way to the fake kernels, and every storage when it dies. The dry run and the
capture differ in where they say an op is, and in what they do where a number is needed and not known.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lowtide.compat.autograd import in_users_function
from lowtide.compat.dispatch import TorchDispatchMode, is_plain_op, is_wrapper
from lowtide.compat.fake import DataDependentOutputException, DynamicOutputShapeException, runs_for_real
from lowtide.compat.tensors import map_tensors, storage_key, tensors_in
from lowtide.errors import BadRequest, CannotTrace
from lowtide.ir.graph import Op, Phase
from lowtide.trace.accumulation import Accumulation
from lowtide.trace.fakes import Resident, Twins
from lowtide.trace.filled_gradients import filled_in_place
from lowtide.trace.graph_builder import GraphBuilder
from lowtide.trace.known_values import Shadows
from lowtide.trace.sizes import ResultSizes
from lowtide.trace.user_lines import current_line

aten = torch.ops.aten

_NO_MEMORY = ("prim", "profiler")  # namespaces of questions about a tensor, and of marks for a profiler


@dataclass(frozen=True, slots=True)
class Spot:
    """Where in the step an op runs. `engine` says whether the autograd engine itself may be adding."""

    phase: Phase
    module: str
    call: int
    section: int
    engine: bool


class Recorder(TorchDispatchMode, ABC):
    """Writes ops into `builder`, with fakes from `twins` in place of real tensors."""

    def __init__(self, builder: GraphBuilder, twins: Twins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.builder = builder
        self.twins = twins
        self.shadows = Shadows()
        self.sizes = ResultSizes(self.shadows)
        self._accumulation = Accumulation(twins.mode)
        self._deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # What a kind of recorder decides --------------------------------------------------------------------

    @abstractmethod
    def spot(self, func: Any, args: tuple[Any, ...]) -> Spot:
        """Where the op that is being dispatched runs."""

    @abstractmethod
    def twin(self, tensor: torch.Tensor, detached: bool) -> torch.Tensor:
        """A fake in place of a real tensor that the step closes over, or detaches."""

    @abstractmethod
    def unknown_number(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The number that `func` returns, where it is not known."""

    @abstractmethod
    def unknown_size(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What `func` returns where its size depends on numbers that are not known."""

    def parts(self, whole: torch.Tensor, sizes: list[int], dim: int = 0) -> list[int]:
        """The sizes of the parts that `whole` is cut into, where it was to be cut into `sizes`."""
        return sizes

    @abstractmethod
    def resident(self, found: Resident) -> None:
        """A twin has been made of a tensor that was there before the step."""

    def recorded(self, op: Op, spot: Spot) -> None:
        """An op has been written down."""

    def died(self, value: int) -> None:
        """The storage of a value has been given back."""

    # Ops ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # a DTensor, say: what it does comes here on the tensors inside of it
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("device"), torch.device):  # may name the home of a tensor that has a twin
            kwargs["device"] = self.twins.device(kwargs["device"])
        if getattr(func, "namespace", "") in _NO_MEMORY:
            return func(*args, **kwargs)
        spot = self.spot(func, args)
        if func is aten.lift_fresh.default:  # a constant written in the user's code, made on the spot
            made = func(*args, **kwargs)
            if not self.twins.is_ours(args[0]):
                self.shadows.remember_given(made, args[0])
            return self._record(func, (), {}, made, spot)
        if spot.engine and self._accumulation.in_place(func, args, kwargs):
            func = aten.add_.Tensor
        if not all(map(self.twins.is_ours, tensors_in(args, kwargs))):
            detached = func is aten.detach.default
            args, kwargs = map_tensors(partial(self._fake, detached=detached), (args, kwargs))
        self.register_residents()
        if spot.engine and args and isinstance(args[0], torch.Tensor) and not in_users_function():
            last = self.builder.ops[-1] if self.builder.ops else None
            func = filled_in_place(func, self.builder.value_of(args[0]), last)
        if func is aten.split_with_sizes.default:
            args = (args[0], self.parts(args[0], args[1], *args[2:3]), *args[2:])
        return self._record(func, args, kwargs, self._run(func, args, kwargs), spot)

    def _fake(self, tensor: torch.Tensor, detached: bool) -> torch.Tensor:
        return tensor if self.twins.is_ours(tensor) else self.twin(tensor, detached)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The fake result of an op; where it is a matter of numbers, what the known ones make of it."""
        plain = is_plain_op(func)
        if func is aten.embedding.default:
            self._refuse_missing_row(*args[:2])
        numbers = self.shadows.compute(func, args, kwargs) if plain else None
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            return self.unknown_number(func, args) if numbers is None else self.decided(numbers)
        except DynamicOutputShapeException:
            if numbers is None and self.sizes.is_known(func, args, kwargs):
                return self.decided(self.sizes.result(func, args, kwargs))
            if numbers is None:
                return self.unknown_size(func, args, kwargs)
            like = next(tensors_in(args, kwargs))
            result = map_tensors(partial(_empty, device=like.device), self.decided(numbers))
        except Exception as error:  # of the op itself, or only of what stands for it
            if plain and runs_for_real(func, args, kwargs):
                raise CannotTrace(_fakes_fault(func, error)) from error
            raise
        if any(tensor.layout is not torch.strided for tensor in tensors_in(result)):
            raise CannotTrace(_sparse(func, self.spot(func, args)))
        if numbers is not None:
            self.shadows.pair(result, numbers)
        elif plain:
            self.shadows.follow(func, args, kwargs, result)
        return result

    def _refuse_missing_row(self, weight: torch.Tensor, indices: torch.Tensor) -> None:
        """A fake finds every row of an embedding; a longer text than a model has positions for has none."""
        row = self.shadows.largest(indices)
        if row is not None and row >= len(weight):
            raise BadRequest(
                f"the step looks up row {row} of an embedding that has {len(weight)}: {current_line()}. "
                "Is the text longer than the model has positions, or its vocabulary larger?"
            )

    def decided(self, numbers: Any) -> Any:
        """The path taken depends on numbers that are known."""
        return numbers

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, spot: Spot
    ) -> Any:
        op = self.builder.add_op(
            func,
            args,
            kwargs,
            result,
            phase=spot.phase,
            module=spot.module,
            call=spot.call,
            section=spot.section,
        )
        if op is not None:
            for tensor in tensors_in(result):
                self.watch(tensor)
                self._accumulation.made(storage_key(tensor))
            self.recorded(op, spot)
        return result

    # Storages -------------------------------------------------------------------------------------------

    def register_residents(self) -> None:
        """Values for the twins made since the last look. They were there all along."""
        while self.twins.pending:
            self.resident(self.twins.pending.pop(0))

    def add_resident(self, found: Resident) -> None:
        """A value for a twin, unless it looks at a storage that has one."""
        if self.builder.value_of(found.fake) is None:
            self.builder.add_value(found.fake, found.role, found.name, found.module)
            self.watch(found.fake)

    def watch(self, tensor: torch.Tensor) -> None:
        """Notice when the storage of `tensor` dies."""
        key = storage_key(tensor)
        if key not in self._deaths:
            self._deaths[key] = weakref.ref(tensor.untyped_storage(), partial(self._died, key))

    def alive(self) -> Iterator[tuple[torch.UntypedStorage, int]]:
        """Every storage that is alive, and its value."""
        for key, reference in list(self._deaths.items()):
            storage, value = reference(), self.builder.value_at(key)
            if storage is not None and value is not None:
                yield storage, value

    def _died(self, key: int, _: object) -> None:
        del self._deaths[key]
        value = self.builder.forget(key)
        if value is not None:
            self.died(value)


def _empty(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(number.shape, dtype=number.dtype, device=device)


def _sparse(func: Any, spot: Spot) -> str:
    where = (
        current_line() if spot.phase is Phase.FORWARD else f"in the backward of {spot.module or 'the step'}"
    )
    return (
        f"{func} makes a sparse tensor, and how much that holds depends on numbers: {where}. Use dense ones "
        "there; an embedding's gradient is dense with sparse=False."
    )


def _fakes_fault(func: Any, error: Exception) -> str:
    what = (str(error).splitlines() or [type(error).__name__])[0]
    advice = (
        f"That is a fault of PyTorch {torch.__version__}, not of the step: use another op there."
        if func.namespace in ("aten", "prims")
        else "Whoever made that op has to say what it returns, with torch.library.register_fake."
    )
    return f"the fake of {func} fails where its kernel does not ({what}): {current_line()}. {advice}"
