"""Compile the planner's loops once, before the tests begin: two processes that need them would each do it.

    python -m tests.helpers.compiling

What numba compiles it keeps beside the sources, and finds again until they change.
"""

from __future__ import annotations

from lowtide.chain.chain import Chain
from lowtide.solvers import solve
from tests.solvers.test_evict import ladder


def main() -> None:
    for method in ("evict", "auto"):
        solve(ladder(), method, budget=320)
    for method in ("feng-huang", "hong-linear", "hong-quadratic", "hong-cubic"):
        solve(Chain.from_sizes([0, 1, 1, 1, 1, 1]), method)


if __name__ == "__main__":
    main()
