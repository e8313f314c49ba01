"""The chain view of a training step: layers in a row, joined by one tensor each, as bytes and seconds.

    tensor 0 ─ layer 1 ─ tensor 1 ─ layer 2 ─ … ─ layer n ─ tensor n

Tensor 0 is the input, tensor n the loss. What a layer needs is written down as plain numbers, so that a
chain can come from a dry run of a model or from a table in a paper.

What happens in a step, and which numbers it takes (`unrolling` turns this into a graph and a schedule
for the referee, and that is the definition that counts):

* The forward of layer k needs tensor k−1 and, beside it, `forward_bytes`: its output, what it saves and
  its temporaries. When it *saves*, `saved_bytes` stay until its backward has run, otherwise only its
  output is left.
* The backward of layer k needs at its worst `backward_bytes`: what it saved, the gradient that arrives,
  the one that leaves, temporaries, and everything settled so far. It leaves `settled_bytes` behind for
  good: the gradients of its parameters.
* The output of a layer is among its saved bytes if a backward needs it: the layer's own
  (`output_saved_by_itself`) or the next one's (`output_saved_by_next`). Otherwise it is gone once the
  next layer has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from numbers import Integral, Real
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from lowtide.errors import BadRequest
from lowtide.ir.graph import Call
from lowtide.text.units import format_bytes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_BYTES = 1 << 58  # a few such sums still fit in 64 bits


class Kind(StrEnum):
    """What a layer is made of, as far as choosing by kind needs to know."""

    LIGHT = "light"  # no convolution and no matrix product: normalisation, activation, pooling, loss
    HEAVY = "heavy"  # nothing after its one convolution or matrix product
    MIXED = "mixed"  # both


@dataclass(frozen=True)
class Chain:
    """Layers in a row. Lists about tensors have n + 1 entries, lists about layers n; layer k is at k − 1.

    `base_bytes` are there all the time: parameters, buffers, the batch. Sizes are as the device's
    allocator rounds them.

    Where the chain comes from a model: `kinds` of layers; `places`, the forward op before which tensor k
    is cut, and `calls` of modules, by which a plan finds its way into the model; `timed`, whether the
    seconds were measured; `changed_buffers`, those that the forward changes; `inputs`, the tensors the
    model was called with, and `fingerprint`, which tells models apart.

    Raises:
        BadRequest: sizes that cannot be: negative, of unequal lengths, or a layer that needs less than
            what it holds anyway.
    """

    output_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    settled_bytes: tuple[int, ...]
    output_saved_by_itself: tuple[bool, ...]
    output_saved_by_next: tuple[bool, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    base_bytes: int = 0
    name: str = "chain"
    names: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = field(default=(), repr=False)
    places: tuple[int, ...] = field(default=(), repr=False)
    calls: tuple[Call, ...] = field(default=(), repr=False)
    timed: bool = True
    changed_buffers: tuple[str, ...] = field(default=(), repr=False)
    inputs: tuple[str, ...] = ()
    fingerprint: str = field(default="", repr=False)

    @classmethod
    def from_sizes(
        cls,
        output_bytes: Sequence[int],
        saved_bytes: Sequence[int] | None = None,
        backward_bytes: Sequence[int] | None = None,
        *,
        forward_bytes: Sequence[int] | None = None,
        gradient_bytes: Sequence[int] | None = None,
        settled_bytes: Sequence[int] | None = None,
        forward_seconds: Sequence[float] | None = None,
        backward_seconds: Sequence[float] | None = None,
        base_bytes: int = 0,
        name: str = "chain",
        names: Sequence[str] = (),
    ) -> Chain:
        """A chain from numbers: `output_bytes` d₀ … dₙ, `saved_bytes` a₁ … aₙ, `backward_bytes` s₁ … sₙ.

        What is not given is what a chain of simple layers would have: a gradient as large as its tensor,
        a = d, s = a + both gradients, a forward that makes its output and what it saves, nothing settled,
        one second for each forward and two for each backward. An output is taken to be among a layer's
        saved bytes if it fits in them.

        Raises:
            BadRequest: see `Chain`.
        """
        d = _whole("output_bytes", output_bytes)
        n = len(d) - 1
        if n < 1:
            raise BadRequest(
                f"output_bytes has {len(d)} entries; a chain of n layers has n + 1: the input and one "
                "output a layer. Give at least two."
            )
        g = d if gradient_bytes is None else _whole("gradient_bytes", gradient_bytes, n + 1)
        a = d[1:] if saved_bytes is None else _whole("saved_bytes", saved_bytes, n)
        w = np.zeros(n, np.int64) if settled_bytes is None else _whole("settled_bytes", settled_bytes, n)
        settled = _after(w)
        if backward_bytes is None:
            s = a + g[1:] + g[:-1] + settled[:-1]
        else:
            s = _whole("backward_bytes", backward_bytes, n)
        saved = a >= d[1:]
        own = a - np.where(saved, d[1:], 0)
        r = own + d[1:] if forward_bytes is None else _whole("forward_bytes", forward_bytes, n)
        return cls(
            output_bytes=tuple(d.tolist()),
            gradient_bytes=tuple(g.tolist()),
            saved_bytes=tuple(a.tolist()),
            forward_bytes=tuple(r.tolist()),
            backward_bytes=tuple(s.tolist()),
            settled_bytes=tuple(w.tolist()),
            output_saved_by_itself=tuple((saved & (s >= a + g[1:] + settled[1:])).tolist()),
            output_saved_by_next=tuple(saved.tolist()),
            forward_seconds=_seconds("forward_seconds", forward_seconds, n, 1.0),
            backward_seconds=_seconds("backward_seconds", backward_seconds, n, 2.0),
            base_bytes=int(_whole("base_bytes", [base_bytes])[0]),
            name=name,
            names=tuple(names),
        )

    def __post_init__(self) -> None:
        n = len(self)
        for tensors in ("output_bytes", "gradient_bytes"):
            _whole(tensors, getattr(self, tensors), n + 1)
        for layers in ("saved_bytes", "forward_bytes", "backward_bytes", "settled_bytes"):
            _whole(layers, getattr(self, layers), n)
        for flags in (
            "output_saved_by_itself",
            "output_saved_by_next",
            "forward_seconds",
            "backward_seconds",
        ):
            if len(getattr(self, flags)) != n:
                raise BadRequest(
                    f"{flags} has {len(getattr(self, flags))} entries, but the chain has {n} layers."
                )
        for optional in ("names", "kinds"):
            if getattr(self, optional) and len(getattr(self, optional)) != n:
                raise BadRequest(
                    f"{optional} has {len(getattr(self, optional))} entries, but the chain has {n} layers."
                )
        if n < 1:
            raise BadRequest("a chain needs at least one layer.")
        self._check("saved_bytes", self.a, np.where(self.kept, self.d[1:], 0), "its output, which is saved")
        self._check("forward_bytes", self.r, self.own + self.d[1:], "its output and what it saves")
        arriving = self.own + np.where(self.by_itself, self.d[1:], 0) + self.g[1:] + self.w[1:]
        self._check(
            "backward_bytes", self.s, arriving, "what it saved, the gradient that arrives and what is settled"
        )
        self._check(
            "backward_bytes",
            self.s,
            self.g[:-1] + self.w[:-1],
            "the gradient that leaves and what is settled",
        )

    def _check(self, what: str, given: Ints, least: Ints, why: str) -> None:
        wrong = np.flatnonzero(given < least)
        if wrong.size:
            k = int(wrong[0])
            raise BadRequest(
                f"{what} of {self.layer(k + 1)} is {format_bytes(int(given[k]))}, "
                f"less than {why}: {format_bytes(int(least[k]))}."
            )

    def __len__(self) -> int:
        return len(self.saved_bytes)

    def layer(self, k: int) -> str:
        """Layer k (1 … n) as a user would name it."""
        return f"layer {k} ({self.names[k - 1]})" if self.names else f"layer {k}"

    # The same numbers as the literature writes them ---------------------------------------------------

    @cached_property
    def d(self) -> Ints:
        """Bytes of tensor k."""
        return np.asarray(self.output_bytes, np.int64)

    @cached_property
    def g(self) -> Ints:
        """Bytes of the gradient of tensor k."""
        return np.asarray(self.gradient_bytes, np.int64)

    @cached_property
    def a(self) -> Ints:
        """Bytes that layer k saves, at k − 1."""
        return np.asarray(self.saved_bytes, np.int64)

    @cached_property
    def r(self) -> Ints:
        """Bytes that the forward of layer k needs beside its input, at k − 1."""
        return np.asarray(self.forward_bytes, np.int64)

    @cached_property
    def s(self) -> Ints:
        """Bytes that the backward of layer k needs beside what layers before it saved, at k − 1."""
        return np.asarray(self.backward_bytes, np.int64)

    @cached_property
    def w(self) -> Ints:
        """Bytes settled when the backward arrives at tensor k: left there by layers after it."""
        return _after(np.asarray(self.settled_bytes, np.int64))

    @cached_property
    def by_itself(self) -> npt.NDArray[np.bool_]:
        """Whether the backward of layer k needs its output, at k − 1."""
        return np.asarray(self.output_saved_by_itself, np.bool_)

    @cached_property
    def by_next(self) -> npt.NDArray[np.bool_]:
        """Whether the backward of layer k + 1 needs the output of layer k, at k − 1."""
        return np.asarray(self.output_saved_by_next, np.bool_)

    @cached_property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Whether the output of layer k is among its saved bytes, at k − 1."""
        return self.by_itself | self.by_next

    @cached_property
    def own(self) -> Ints:
        """What layer k saves beside its output, at k − 1."""
        return self.a - np.where(self.kept, self.d[1:], 0)

    @cached_property
    def saved_before(self) -> Ints:
        """A_k: what layers 1 … k save together; n + 1 entries."""
        return np.concatenate([[0], np.cumsum(self.a)]).astype(np.int64)

    @cached_property
    def forward_before(self) -> Floats:
        """Seconds of the forward of layers 1 … k; n + 1 entries."""
        return np.concatenate([[0.0], np.cumsum(np.asarray(self.forward_seconds))])

    def floor(self) -> tuple[int, int]:
        """A bound below which no plan can bring the peak, and the layer that sets it.

        Whatever is recomputed, at some moment layer k runs forward, with its input, and at some moment
        backward, with its input if it saved that.
        """
        beside = np.where(np.arange(len(self)) > 0, self.d[:-1], 0)  # tensor 0 is there anyway
        saved = np.concatenate([[False], self.by_next[:-1]])
        least = np.maximum(self.r + beside, self.s + np.where(saved, beside, 0))
        worst = int(least.argmax())
        return self.base_bytes + self.output_bytes[0] + int(least[worst]), worst + 1

    @property
    def seconds(self) -> float:
        """Forward and backward of every layer once."""
        return float(sum(self.forward_seconds) + sum(self.backward_seconds))


