"""Look a value up in what was measured: among the nearest points, on a line between points, in a decision tree."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any


def mean_of_nearest(
    points: Iterable[tuple[float, float]], softening: float, prior: float = 0.0, prior_weight: float = 0.0
) -> float:
    """Return the mean of values, weighted by distance to the power of -4.

    Args:
        points: Squared distance and value of each point.
        softening: What is added to squared distances, so that a point at the same place does not decide alone.
        prior: A value that counts besides them, at any distance.
        prior_weight: Its weight.
    """
    weights = [(1.0 / (distance + softening) ** 2, value) for distance, value in points]
    total = sum(weight * value for weight, value in weights)
    return (total + prior_weight * prior) / (sum(weight for weight, _ in weights) + prior_weight)


def on_line(points: Sequence[tuple[float, float]], at: float, *, before: bool = False, after: bool = False) -> float:
    """Return the value at a place on the line through points, which are in ascending order.

    ``before`` the first point and ``after`` the last one it goes on as between the nearest two, or else stays constant.
    """
    if len(points) == 1 or (at <= points[0][0] and not before):
        return points[0][1]
    if at >= points[-1][0] and not after:
        return points[-1][1]
    upper = min(max(bisect_right([place for place, _ in points], at), 1), len(points) - 1)
    (left, low), (right, high) = points[upper - 1], points[upper]
    return low + (high - low) * (at - left) / (right - left)


def leaf(tree: Any, values: Sequence[float]) -> Any:
    """Return the leaf of a decision tree, as its JSON has it.

    An inner node is a list: the place of the value that it compares, a limit, the nodes up to the limit and above.
    """
    while isinstance(tree, list):
        place, limit, below, above = tree
        tree = below if values[place] <= limit else above
    return tree
