"""The largest of several values for which something holds, found by trying values on both sides of the limit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence

from trainatomy.errors import WorkloadError

MOST_FAILURES = 24
"""Values that a search passes over because they cannot be tried."""
_BELOW = 8
"""Steps that lie between 0 and the value to begin with, at least."""
_BEYOND = 64
"""Times the value to begin with that the largest value to try is."""


def largest(
    values: Sequence[int],
    start: int,
    holds: Callable[[int], bool | None],
    guess: Callable[[], int],
) -> Generator[int, None, None]:
    """Yield the values to try, until two neighbours are known of which one holds and the other does not.

    Args:
        values: All values in ascending order.
        start: The value to begin with.
        holds: Says of a value that was tried whether it holds; None if it cannot be tried, and another one has to be.
        guess: Returns the largest value that should hold, by those that were tried.

    Raises:
        WorkloadError: Many values cannot be tried.
    """
    left, low, high = values, -1, len(values)  # indices: everything up to low holds, high and beyond do not
    index, failures = nearest(left, start), 0
    while low + 1 < high:
        yield left[index]
        held = holds(left[index])
        if held is None:
            failures += 1
            if failures > MOST_FAILURES:
                raise WorkloadError(
                    f"--maximize: {failures} values failed, the last of them {left[index]:,}; say in which steps "
                    "values are valid, after a colon, such as data.image_size:14"
                )
            left = [*left[:index], *left[index + 1 :]]
            high -= 1
            if low + 1 == high:
                return
            index = min(max(index - 1, low + 1), high - 1)
            continue
        low, high = (index, high) if held else (low, index)
        index = min(max(nearest(left, guess()), low + 1), high - 1)


def nearest(values: Sequence[int], size: int) -> int:
    """Return the index of the largest value that is not above a size, or 0."""
    return max(bisect_right(values, size) - 1, 0)


def multiples(start: int, step: int | None) -> Sequence[int]:
    """Return values around a value to begin with, in steps: by default, of a power of two that divides it."""
    if step is None:
        step = start & -start
        while step > 1 and step * _BELOW > start:
            step //= 2
    return range(start % step or step, _BEYOND * start + 1, step)
