"""The time of a step: prices, both clocks, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.hosts import reference_host
from trainatomy.results.operations import Operations
from trainatomy.results.time import Bound, Time
from trainatomy.timing.cost_model import CostModel, cost_model_of
from trainatomy.timing.extrapolation import attained
from trainatomy.timing.kernels import KernelCost, general_rule_only, kernel_seconds, precision_of
from trainatomy.timing.launch import PARTS, HostCosts, from_microseconds, issue_seconds, loop_seconds
from trainatomy.timing.memory import memory_costs, memory_work
from trainatomy.timing.timeline import Course, run

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.catalog.gpus import GPU
    from trainatomy.results.trace import DriverCall


def time_of(
    operations: Operations,
    gpu: GPU,
    *,
    loop: str,
    tf32: bool,
    samples: int,
    tokens_per_sample: int | None,
    calibration: Calibration | None = None,
    driver_calls: Sequence[DriverCall] = (),
    of_today: bool = True,
) -> Time:
    """How long the step takes on ``card``. ``loop``: trainer, pytorch or inference; ``samples``: of one step;
    ``calibration``: of a machine, in place of what ships; ``driver_calls``: what the allocator asked of the driver;
    ``of_today``: the software is of the versions that calibrations measured, so that their interval holds."""
    prices = cost_model_of(gpu, calibration, tf32=tf32)
    costs, host = _host(calibration)
    kernels = [kernel_seconds(call, prices) for call in operations.calls]
    busy = [(prices.busy_seconds(kernel), kernel.launches) for kernel in kernels]
    issue = list(issue_seconds(operations, costs, loop))
    memory = memory_work(operations, driver_calls, memory_costs(gpu, calibration))
    for index, work in memory.items():
        issue[index] += work.seconds
    drains = {index for index, work in memory.items() if work.waits}
    course = run(operations, issue, busy, costs, loop_seconds(operations, costs, loop), drains)
    bound = bound_by(operations, kernels, course)
    low, high = _interval("calibrated" if prices.calibrated and of_today else "uncalibrated", bound)
    flop = sum((operations.calls[one.call].flop or 0) * one.repeats for one in operations.operations)
    at_peak, attainable = _utilisation(operations, gpu, prices, course.seconds)
    rate = samples / course.seconds
    return Time(
        step_seconds=course.seconds,
        interval_seconds=(course.seconds * low, course.seconds * high),
        samples_per_second=rate,
        tokens_per_second=None if tokens_per_sample is None else rate * tokens_per_sample,
        bound_by=bound,
        gpu_seconds=course.gpu_seconds,
        host_seconds=course.host_seconds,
        phases=course.phase_gpu_seconds,
        flop=flop,
        flop_per_second=flop / course.seconds,
        model_flop_utilisation=at_peak,
        attainable_utilisation=attainable,
        launches=sum(kernels[one.call].launches * one.repeats for one in operations.operations),
        priced_by=prices.source,
        host=host,
        general_rule_only=tuple(sorted(general_rule_only(operations.calls))),
    )


def bound_by(operations: Operations, kernels: list[KernelCost], course: Course) -> Bound:
    """The host, where its work takes longer than the GPU's; else arithmetic or bandwidth, whichever bounds the kernels
    that take most of the time."""
    if course.host_seconds > course.gpu_seconds:
        return "host"
    arithmetic = traffic = 0.0
    for operation in operations.operations:
        kernel = kernels[operation.call]
        if kernel.flop_seconds > kernel.bytes_seconds:
            arithmetic += kernel.seconds * operation.repeats
        else:
            traffic += kernel.seconds * operation.repeats
    return "arithmetic" if arithmetic > traffic else "memory bandwidth"


def _utilisation(
    operations: Operations, gpu: GPU, prices: CostModel, seconds: float
) -> tuple[float | None, float | None]:
    """The model's FLOP at the peak of each precision, and at what the best products attain of it, over the step's
    time. What is computed again in backward is no part of the model."""
    at_peak = attainable = 0.0
    known = True
    for index, count in _model_runs(operations).items():
        call = operations.calls[index]
        rate = precision_of(call, prices.chip)
        ideal = (call.flop or 0) * count / prices.chip.rate(rate)
        share = attained(gpu, rate)
        known = known and share is not None
        at_peak += ideal
        attainable += ideal / (share or 1.0)
    if not at_peak:
        return None, None
    return at_peak / seconds, attainable / seconds if known else None


def _model_runs(operations: Operations) -> dict[int, int]:
    """How often each call with FLOP runs in a step, recomputation left out; by index of the call."""
    runs: dict[int, int] = {}
    for operation in operations.operations:
        if operation.phase != "recompute" and operations.calls[operation.call].flop:
            runs[operation.call] = runs.get(operation.call, 0) + operation.repeats
    return runs


def _host(calibration: Calibration | None) -> tuple[HostCosts, str]:
    """The reference host's costs: by the factors of ``calibration`` where it has some against this reference; parts
    without one are as on a quiet occasion."""
    known = reference_host()
    section = calibration.sections.get("host", {}) if calibration else {}
    if section.get("reference") == known.id:
        factors = {**dict.fromkeys(PARTS, known.quiet), **section.get("factors", {})}
        return from_microseconds(known.microseconds, factors), f"as calibrated, beside {known.name}"
    return from_microseconds(known.microseconds, dict.fromkeys(PARTS, known.quiet)), known.name


def _interval(basis: str, bound: Bound) -> tuple[float, float]:
    low, high = read_yaml("intervals.yaml")[basis]["host" if bound == "host" else "gpu"]
    return low, high
