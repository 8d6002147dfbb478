"""Predict the GPU time of one operation: a physical estimate times an efficiency measured by a calibration.

The efficiency (measured over physical time) is interpolated between the calibration points of the same kernel family
that are nearest in size.  A GPU without a calibration uses the shipped calibration of the GPU nearest in compute
capability, extrapolated to its own data sheet (``extrapolation.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, inf, log
from typing import NamedTuple

from trainatomy.catalog.calibrations import Calibration, shipped
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import GPU, PowerRates, find_gpu, power_of
from trainatomy.catalog.links import Links, with_points
from trainatomy.catalog.versions import Version, behaviour
from trainatomy.operators.cost import has_cost, kernel_work
from trainatomy.operators.cost.kernel import Chip, KernelWork, chip_of, efficiency_of, physical_seconds
from trainatomy.operators.cost.matmul import products_of
from trainatomy.results.operations import Call
from trainatomy.timing.compiled import compiled_points
from trainatomy.timing.contention import joules_of
from trainatomy.timing.efficiency import PRODUCTS, EfficiencyPoints, FamilyPoints
from trainatomy.timing.extrapolation import SAME_GPU, Extrapolation, extrapolation_between

_MIN_POINTS = 3
"""Points a family needs before its own efficiency is used instead of its parent family's."""
_THIN = 3
"""Doublings of the side up to which products were measured to take longer with TF32 than without."""
_MANY_TIMES = 3
"""From this many times the points on, another GPU's calibration is preferred to this GPU's own for a family."""


class KernelCost(NamedTuple):
    """GPU cost of one call.

    Attributes:
        seconds: Sum of the durations of the call's kernels, as a profiler reports them, without the gaps between
            kernels (``CostModel.busy_seconds`` adds those).
        flop_seconds: Its arithmetic at the GPU's peak rate.
        bytes_seconds: Its memory traffic at the GPU's bandwidth; the larger of the two says what bounds the call.
        launches: Number of kernels.
        at_once: Kernels that run at a time on average, on streams of a library's own (cuDNN's recurrent layers).
        joules: Energy beyond that of an idle GPU, at full clocks; 0 where it is not known.
    """

    seconds: float
    flop_seconds: float
    bytes_seconds: float
    launches: int
    at_once: float = 1.0
    joules: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """The cost model of one GPU.

    Attributes:
        chip: The data-sheet figures that costs depend on.
        gap_seconds: Idle time between two consecutive kernels of a stream.
        points: Calibration points by kernel family; a family's points are also listed under its parent families.
        extrapolation: How to translate efficiencies from the GPU that was calibrated to this one.
        source: Where the efficiencies come from, for display.
        calibrated: True if the calibration was measured on this kind of GPU.
        unmeasured: True if no time of a GPU of its maker was compared.
        power: Power of the GPU's work; None where it is not known.
        other: The same GPU by the calibration of another one, for families of which this calibration knows too little.
        cache: Costs computed so far, by call.
    """

    chip: Chip
    gap_seconds: float
    points: Mapping[str, FamilyPoints] = field(default_factory=dict)
    extrapolation: Extrapolation = SAME_GPU
    source: str = "data sheet"
    calibrated: bool = False
    unmeasured: bool = False
    power: PowerRates | None = None
    other: CostModel | None = field(default=None, compare=False)
    cache: dict[Call, KernelCost] = field(default_factory=dict, compare=False, repr=False)

    def physical_seconds(self, work: KernelWork) -> float:
        """Return the time of the call by physics alone, before any measured efficiency."""
        return physical_seconds(work, self.chip)

    def busy_seconds(self, cost: KernelCost) -> float:
        """Return how long a call occupies its stream when other work is queued: its kernels and the gaps after them."""
        return (cost.seconds + cost.launches * self.gap_seconds) / cost.at_once

    def launches(self, work: KernelWork) -> int:
        """Return the number of kernels, if possible as measured at the nearest calibration point of the family."""
        if self.other is not None and self._is_better_known(self.other, work.family):
            return self.other.launches(work)
        near = self.points.get(work.family, FamilyPoints())
        if len(near) < _MIN_POINTS and work.family.startswith("convolution."):  # with groups, dilation, another layout
            near = self.points.get(work.family.rpartition(".")[0], FamilyPoints())
        if not work.launches or len(near) < _MIN_POINTS or work.family.startswith("list"):
            return work.launches
        return next((point.kernels for _, point in near.nearest(work.features, 1, work.plans)), work.launches)

    def efficiency(self, work: KernelWork) -> float:
        """Return predicted over physical time (1 where no calibration covers the family)."""
        if self.other is not None and self._is_better_known(self.other, work.family):
            return self.other.efficiency(work)
        if self.extrapolation is SAME_GPU:
            return self._measured_efficiency(work)
        ratio = 1.0 if work.own_products else self._measured_efficiency(work)
        if work.seconds:
            return self.extrapolation.arithmetic_seconds(work, work.seconds * ratio, self.chip) / work.seconds
        whole = self.physical_seconds(work)
        moving = work.bytes / (self.chip.bandwidth * efficiency_of(work.family).share)
        traffic = self.extrapolation.traffic_seconds(work, moving * ratio, self.chip)
        return ((whole - moving) * ratio + traffic) / whole

    def least_seconds(self, work: KernelWork) -> float:
        """Return the time of a matrix product at the fastest rate that this GPU reached when it was calibrated.

        What an interpolation makes of a formula may be faster.  Other GPUs may reach another share of their peak.
        """
        if not self.calibrated or not work.family.startswith(PRODUCTS) or not isinstance(self.points, EfficiencyPoints):
            return 0.0
        return work.flop / (self.chip.rate(work.rate) * self.points.largest_shares.get(work.rate, 1.0))

    def _measured_efficiency(self, work: KernelWork) -> float:
        """Look up the efficiency of the family, or of the first parent family with enough points."""
        near = self.points.get(self._known_family(work.family))
        return exp(near.interpolate(work.features, work.plans)) if near else 1.0

    def _known_family(self, family: str) -> str:
        """Return the family, or the first parent family with enough points; empty if there is none."""
        while family and len(self.points.get(family, ())) < _MIN_POINTS:
            family = family.rpartition(".")[0]
        return family

    def _is_better_known(self, other: CostModel, family: str) -> bool:
        """Return whether the other calibration has points nearer to the family, or many times as many of the same."""
        here, there = self._known_family(family), other._known_family(family)
        if len(there) != len(here):
            return len(there) > len(here)
        return len(other.points.get(there, ())) > _MANY_TIMES * len(self.points.get(here, ()))


