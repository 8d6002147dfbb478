"""Prices: what arithmetic, traffic and launches cost on a card, and what kernels really reach of it.

A kernel's time is a physical prediction times a measured ratio.  The ratio is looked up among calibration points of the
same family, nearest first.  A card without a calibration of its own takes the ratios of the calibrated card that is
nearest in compute capability, on its own data sheet, carried over by what the two cards differ in (``carrying.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, inf, log, sqrt
from typing import TYPE_CHECKING, NamedTuple

from trainatomy.catalog.calibrations import Calibration, Point, shipped
from trainatomy.catalog.files import read_yaml
from trainatomy.operators.cost.reach import reach_of
from trainatomy.operators.cost.table import work_of
from trainatomy.operators.cost.work import Chip, Work
from trainatomy.timing.extrapolation import AS_MEASURED, Carrying, carried_over

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU
    from trainatomy.results.operations import Call
    from trainatomy.timing.kernels import KernelCost

_NEIGHBOURS = 6
_SOFTENING = 0.3
"""Added to squared distances (in doublings), so that a point at distance 0 does not hide scatter."""
_PRIOR = 0.03
"""Weight of the family's mean, for what lies far from every point; these three by leaving points of an H200 out."""
_ENOUGH = 3
"""Points that a family must have to speak for itself."""


class Ratio(NamedTuple):
    """A measured point: where it lies, the logarithm of measured over physical, and how many kernels ran."""

    features: tuple[float, ...]
    log: float
    kernels: int


@dataclass(frozen=True)
class CostModel:
    """Of one card. ``chip``: its data sheet; ``gap_seconds``: between kernels of a stream; ``ratios``: by family;
    ``source``: what they rest on; ``calibrated``: measured on this kind of card; ``known``: costs by call, remembered.
    """

    chip: Chip
    gap_seconds: float
    ratios: Mapping[str, tuple[Ratio, ...]] = field(default_factory=dict)
    carrying: Carrying = AS_MEASURED
    source: str = "data sheet"
    calibrated: bool = False
    known: dict[Call, KernelCost] = field(default_factory=dict, compare=False, repr=False)

    def physical(self, work: Work) -> float:
        """Seconds by physics: the form's own, or a floor for each kernel and the traffic."""
        if work.seconds:
            return work.seconds
        reach = reach_of(work.family)
        return reach.kernel_seconds * max(work.launches / 2, 1) + work.bytes / (self.chip.bandwidth * reach.share)

    def busy_seconds(self, cost: KernelCost) -> float:
        """How long a call keeps the GPU when others wait behind it: its kernels and the gaps after them."""
        return cost.seconds + cost.launches * self.gap_seconds

    def launches(self, work: Work) -> int:
        """Kernels of a call: as many as ran at the nearest point of its family, where the form does not know better."""
        near = self.ratios.get(work.family, ())
        if not work.launches or len(near) < _ENOUGH or work.family.startswith("list"):
            return work.launches
        return min(near, key=lambda point: _distance(point.features, work.features)).kernels

    def efficiency(self, work: Work) -> float:
        """What kernels like these take over what physics says: as in a calibration (1 where nothing is known), carried
        over where the card is another one."""
        ratio = self._measured(work)
        if self.carrying is AS_MEASURED:
            return ratio
        if work.seconds:
            return self.carrying.arithmetic(work, work.seconds * ratio, self.chip) / work.seconds
        whole = self.physical(work)
        moving = work.bytes / (self.chip.bandwidth * reach_of(work.family).share)
        return ((whole - moving) * ratio + self.carrying.traffic(work, moving * ratio, self.chip)) / whole

    def _measured(self, work: Work) -> float:
        family = work.family
        while family:
            near = self.ratios.get(family, ())
            if len(near) >= _ENOUGH:
                return exp(_interpolated(near, work.features))
            family = family.rpartition(".")[0]
        return 1.0


def _interpolated(points: Sequence[Ratio], features: tuple[float, ...]) -> float:
    """The mean of the nearest points' logarithms, weighted by distance to the power of -4."""
    mean = sum(point.log for point in points) / len(points)
    near = sorted((_distance(point.features, features), point.log) for point in points)[:_NEIGHBOURS]
    weights = [1.0 / (distance + _SOFTENING) ** 2 for distance, _ in near]
    total = sum(weight * value for weight, (_, value) in zip(weights, near, strict=True))
    return (total + _PRIOR * mean) / (sum(weights) + _PRIOR)


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=False))