def _after(settled: Ints) -> Ints:
    """For tensor k = 0 … n, what layers k + 1 … n have settled."""
    return np.concatenate([np.cumsum(settled[::-1])[::-1], [0]]).astype(np.int64)


def _whole(what: str, sizes: Sequence[int], length: int | None = None) -> Ints:
    """`sizes` as an array, if they are whole numbers of bytes and as many as there should be."""
    if length is not None and len(sizes) != length:
        raise BadRequest(f"{what} has {len(sizes)} entries, but {length} are needed.")
    if not all(map(_is_whole, set(map(type, sizes)))) or min(sizes, default=0) < 0:
        _refuse_the_first(what, sizes)
    if sum(sizes) > _MOST_BYTES:
        raise BadRequest(f"{what} adds up to {sum(sizes)} bytes, more than any machine has.")
    return np.asarray(sizes, np.int64)


def _is_whole(kind: type) -> bool:
    return issubclass(kind, Integral) and not issubclass(kind, bool)


def _refuse_the_first(what: str, sizes: Sequence[int]) -> NoReturn:
    """Say which of `sizes` is the first that is none."""
    position, size = next(
        (position, size) for position, size in enumerate(sizes) if not _is_whole(type(size)) or size < 0
    )
    if _is_whole(type(size)):
        raise BadRequest(f"{what}[{position}] is {size}; sizes cannot be negative.")
    raise BadRequest(f"{what}[{position}] is {size!r}; sizes are whole numbers of bytes.")


def _seconds(what: str, given: Sequence[float] | None, length: int, default: float) -> tuple[float, ...]:
    if given is None:
        return (default,) * length
    if len(given) != length:
        raise BadRequest(f"{what} has {len(given)} entries, but {length} are needed.")
    for position, seconds in enumerate(given):
        if not isinstance(seconds, Real) or not 0 <= seconds < float("inf"):
            raise BadRequest(f"{what}[{position}] is {seconds!r}; give seconds, zero or more.")
    return tuple(float(seconds) for seconds in given)