def kernel_cost(call: Call, cost_model: CostModel) -> KernelCost:
    """Predict the GPU cost of one call, cached per distinct call."""
    known = cost_model.cache.get(call)
    if known is None:
        known = cost_model.cache[call] = _compute_cost(call, kernel_work(call, cost_model.chip), cost_model)
    return known


def _compute_cost(call: Call, work: KernelWork, cost_model: CostModel) -> KernelCost:
    if not work.launches:
        return KernelCost(0.0, 0.0, 0.0, 0)
    chip = cost_model.chip
    flop, traffic = work.flop / chip.rate(work.rate), work.bytes / chip.bandwidth
    seconds = _bounded_by_tf32(call, work, cost_model)
    joules = 0.0 if cost_model.power is None else joules_of(call, work, seconds, cost_model.power)
    return KernelCost(seconds, flop, traffic, cost_model.launches(work), work.at_once, joules)


def _bounded_by_tf32(call: Call, work: KernelWork, model: CostModel) -> float:
    """Return the time of a call's kernels, which the permission to use TF32 never makes longer.

    Where TF32 is allowed, cuBLAS and cuDNN choose among the kernels of TF32 and of fp32.  On a GPU that was calibrated
    the points say what they chose, except that cuBLAS may ignore TF32 for rows that are not aligned: of 224 products
    that were measured both ways on an H200, only the six with a side of at most 8 take longer with it.  On other GPUs
    the faster one counts, as TF32 is no faster than fp32 on some.  Convolutions were not measured without TF32.
    """
    seconds, chip = _priced_seconds(work, model), model.chip
    if work.rate == "tf32" and model.extrapolation is not SAME_GPU:
        return min(seconds, _priced_seconds(kernel_work(call, chip._replace(tf32=False, cudnn_tf32=False)), model))
    products = (PRODUCTS, "grouped.")
    if work.rate == "tf32" and work.family.startswith(products) and min(work.features[1:]) > _THIN:
        return min(seconds, _priced_seconds(kernel_work(call, chip._replace(tf32=False)), model))
    if work.rate == "fp32" and not chip.cudnn_tf32 and "convolution" in call.name:
        return max(seconds, _priced_seconds(kernel_work(call, chip._replace(cudnn_tf32=True)), model))
    return seconds


def _priced_seconds(work: KernelWork, model: CostModel) -> float:
    own = max(model.physical_seconds(work) * model.efficiency(work), model.least_seconds(work))
    return own + work.beside


def precision_of(call: Call, chip: Chip) -> str:
    """Return the key of ``Chip.rates`` that bounds a call's arithmetic.

    For a matrix product or convolution it is the type of its factors (TF32 where it is allowed), whatever the type of
    a bias or of indices.
    """
    return kernel_work(call, chip).rate


def general_rule_only(calls: Iterable[Call]) -> frozenset[str]:
    """Return the operators that no cost rule covers; their time is predicted from their memory traffic alone."""
    return frozenset(call.name for call in calls if not has_cost(call))


