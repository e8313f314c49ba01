"""A dispatch mode that tells a ledger what a real run on the CPU would hold on a card.

Which tensors would be on the card? What the script moves or makes there (see `played`), and parameters that
take part in an op, unless the script says itself what it moves. Whatever an op makes of something on the
card is there too, and what takes part in it has to be: a tensor that has been left on the CPU is counted from
then on. Numbers (tensors of no dimension), indices and the source of a copy may stay where they are.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide.compat.autograd import in_backward
from lowtide.compat.dispatch import BesideCompiling, is_plain_op, schema_of
from lowtide.compat.tensors import key_of_storage, storage_key, tensors_in
from lowtide.ir.graph import short_name
from lowtide.ir.simulate import Category
from lowtide.rehearsal.kernels import KernelMemory
from lowtide.rehearsal.ledger import CardLedger
from lowtide.rehearsal.outcome import Act, Doing, Instant
from lowtide.rehearsal.training_watch import TrainingWatch
from lowtide.trace.owners import Owners, is_plain, keys_of
from lowtide.trace.user_lines import current_places, place_in_words

_NO_MEMORY = ("prim", "profiler")
# What takes tensors from both sides.
_ACROSS = frozenset(
    {"copy_", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_", "set_"}
)


class CardWatch(BesideCompiling):
    """Sees every op of this thread, and every storage when it dies."""

    def __init__(self, ledger: CardLedger, following: TrainingWatch, owners: Owners) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.following = following
        self.owners = owners
        self.told_of_device = False  # by the script: it moves tensors itself
        self._process = os.getpid()
        self._kernels = KernelMemory()
        self._here = Act.SETUP
        self._making: Category | None = None  # all that is made now is made on the card, as this
        self._leaving = False  # what is made now is made on the CPU
        self._deaths: deque[int] = deque()
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._slices: dict[int, tuple[int, int]] = {}  # of storages of which a part is on the card

    # Ops ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.bury()
        is_seen = is_plain_op(func) and func.namespace not in _NO_MEMORY and os.getpid() == self._process
        if self._leaving or not is_seen:
            return func(*args, **kwargs)
        given = [tensor for tensor in tensors_in(args, kwargs) if is_plain(tensor) and tensor.is_cpu]
        if self._making is None and not self._is_on_card(func, given):
            return func(*args, **kwargs)
        self._notice(func, given)
        if self._making is None:
            self._take_along(func, given)
        result = func(*args, **kwargs)
        self.bury()  # what died meanwhile may have lain where something new lies now
        made = [tensor for tensor in tensors_in(result) if is_plain(tensor) and tensor.is_cpu]
        self._made(func, made, given)
        if self._making is None:
            self._kernel(func, args, kwargs, result)
        return result

    def _is_on_card(self, func: Any, given: Sequence[torch.Tensor]) -> bool:
        found = False
        for tensor in given:
            if self.knows(tensor):
                found = True
            elif not self.told_of_device and isinstance(tensor, nn.Parameter):
                self.adopt(tensor, Category.PARAMETERS, f"parameter {tuple(tensor.shape)}", func)
                if tensor.grad is not None and is_plain(tensor.grad) and not self.knows(tensor.grad):
                    self.adopt(tensor.grad, Category.GRADIENTS, "a gradient", func)
                found = True
        return found

    def _notice(self, func: Any, given: Sequence[torch.Tensor]) -> None:
        """Look which act it is now."""
        following = self.following
        if len(given) > 1:  # what takes one tensor tells nothing: data is moved, a model is copied
            recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
            following.quiet = not recorded
        if not (following.training or self._making) and _trains(func, given):
            following.training = following.act() is not Act.VALIDATION
        if following.act() is not self._here:
            self.turn()

    def turn(self) -> None:
        """Another act may have begun."""
        self.bury()
        act = self.following.act()
        if act is not self._here:
            self.ledger.settle()
            self.owners.look_around()
            self._here = act
            self.ledger.enter(act)

    def _take_along(self, func: Any, given: Sequence[torch.Tensor]) -> None:
        """What takes part in an op on the card is on the card. In a backward nothing comes from elsewhere."""
        backward = in_backward()
        if short_name(str(func)) in _ACROSS and not backward:
            return
        category = Category.TEMPORARIES if backward else Category.BATCH
        for tensor in given:
            if tensor.dim() and not self.knows(tensor):
                self.adopt(tensor, category, f"{category} {tuple(tensor.shape)}", func)

    def _made(self, func: Any, made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        hosts = {storage_key(tensor) for tensor in given} if made else set()
        for tensor in made:
            key = storage_key(tensor)
            if key in self.ledger or (key in hosts and self._making is None):
                continue
            is_kept = torch.is_grad_enabled() and self.following.doing() is Doing.FORWARD
            category = self._making or (Category.ACTIVATIONS if is_kept else Category.TEMPORARIES)
            self._take(tensor.untyped_storage(), category, self.moment(func))

    def _kernel(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        backward = self.following.doing() is Doing.BACKWARD
        workspace, kept = self._kernels.taken(func, args, kwargs, result, backward=backward)
        for count in kept:
            moment = self.moment(func)
            self.ledger.take(object(), count, Category.WORKSPACE, moment, "workspaces that cuBLAS keeps")
        if workspace:
            self.ledger.scratch(workspace, self.moment(func))

    def moment(self, func: object) -> Instant:
        """Now, in this op."""
        following = self.following
        op = str(func).removesuffix(".default")
        innermost, own = map(place_in_words, current_places())
        return Instant(self._here, following.steps, following.doing(), op, own, innermost)

    # Tensors --------------------------------------------------------------------------------------------

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the card."""
        key = storage_key(tensor)
        if key not in self.ledger:
            return False
        part = self._slices.get(key)
        return part is None or _within(_extent(tensor), part)

    def adopt(self, tensor: torch.Tensor, category: Category, name: str, func: object = "before") -> None:
        """A tensor is on the card from now on: its own elements, where it is a slice of something larger.

        Of such a thing one slice is there at a time, the latest: it stands for the copy that is made of it.
        """
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        count = tensor.numel() * tensor.element_size()
        if not count:
            return
        self.ledger.give_back(key)
        self._slices.pop(key, None)
        if count < storage.nbytes():
            self._slices[key] = _extent(tensor)
        self._take(storage, category, self.moment(func), name, min(count, storage.nbytes()))

    @contextmanager
    def making(self, category: Category) -> Iterator[None]:
        """Whatever is made while the block runs is made on the card."""
        before, self._making = self._making, category
        try:
            yield
        finally:
            self._making = before

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Whatever is made while the block runs is made on the CPU."""
        before, self._leaving = self._leaving, True
        try:
            yield
        finally:
            self._leaving = before

    def heard_of_device(self) -> None:
        """The script says itself what is on the card: nothing that was taken to be there is."""
        if not self.told_of_device:
            self.told_of_device = True
            self._watched.clear()
            self._slices.clear()
            self._deaths.clear()
            self._kernels = KernelMemory()
            self._here = Act.SETUP
            self.ledger.restart()

    def label(self) -> None:
        """Tell the ledger what is held for what, as far as modules and optimizers know."""
        for key, category, name, _ in keys_of(self.owners.owned()):
            self.ledger.label(key, category, name)

    def adopt_trained(self) -> None:
        """What optimizers work on is on the card already."""
        for tensor, category, name in self.owners.trained():
            if is_plain(tensor) and tensor.dim() and not self.knows(tensor):
                self.adopt(tensor, category, name)

    def bury(self) -> None:
        """Give back what has died."""
        while self._deaths:
            self.ledger.give_back(self._deaths.popleft())

    def _take(
        self,
        storage: torch.UntypedStorage,
        category: Category,
        moment: Instant,
        name: str = "",
        count: int | None = None,
    ) -> None:
        key = key_of_storage(storage)
        self._watched[key] = weakref.ref(storage, partial(_died, weakref.ref(self), key))
        self.ledger.take(key, storage.nbytes() if count is None else count, category, moment, name)

    def died(self, key: int) -> None:
        """A storage is gone. This may be called anywhere: what follows from it is done before the next op."""
        if self._watched.pop(key, None) is not None:
            self._slices.pop(key, None)
            self._deaths.append(key)


def _trains(func: Any, given: Sequence[torch.Tensor]) -> bool:
    """Whether an op is one of a step: of a forward that can go back, or of one that was compiled.

    That runs with gradients off, and so does what fills parameters before a training: in place, or alone.
    """
    if in_backward():
        return True
    takes_part = len(given) > 1 and any(tensor.requires_grad for tensor in given)
    return takes_part and (torch.is_grad_enabled() or not schema_of(func).is_mutable)


def _died(watch: Callable[[], CardWatch | None], key: int, _: object) -> None:
    found = watch()
    if found is not None:
        found.died(key)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    first = int(tensor.storage_offset())
    last = first + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
