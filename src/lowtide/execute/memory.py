"""Where the values of a step get their memory: three ways, and what each costs.

naive   every value has memory of its own, to the end of the step
pool    memory is taken when a value is made and recycled when it is dead
static  one arena, allocated once; where each value lives in it was planned before the run

All hand out places: a storage, and how many bytes into it a value begins.
"""

from __future__ import annotations

import bisect
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

import torch

from lowtide.arena.buffers import Birth
from lowtide.arena.layout import Layout
from lowtide.compat.tensors import key_of_storage, with_signs
from lowtide.ir.graph import Signs, Tensor
from lowtide.ir.validate import item_bytes

_WASTEFUL = 2  # a block that is more than so many times too large is left for others


class Memory(StrEnum):
    """The ways to get memory. `DIRECT` is PyTorch's own: every kernel takes what it returns, from the
    device's allocator, and gives it back when the value is dead."""

    NAIVE = "naive"
    POOL = "pool"
    STATIC = "static"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a value begins."""

    storage: torch.UntypedStorage
    offset_bytes: int = 0

    def is_at(self, other: Address) -> bool:
        """Whether both are the same address."""
        here = self.storage.data_ptr() + self.offset_bytes
        return here == other.storage.data_ptr() + other.offset_bytes

    def view(self, tensor: Tensor) -> torch.Tensor:
        """The value that begins here, seen as `tensor` says."""
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        offset = self.offset_bytes // item_bytes(tensor.dtype) + tensor.offset
        empty = torch.empty(0, dtype=dtype, device=self.storage.device)
        found = empty.set_(self.storage, offset, tensor.shape, tensor.stride)
        conjugate = tensor.signs in (Signs.CONJUGATE, Signs.BOTH)
        return with_signs(found, conjugate, negative=tensor.signs in (Signs.NEGATIVE, Signs.BOTH))


@dataclass
class Tally:
    """What handing out memory took.

    `requests` counts values that asked, `allocations` the times the device's allocator was asked on their
    behalf, `seconds` is the time for both. At the worst moment `wasted_bytes` were part of blocks larger than
    what lay in them, and `fragmented_bytes` lay free but in pieces too small for what was asked.
    """

    requests: int = 0
    allocations: int = 0
    seconds: float = 0.0
    wasted_bytes: int = 0
    fragmented_bytes: int = 0


class AddressSource(ABC):
    """Hands out places and takes them back, and keeps count."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tally = Tally()
        self.kept_bytes = 0  # between steps, whether anything lies in it or not

    def take(self, birth: Birth, size: int) -> Address:
        """Memory for a value that is about to be made."""
        start = time.perf_counter()
        place = self._take(birth, size)
        self.tally.seconds += time.perf_counter() - start
        self.tally.requests += 1
        return place

    def give(self, place: Address) -> None:
        """A value is dead."""
        start = time.perf_counter()
        self._give(place)
        self.tally.seconds += time.perf_counter() - start

    @abstractmethod
    def _take(self, birth: Birth, size: int) -> Address: ...

    def _give(self, place: Address) -> None:  # noqa: B027 - most have nothing to recycle
        pass

    def new_step(self) -> None:
        """A step begins: counts start again, and what the last one left behind may go."""
        self.tally = Tally()

    def _allocate(self, size: int) -> torch.UntypedStorage:
        self.tally.allocations += 1
        return torch.empty(size, dtype=torch.uint8, device=self.device).untyped_storage()


class Naive(AddressSource):
    """Memory of its own for every value, held to the end of the step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._held: list[Address] = []

    def _take(self, birth: Birth, size: int) -> Address:
        place = Address(self._allocate(size))
        self._held.append(place)
        return place

    def new_step(self) -> None:
        """Let go of what the last step made."""
        super().new_step()
        self._held.clear()


class Pool(AddressSource):
    """Blocks that are recycled: the smallest free one that is large enough, but not far too large.

    Blocks are never returned to the device's allocator, nor split or merged.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._free: list[torch.UntypedStorage] = []  # smallest first
        self._used: dict[int, tuple[Address, int]] = {}  # blocks in use, by identity, and the bytes in them
        self._wasted_bytes = 0

    def _take(self, birth: Birth, size: int) -> Address:
        position = bisect.bisect_left(self._free, size, key=torch.UntypedStorage.nbytes)
        if position < len(self._free) and self._free[position].nbytes() <= size * _WASTEFUL:
            block = self._free.pop(position)
        else:
            idle = sum(map(torch.UntypedStorage.nbytes, self._free))
            if idle >= size:
                self.tally.fragmented_bytes = max(self.tally.fragmented_bytes, idle)
            block = self._allocate(size)
            self.kept_bytes += size
        place = Address(block)
        self._used[key_of_storage(block)] = place, size
        self._wasted_bytes += block.nbytes() - size
        self.tally.wasted_bytes = max(self.tally.wasted_bytes, self._wasted_bytes)
        return place

    def new_step(self) -> None:
        """What outlived the last step is recycled in this one."""
        super().new_step()
        for place, _ in list(self._used.values()):
            self._give(place)

    def _give(self, place: Address) -> None:
        if key_of_storage(place.storage) not in self._used:  # a kernel's own, which has no block
            return
        _, size = self._used.pop(key_of_storage(place.storage))
        self._wasted_bytes -= place.storage.nbytes() - size
        bisect.insort(self._free, place.storage, key=torch.UntypedStorage.nbytes)


class Direct(AddressSource):
    """Nothing to hand out: kernels return what they took from the device's allocator."""

    def _take(self, birth: Birth, size: int) -> Address:
        raise AssertionError("kernels take memory themselves")


class Static(AddressSource):
    """One arena, in which every value has its place before anything runs."""

    def __init__(self, device: torch.device, layout: Layout) -> None:
        super().__init__(device)
        self.arena = self._allocate(layout.arena_bytes)
        self.kept_bytes = layout.arena_bytes
        self._layout = layout

    def _take(self, birth: Birth, size: int) -> Address:
        return Address(self.arena, self._layout.offset_of(birth))
