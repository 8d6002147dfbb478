"""Efficiencies of kernel families from the points of a calibration: measured time over physical estimate.

A calibration has thousands of points, and a training uses a few families of kernels.  The estimate of a point is
therefore computed when a family that it may belong to is first looked up; those of the calibrations that ship are
compiled (``compiled.py``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from math import inf, log, sqrt
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.catalog.calibrations import Point, has_host_memory
from trainatomy.operators.cost import FAMILIES, cost_module, kernel_work, modules_of, root_of
from trainatomy.operators.cost.kernel import Chip, physical_seconds
from trainatomy.operators.cost.plans import Plan, is_alike, plan_distance

if TYPE_CHECKING:
    from trainatomy.timing.compiled import CompiledPoints


PRODUCTS = "matmul."
"""Beginning of the families of matrix products."""


_LEAST_OWN = 0.2
"""Least share of a measured time that is taken for the family's own, however long what runs beside it should take."""
_OF_LAST_RESULT = frozenset({"aten::native_group_norm", "aten::upsample_bilinear2d"})
"""Operators that read only what the kernel before wrote, and whose formula knows how much the cache holds of it."""


_REACH = 0.25
"""Squared distance up to which a local point counts.

Of 6,634 convolutions in trainings, priced without what their own said, the mean error of the logarithm falls from 0.132
without such points to 0.122 with this reach, and to as much without a limit, but then 72 instead of 67 of 458 trainings
are off by more than 12 % in their convolutions, 75 without such points.
"""
_REACH_OF_PLAN = 1.0
"""The same for a local point of the same plans; chosen as the distances of plans were (``operators/cost/plans.py``)."""
# The next three were chosen by leaving out points of an H200's calibration and predicting them from the others.
_NEAREST_POINTS = 6
_MOST_KEPT = 1024
"""Answers that a family keeps."""
_SOFTENING = 0.05
"""Added to squared distances (in doublings of size), so that a point at distance 0 does not hide measurement noise."""
_FAMILY_MEAN_WEIGHT = 0.03
"""Weight of the family's mean; it decides only far from every point."""


class EfficiencyPoint(NamedTuple):
    """A calibration point.

    Attributes:
        features: Its position in feature space.
        log_efficiency: Logarithm of its measured over its physical time.
        kernels: Its number of kernels.
        local: It counts for sizes near its own only.
        plans: The plans by which cuDNN computed a convolution, where they are known.
    """

    features: tuple[float, ...]
    log_efficiency: float
    kernels: int
    local: bool = False
    plans: tuple[Plan, ...] = ()


class FamilyPoints(tuple[EfficiencyPoint, ...]):
    """The points of a family, among which the nearest ones are found without looking at all of them."""

    @cached_property
    def mean(self) -> float:
        """Mean log efficiency of the points that are not local."""
        found = [point.log_efficiency for point in self if not point.local]
        return sum(found) / max(len(found), 1)

    @cached_property
    def _by_first(self) -> tuple[list[float], list[tuple[int, EfficiencyPoint]]]:
        """The points' first features in ascending order, and the points with their places in the same order."""
        order = sorted(enumerate(self), key=lambda one: one[1].features[:1])
        return [point.features[0] if point.features else 0.0 for _, point in order], order

    def interpolate(self, features: tuple[float, ...], plans: tuple[Plan, ...] = ()) -> float:
        """Return the mean log efficiency of the nearest points, weighted by distance to the power of -4."""
        near = self.nearest(features, _NEAREST_POINTS, plans)
        weights = [1.0 / (distance + _SOFTENING) ** 2 for distance, _ in near]
        total = sum(weight * point.log_efficiency for weight, (_, point) in zip(weights, near, strict=True))
        return (total + _FAMILY_MEAN_WEIGHT * self.mean) / (sum(weights) + _FAMILY_MEAN_WEIGHT)

    def nearest(
        self, features: tuple[float, ...], count: int, plans: tuple[Plan, ...] = ()
    ) -> list[tuple[float, EfficiencyPoint]]:
        """Return the points nearest to some features and plans with their squared distances, nearest first.

        Local points that are too far are left out.  Of equally near points the first of the calibration come first.
        What was found is kept: most features of a training are the same on all GPUs.
        """
        key = features, count, plans
        if key not in self._found:
            if len(self._found) >= _MOST_KEPT:
                self._found.clear()
            self._found[key] = self._search(features, count, plans)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[object, ...], list[tuple[float, EfficiencyPoint]]]:
        return {}

    def _search(
        self, features: tuple[float, ...], count: int, plans: tuple[Plan, ...]
    ) -> list[tuple[float, EfficiencyPoint]]:
        """Return the nearest points: outwards from the first feature, until it alone makes what follows farther."""
        firsts, order = self._by_first
        at = features[0] if features else 0.0
        above = bisect_left(firsts, at)
        below = above - 1
        found: list[tuple[float, int, EfficiencyPoint]] = []
        while below >= 0 or above < len(order):
            down = at - firsts[below] if below >= 0 else inf
            up = firsts[above] - at if above < len(order) else inf
            if len(found) == count and min(down, up) ** 2 > found[-1][0]:
                break
            place, point = order[below] if down < up else order[above]
            if down < up:
                below -= 1
            else:
                above += 1
            distance = sum((a - b) ** 2 for a, b in zip(point.features, features, strict=False))
            distance += plan_distance(plans, point.plans)
            if point.local and distance > (_REACH_OF_PLAN if is_alike(plans, point.plans) else _REACH):
                continue
            if len(found) < count or (distance, place) < found[-1][:2]:
                insort(found, (distance, place, point))
                del found[count:]
        return [(distance, point) for distance, _, point in found]


