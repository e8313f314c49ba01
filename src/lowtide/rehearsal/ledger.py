"""What is on the card: every allocation and free, replayed by the rules of CUDA's caching allocator.

Nothing here knows torch. What is held has a key; what it is held for may become known later than that it is
held (a gradient is one once a parameter has it), so a peak is looked at when something is about to be freed:
until then what is held is what was held at the peak. However long a training is, what is remembered of it is
of a fixed size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from lowtide.ir.cuda_allocator import CachedBlock, CachingAllocator, OutOfReserve, Reserve
from lowtide.ir.simulate import CATEGORIES, Category
from lowtide.rehearsal.outcome import Act, ActPeak, Glimpse, Holder, Instant, Shortfall

_MOST_GLIMPSES = 2_048  # more than a picture can show
_MOST_HOLDERS = 12
_COLUMN = {category: column for column, category in enumerate(CATEGORIES)}


class CappedReplay:
    """One allocator under a cap. What there is no room for is held all the same, and noted."""

    def __init__(self, allowed_bytes: int, *, expandable: bool) -> None:
        self._allowed_bytes = allowed_bytes
        self.allocator = CachingAllocator(expandable=expandable, allowed_bytes=allowed_bytes)
        self.refusals = 0

    def take(self, count: int) -> tuple[CachedBlock, Reserve | None]:
        """Hold so many bytes; and what was held where there was no room for them.

        The error itself is not kept: it would keep alive, by its frames, what an op has made.
        """
        try:
            return self.allocator.allocate(count), None
        except OutOfReserve as error:
            refusal = Reserve(self.allocator.allocated_bytes, error.reserved_bytes)
        self.refusals += 1
        self.allocator.allowed_bytes = None
        block = self.allocator.allocate(count)
        self.allocator.allowed_bytes = self._allowed_bytes
        return block, refusal


@dataclass(slots=True)
class _Claim:
    """What somebody holds: in the replay that counts, and in the other one."""

    blocks: tuple[CachedBlock, CachedBlock]
    category: Category
    name: str


@dataclass(slots=True)
class _ActRecord:
    """What is known of an act so far. `stack` is told of the peak, unless it is `unseen` yet."""

    act: Act
    times: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    moment: Instant | None = None
    stack: tuple[int, ...] = ()
    unseen: bool = False
    shortfalls: int = 0


class CardLedger:
    """Everything that is on a card, and the peaks of every act.

    `look` is called before a peak is told of: it says what things are held for, by `label`.
    """

    def __init__(self, allowed_bytes: int, *, expandable: bool, look: Callable[[], None]) -> None:
        self._allowed_bytes = allowed_bytes
        self._expandable = expandable
        self._look = look
        self.restart()

    def restart(self) -> None:
        """Forget everything: nothing that was seen was on the card."""
        self.replay = CappedReplay(self._allowed_bytes, expandable=self._expandable)
        self.other = CappedReplay(self._allowed_bytes, expandable=not self._expandable)
        self.shortfall: Shortfall | None = None
        self._claims: dict[Hashable, _Claim] = {}
        self._stack = [0] * len(CATEGORIES)
        self._glimpses = Glimpses()
        self._records = {act: _ActRecord(act) for act in Act}
        self._record = self._records[Act.SETUP]
        self._interrupted = Act.SETUP
        self.enter(Act.SETUP)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._claims

    # What happens ---------------------------------------------------------------------------------------

    def enter(self, act: Act) -> None:
        """Another act goes on from here. It holds what is there.

        Where there was no room for the one before, what is cached would not be there either.
        """
        self.settle()
        for replay in (self.replay, self.other):
            if replay.allocator.reserved_bytes > self._allowed_bytes:
                replay.allocator.empty_cache()
        goes_on = self._record.act is Act.SAVING and act is self._interrupted  # a file was saved in between
        self._interrupted = self._record.act
        record = self._record = self._records[act]
        record.times += not goes_on
        allocator = self.replay.allocator
        record.reserved_bytes = max(record.reserved_bytes, allocator.reserved_bytes)
        if allocator.allocated_bytes > record.allocated_bytes:
            record.allocated_bytes, record.moment = allocator.allocated_bytes, None
            record.unseen = True

    def take(self, key: Hashable, count: int, category: Category, moment: Instant, name: str = "") -> None:
        """Something new is on the card."""
        if not count:
            return
        block, refusal = self.replay.take(count)
        if refusal is not None:
            self._record.shortfalls += 1
            self.shortfall = self.shortfall or self._told(refusal, count, moment)
        self._claims[key] = _Claim((block, self.other.take(count)[0]), category, name or moment.maker)
        self._stack[_COLUMN[category]] += block.size
        self._seen(moment)

    def give_back(self, key: Hashable) -> None:
        """Something is no longer there."""
        claim = self._claims.get(key)
        if claim is None:
            return
        self.settle()
        claim = self._claims.pop(key)
        self._stack[_COLUMN[claim.category]] -= claim.blocks[0].size
        for replay, block in zip((self.replay, self.other), claim.blocks, strict=True):
            replay.allocator.release(block)

    def scratch(self, count: int, moment: Instant) -> None:
        """A kernel takes so much while it runs."""
        if count:
            key = object()
            self.take(key, count, Category.WORKSPACE, moment, moment.op)
            self.give_back(key)

    def label(self, key: Hashable, category: Category, name: str) -> None:
        """It has become known what something is held for, and its name."""
        claim = self._claims.get(key)
        if claim is None or (claim.category, claim.name) == (category, name):
            return
        self._stack[_COLUMN[claim.category]] -= claim.blocks[0].size
        self._stack[_COLUMN[category]] += claim.blocks[0].size
        claim.category, claim.name = category, name

    def empty_cache(self) -> None:
        """What is cached goes back to the device."""
        self.replay.allocator.empty_cache()
        self.other.allocator.empty_cache()

    def settle(self) -> None:
        """Look at the peak while what was held then is still held."""
        if self._record.unseen:
            self._look()
            self._record.stack, self._record.unseen = tuple(self._stack), False

    # What is known --------------------------------------------------------------------------------------

    def peaks(self) -> Iterator[ActPeak]:
        """The acts that there were, in the order in which a training has them."""
        self.settle()
        for record in self._records.values():
            if record.allocated_bytes:
                yield ActPeak(
                    act=record.act,
                    times=record.times,
                    allocated_bytes=record.allocated_bytes,
                    reserved_bytes=record.reserved_bytes,
                    moment=record.moment,
                    held=dict(zip(CATEGORIES, record.stack, strict=True)),
                    fits=not record.shortfalls and record.allocated_bytes <= self._allowed_bytes,
                )

    def glimpses(self) -> tuple[Glimpse, ...]:
        """The timeline, as coarse as it has become."""
        return self._glimpses.all()

    def _seen(self, moment: Instant) -> None:
        allocator, record = self.replay.allocator, self._record
        record.reserved_bytes = max(record.reserved_bytes, allocator.reserved_bytes)
        if allocator.allocated_bytes > record.allocated_bytes:
            record.allocated_bytes, record.moment, record.unseen = allocator.allocated_bytes, moment, True
        self._glimpses.add(record.act, allocator.allocated_bytes, allocator.reserved_bytes, self._stack)

    def _told(self, refusal: Reserve, count: int, moment: Instant) -> Shortfall:
        """What is held where there is no room for so much more."""
        self._look()
        held = dict(zip(CATEGORIES, self._stack, strict=True))
        allocated_bytes, reserved_bytes = refusal.allocated_bytes, refusal.reserved_bytes
        return Shortfall(moment, count, allocated_bytes, reserved_bytes, held, self._holders())

    def _holders(self) -> tuple[Holder, ...]:
        found: defaultdict[tuple[Category, str], list[int]] = defaultdict(list)
        for claim in self._claims.values():
            found[claim.category, claim.name].append(claim.blocks[0].size)
        holders = [Holder(*who, sum(sizes), len(sizes)) for who, sizes in found.items()]
        return tuple(sorted(holders, key=lambda holder: (-holder.bytes, holder.name))[:_MOST_HOLDERS])


class Glimpses:
    """A timeline that never gets long: when it is full, neighbours become one, told by the fuller one."""

    def __init__(self) -> None:
        self._all: list[Glimpse] = []
        self._each = 1  # events in one
        self._count = 0  # in the last one

    def add(self, act: Act, allocated_bytes: int, reserved_bytes: int, stack: list[int]) -> None:
        """What is held now."""
        if self._all and self._count < self._each:
            self._count += 1
            if allocated_bytes > self._all[-1].allocated_bytes:
                self._all[-1] = Glimpse(act, allocated_bytes, reserved_bytes, tuple(stack))
            return
        if len(self._all) == _MOST_GLIMPSES:
            self._all = [max(pair, key=_fullness) for pair in zip(*[iter(self._all)] * 2, strict=True)]
            self._each *= 2
        self._all.append(Glimpse(act, allocated_bytes, reserved_bytes, tuple(stack)))
        self._count = 1

    def all(self) -> tuple[Glimpse, ...]:
        """All of them, in order."""
        return tuple(self._all)


def _fullness(glimpse: Glimpse) -> int:
    return glimpse.allocated_bytes
