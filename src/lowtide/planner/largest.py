"""The largest number that something holds for, asked as seldom as a good guess allows."""

from __future__ import annotations

from collections.abc import Callable


def largest_that(holds: Callable[[int], bool], most: int, guess: int = 1) -> int:
    """The largest number from 1 to `most` that `holds` is true of; 0 if it is not even true of 1.

    `holds` is taken to be true up to some number and false from there on. What is returned has been asked,
    and so has the next. The nearer the `guess`, the fewer questions: two if it is right, and about twice the
    logarithm of how far it is off.
    """
    good, bad = 0, most + 1
    at, stride = min(max(guess, 1), most), 1
    while bad - good > 1:
        if holds(at):
            good = at
            at = good + stride if bad > most else (good + bad) // 2
        else:
            bad = at
            at = bad - stride if good == 0 else (good + bad) // 2
        stride *= 2
        at = min(max(at, good + 1), bad - 1)
    return good