class PricedPoint(NamedTuple):
    """A point with its kernel family, its place in the calibration, and the share it reached of the peak of a rate.

    The share is not kept of compiled points.
    """

    place: int
    family: str
    point: EfficiencyPoint
    rate: str = ""
    share: float = 0.0


class EfficiencyPoints(Mapping[str, FamilyPoints]):
    """The points of a calibration by kernel family; a family's points are also listed under its parent families.

    Points of a family are in the order of the calibration, whatever was looked up before.

    Args:
        points: The points of the calibration.
        chip: The GPU that they were measured on.
        compiled: The efficiencies of these points, if they are known.
    """

    def __init__(self, points: Iterable[Point], chip: Chip, compiled: CompiledPoints | None = None) -> None:
        self._chip, self._compiled = chip, compiled
        self._unpriced: dict[str, list[tuple[int, Point]]] = defaultdict(list)
        for place, point in enumerate(points if compiled is None else ()):
            module = "" if has_host_memory(point.text) else cost_module(point.operator)
            self._unpriced[module].append((place, point))
        self._modules = tuple(self._unpriced) if compiled is None else tuple(compiled.modules)
        self._priced: dict[str, list[PricedPoint]] = {}
        self._by_root: dict[str, dict[str, FamilyPoints]] = {}

    def __getitem__(self, family: str) -> FamilyPoints:
        if not family:  # the parent of all families, which any module may return
            raise KeyError(family)
        root = root_of(family)
        if root not in self._by_root:
            self._by_root[root] = self._below(root)
        return self._by_root[root][family]

    def __iter__(self) -> Iterator[str]:
        roots = {root_of(one.family) for module in self._modules for one in self.of_module(module)}
        return (family for root in sorted(roots) for family in self._below(root))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._modules)

    @cached_property
    def largest_shares(self) -> Mapping[str, float]:
        """The largest share of the peak that a matrix product reached, by precision."""
        if self._compiled is not None:
            return self._compiled.largest_shares
        found: dict[str, float] = {}
        for one in self.of_module("matmul"):
            if one.family.startswith(PRODUCTS):
                found[one.rate] = max(found.get(one.rate, 0.0), one.share)
        return found

    def _below(self, root: str) -> dict[str, FamilyPoints]:
        """Return the families with a root, each with its points and those of the families below it."""
        modules = {"", *modules_of(root)}
        priced = sorted(one for module in modules for one in self.of_module(module) if root_of(one.family) == root)
        found: dict[str, list[EfficiencyPoint]] = defaultdict(list)
        for one in priced:
            family = one.family
            while family:
                found[family].append(one.point)
                family = family.rpartition(".")[0]
        return {family: FamilyPoints(points) for family, points in found.items()}

    def of_module(self, module: str) -> list[PricedPoint]:
        """Return the points of a module of ``operators.cost``; without a name, those with tensors in host memory.

        Raises:
            ValueError: If the module returns a family that ``FAMILIES`` does not list for it.
        """
        if module not in self._priced and self._compiled is not None:
            self._priced[module] = self._compiled.of_module(module)
        if module not in self._priced:
            found = [price_point(place, point, self._chip) for place, point in self._unpriced.get(module, ())]
            self._priced[module] = [one for one in found if one is not None]
            others = {root_of(one.family) for one in self._priced[module]}.difference(FAMILIES.get(module, ()))
            if module and others:
                also = ", ".join(sorted(others))
                raise ValueError(f"operators.cost.FAMILIES: {module} also returns families of {also}")
        return self._priced[module]


def price_point(place: int, point: Point, chip: Chip) -> PricedPoint | None:
    """Return a point with its family and efficiency; ``None`` where nothing ran."""
    work = kernel_work(point.call, chip._replace(tf32=point.tf32, cudnn_tf32=True))  # as PyTorch's default has it
    seconds = point_microseconds(point) * 1e-6
    if not work.launches or seconds <= 0:
        return None
    own = max(seconds - work.beside, _LEAST_OWN * seconds)
    ratio = log(own / physical_seconds(work, chip))
    entry = EfficiencyPoint(work.features, ratio, point.kernels, point.local, work.plans)
    return PricedPoint(place, work.family, entry, work.rate, work.flop / (chip.rate(work.rate) * seconds))


def point_microseconds(point: Point) -> float:
    """Return the microseconds that represent a point in a real step.

    In a step the previous kernel's output is in the L2 cache and the rest is not, so the geometric mean of the hot and
    cold times is taken, unless that output is all that is read.
    """
    if point.operator in _OF_LAST_RESULT:
        return point.hot
    return point.hot if point.cold is None else sqrt(point.hot * point.cold)