@lru_cache(maxsize=64)
def cost_model_of(gpu: GPU, calibration: Calibration | None = None, *, tf32: bool = False) -> CostModel:
    """Prices of a card, built once: by ``calibration``, by the one that ships for it, or by its data sheet and the
    efficiencies of the calibrated card that is nearest. ``tf32``: fp32 matrix products may use tensor cores.
    A calibration without kernels (only of a host) leaves what ships.

    Raises ``WorkloadError`` where ``calibration`` says nothing about such a card.
    """
    if calibration is not None:
        calibration.check(gpu)
    with_kernels = calibration if calibration is not None and calibration.points else None
    measured = with_kernels or shipped().get(gpu.id) or nearest(gpu)
    return priced_by(gpu, measured, tf32=tf32)


def chip_of(gpu: GPU, tf32: bool) -> Chip:
    """What the cost of a kernel depends on, of a card."""
    return Chip(
        gpu.capability,
        gpu.multiprocessors,
        gpu.bandwidth_bytes_per_second,
        gpu.l2_bytes or 4 * 2**20,
        gpu.rates,
        tf32,
    )


def nearest(gpu: GPU) -> Calibration | None:
    """The shipped calibration of the nearest compute capability, among equals of the card with the nearest balance of
    arithmetic and memory: what bounds a kernel there bounds it here."""

    def distance(one: Calibration) -> tuple[int, float]:
        known = 10 * one.capability[0] + one.capability[1]
        there = inf if one.known_gpu is None else abs(log(_balance(one.known_gpu) / _balance(gpu)))
        return abs(known - 10 * gpu.capability[0] - gpu.capability[1]), there

    return min(shipped().values(), key=distance, default=None)


def _balance(gpu: GPU) -> float:
    """FLOP in 16 bits, or in fp32 where that is all, for each byte of the memory."""
    return gpu.rates.get("fp16", gpu.rates["fp32"]) / gpu.bandwidth_bytes_per_second


def priced_by(gpu: GPU, measured: Calibration | None, *, tf32: bool = False) -> CostModel:
    """Prices of a card by a calibration, its own or another's carried over; by the data sheet where there is none."""
    chip = chip_of(gpu, tf32)
    calibrated = measured is not None and measured.is_of(gpu)
    if measured is None:
        return CostModel(chip, gap_seconds(None))
    own = chip if measured.known_gpu is None else chip_of(measured.known_gpu, tf32)
    ratios = ratios_of(own, measured)
    gap = gap_seconds(measured)
    told = f"calibration of {measured.gpu}, {measured.environment['date']}"
    if not calibrated:
        told += f", carried over to the data sheet of {gpu.name}"
    carrying = AS_MEASURED if calibrated or measured.known_gpu is None else carried_over(measured.known_gpu, gpu)
    return CostModel(chip, gap, ratios, carrying, told, calibrated)


def gap_seconds(measured: Calibration | None) -> float:
    """Between kernels that follow each other; the general figure where that was not measured."""
    waiting = measured.sections.get("device", {}).get("waiting", {}) if measured else {}
    if "gap_us" in waiting:
        return float(waiting["gap_us"]) * 1e-6
    return float(read_yaml("efficiency.yaml")["traffic"]["gap_seconds"])


def ratios_of(chip: Chip, measured: Calibration) -> dict[str, tuple[Ratio, ...]]:
    """Measured over physical of every point, under its family and all that contain it."""
    own = CostModel(chip, gap_seconds(measured))
    chips = {tf32: chip._replace(tf32=tf32) for tf32 in (False, True)}
    found: dict[str, list[Ratio]] = defaultdict(list)
    for point in measured.points:
        work = work_of(point.call, chips[point.tf32])
        seconds = seconds_of(point) * 1e-6
        if not work.launches or seconds <= 0:
            continue
        ratio = Ratio(work.features, log(seconds / own.physical(work)), point.kernels)
        family = work.family
        while family:
            found[family].append(ratio)
            family = family.rpartition(".")[0]
    return {family: tuple(points) for family, points in found.items()}


def seconds_of(point: Point) -> float:
    """Microseconds that stand for a point in a step, where what the kernel before wrote is in the cache, and the rest
    is not."""
    return point.hot if point.cold is None else sqrt(point.hot * point.cold)
