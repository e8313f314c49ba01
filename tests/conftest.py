"""How much the tests try: everything, unless `make test` asks for the quick profile.

A wall time is never a test: hypothesis neither times examples nor minds a slow machine. No test leaves
anything of another library replaced.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from lowtide.compat.patches import active

settings.register_profile("full", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("full"), max_examples=15)
settings.load_profile("full")


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_out_of_sight() -> None:
    """Take what modules and caches hold by now out of the garbage collector's sight.

    Tests that measure, plan or compile collect garbage, and look through everything alive for tensors: most
    of their time went into the objects of torch, transformers and lightning, which stay anyway.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_stays_replaced() -> Iterator[None]:
    yield
    assert not active(), f"still replaced: {', '.join(map(str, active()))}"