@lru_cache(maxsize=64)
def cost_model_of(
    gpu: GPU, calibration: Calibration | None = None, *, tf32: bool | None = None, links: Links | None = None
) -> CostModel:
    """Return the cost model of a GPU, built once per combination of arguments.

    Args:
        gpu: The GPU to predict for.
        calibration: A calibration to use instead of the shipped one of this GPU, or of the nearest calibrated GPU.
            One without kernels (it measured only the CPU) leaves the shipped one in place.
        tf32: Whether fp32 matrix products and convolutions may use tensor cores.  None is PyTorch's default: only
            convolutions may.
        links: The links to other GPUs, for a training on several.  Collectives that ``calibration`` timed come first.

    Raises:
        WorkloadError: If ``calibration`` does not apply to this GPU.
    """
    if calibration is not None:
        calibration.check(gpu)
        links = with_points(links, calibration.collectives) if links is not None else None
    with_kernels = calibration if calibration is not None and calibration.points else None
    measured = with_kernels or shipped().get(gpu.card) or nearest_calibration(gpu)
    found = cost_model_from(gpu, measured, tf32=tf32, links=links)
    other = None if with_kernels else nearest_calibration(gpu, measured)  # what a user measured stays as it is
    return found if other is None else replace(found, other=cost_model_from(gpu, other, tf32=tf32, links=links))


def tensor_cores_for_fp32(tf32: bool | None, torch_version: Version) -> bool | None:
    """Return the setting ``tf32`` of a training as ``cost_model_of`` takes it.

    In releases of torch where it does not reach convolutions, these keep TF32 although ``tf32`` is false.
    """
    return None if tf32 is False and not behaviour("fp32_precision_reaches_convolutions", torch_version) else tf32


def nearest_calibration(gpu: GPU, besides: Calibration | None = None) -> Calibration | None:
    """Return the shipped calibration of the GPU nearest in compute capability; not that of the GPU of ``besides``.

    Ties go to the GPU with the most similar ratio of arithmetic to memory bandwidth, so that kernels are bound by the
    same resource on both.
    """

    def distance(one: Calibration) -> tuple[int, float]:
        known = 10 * one.capability[0] + one.capability[1]
        there = inf if one.known_gpu is None else abs(log(_flop_per_byte(one.known_gpu) / _flop_per_byte(gpu)))
        return abs(known - 10 * gpu.cost_capability[0] - gpu.cost_capability[1]), there

    others = (one for one in shipped().values() if besides is None or one.gpu != besides.gpu)
    return min(others, key=distance, default=None)


def _flop_per_byte(gpu: GPU) -> float:
    """Return peak fp16 (or, without it, fp32) FLOP per byte of memory bandwidth."""
    return gpu.rates.get("fp16", gpu.rates["fp32"]) / gpu.bandwidth_bytes_per_second


def cost_model_from(
    gpu: GPU, measured: Calibration | None, *, tf32: bool | None = None, links: Links | None = None
) -> CostModel:
    """Build the cost model of a GPU from a calibration of it or of another GPU, or from the data sheet if ``None``."""
    chip = chip_of(gpu, tf32)._replace(links=links)
    calibrated = measured is not None and measured.is_of(gpu)
    if measured is None:
        return CostModel(chip, gap_seconds(None), power=power_of(gpu), unmeasured=gpu.is_amd)
    points = efficiency_points(measured.known_gpu or gpu, measured)
    gap = gap_seconds(measured)
    source = f"calibration of {measured.gpu}, {measured.environment['date']}"
    if not calibrated:
        source += f", extrapolated to the data sheet of {gpu.name}"
        if (known := products_of(gpu.cost_capability, "half")) is not None:
            source += f"; matrix products in 16 bits as published of {find_gpu(known.gpu).name}"
    extrapolation = SAME_GPU
    if not calibrated and measured.known_gpu is not None:
        extrapolation = extrapolation_between(measured.known_gpu, gpu)
    unmeasured = gpu.is_amd and not calibrated
    if unmeasured:
        source += "; unmeasured: no time of an AMD GPU was compared"
    return CostModel(chip, gap, points, extrapolation, source, calibrated, unmeasured, power_of(gpu))


def gap_seconds(measured: Calibration | None) -> float:
    """Return the idle time between consecutive kernels: as calibrated, or a general figure if it was not measured."""
    waiting = measured.sections.get("device", {}).get("waiting", {}) if measured else {}
    if "gap_us" in waiting:
        return float(waiting["gap_us"]) * 1e-6
    return float(read_yaml("efficiency.yaml")["traffic"]["gap_seconds"])


@lru_cache(maxsize=16)
def efficiency_points(gpu: GPU, measured: Calibration) -> EfficiencyPoints:
    """Return the points of a calibration of a GPU by kernel family, which all its cost models share."""
    chip = chip_of(gpu, None)
    name = next((name for name, one in shipped().items() if one is measured), "")
    return EfficiencyPoints(measured.points, chip, compiled_points(name, chip))
