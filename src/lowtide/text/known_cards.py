"""Cards that go by a name: what memory they have to give, and how fast they are said to be.

`memory_bytes` is what the driver calls the total on an idle card ("GPU 0 has a total capacity of …" in
PyTorch's message when it runs out): less than what is printed on the box, by what the driver keeps and, on
professional cards without HBM, by what error correction takes. The least that was found is taken:

    RTX 3060      11.75 GiB   github.com/Kunhao-Liu/StyleGaussian/issues/12
    RTX 3070       7.76 GiB   github.com/sshan-zhao/GASDA/issues/19
    RTX 3080       9.78 GiB   github.com/zai-org/CogVideo/issues/34
    RTX 4090      23.61 GiB   github.com/pinokiofactory/flux-webui/issues/11
    T4            14.56 GiB   github.com/Zheng-Chong/CatVTON/issues/133
    A100 40 GB    39.45 GiB   github.com/LianjiaTech/BELLE/issues/137
    A100 80 GB    79.25 GiB   github.com/levihsu/OOTDiffusion/issues/235

Where no such message was found the memory is what is printed on the box, times the lowest share that was
found of a card of its kind: 0.97 for GeForce cards (RTX 3070), 0.91 for professional cards with GDDR memory
and error correction (T4), 0.98 for HBM (A30: 23.53 of 24 GiB, github.com/google/RB-Modulation/issues/5).
That is on the safe side, and `is_measured` says so. Where a card is there, trust `torch.cuda.mem_get_info`.

Rates are nominal: those of the vendor's data sheets, dense, with sums in 32 bits, and measured by nobody
here. AMD's cards are not in the table: the rules by which workspaces and reserves are known are CUDA's.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import UnknownCard
from lowtide.text.names import same_name

_GIB = 1 << 30
_GEFORCE, _CORRECTING, _STACKED = 0.97, 0.91, 0.98


@dataclass(frozen=True, slots=True)
class KnownCard:
    """A card by its name. Rates are operations and bytes a second, as the vendor names them."""

    name: str
    memory_bytes: int
    is_measured: bool  # the memory, by somebody who ran out of it
    full_flops: float  # in 32 bits
    tensor_flops: float  # in TF32; those of 32 bits where there is no such thing
    half_flops: float
    bandwidth: float


def _told(name: str, gib: float, *rates: float) -> KnownCard:
    """A card whose memory somebody was told."""
    return _card(name, gib, True, *rates)


def _printed(name: str, gib: float, share: float, *rates: float) -> KnownCard:
    """A card of which only the box is known."""
    return _card(name, gib * share, False, *rates)


def _card(
    name: str, gib: float, is_measured: bool, full: float, tensor: float, half: float, bandwidth: float
) -> KnownCard:
    return KnownCard(
        name, int(gib * _GIB), is_measured, full * 1e12, tensor * 1e12, half * 1e12, bandwidth * 1e9
    )


KNOWN_CARDS = {
    card.name: card
    for card in (
        # name, memory in GiB, TFLOP/s in 32 bits, in TF32, in half precision, GB/s
        _told("rtx3060", 11.75, 12.7, 12.7, 25.5, 360),
        _told("rtx3070", 7.76, 20.3, 20.3, 40.6, 448),
        _told("rtx3080", 9.78, 29.8, 29.8, 59.5, 760),
        _printed("rtx3090", 24, _GEFORCE, 35.6, 35.6, 71.0, 936),
        _printed("rtx4060", 8, _GEFORCE, 15.1, 15.1, 30.2, 272),
        _printed("rtx4070ti", 12, _GEFORCE, 40.1, 40.1, 80.2, 504),
        _printed("rtx4080", 16, _GEFORCE, 48.7, 48.7, 97.5, 717),
        _told("rtx4090", 23.61, 82.6, 82.6, 165.2, 1008),
        _printed("rtx5090", 32, _GEFORCE, 104.8, 104.8, 209.5, 1792),
        _told("t4", 14.56, 8.1, 8.1, 65.0, 300),
        _printed("l4", 24, _CORRECTING, 30.3, 60.0, 121.0, 300),
        _printed("a10", 24, _CORRECTING, 31.2, 62.5, 125.0, 600),
        _printed("a40", 48, _CORRECTING, 37.4, 74.8, 149.7, 696),
        _printed("a6000", 48, _CORRECTING, 38.7, 77.4, 154.8, 768),
        _printed("l40s", 48, _CORRECTING, 91.6, 183.0, 362.0, 864),
        _printed("v100-16gb", 16, _STACKED, 15.7, 15.7, 125.0, 900),
        _printed("v100-32gb", 32, _STACKED, 15.7, 15.7, 125.0, 900),
        _told("a100-40gb", 39.45, 19.5, 156.0, 312.0, 1555),
        _told("a100-80gb", 79.25, 19.5, 156.0, 312.0, 1935),
        _printed("h100", 80, _STACKED, 67.0, 494.0, 989.0, 3350),
        _printed("h200", 141e9 / _GIB, _STACKED, 67.0, 494.0, 989.0, 4800),
        _printed("b200", 180e9 / _GIB, _STACKED, 75.0, 1100.0, 2250.0, 7700),
    )
}
_ALSO = {"v100": "v100-16gb", "a100": "a100-40gb", "h100-80gb": "h100", "rtxa6000": "a6000"}


def known_card(name: str) -> KnownCard:
    """The card of that name, however it is written: 'rtx4090', 'RTX 4090', 'NVIDIA GeForce RTX 4090'.

    Of cards that there are with more and with less memory the short name means that with less.

    Raises:
        UnknownCard: there is none; the nearest are named.
    """
    words = [word for word in name.split() if word.casefold() not in ("nvidia", "geforce", "tesla")]
    wanted = " ".join(words)
    found = same_name(wanted, [*KNOWN_CARDS, *_ALSO])
    if found is None:
        raise UnknownCard(name, KNOWN_CARDS)
    return KNOWN_CARDS[_ALSO.get(found, found)]
