"""Predict the time of a training step: GPU costs, CPU costs, and both replayed on their timelines.

The time of a mean step, where steps of two kinds take turns: one in so many generates, the others do not.

Times at which each operation of a step is launched and executed, as the timing model follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from trainatomy.catalog.machines import reference_host
from trainatomy.operators.traffic import crosses
from trainatomy.results.operations import Call, Operations
from trainatomy.results.time import Bound, Communication, PacedStep, Pipeline, Time
from trainatomy.results.trace import DriverCall, TimedOperation
from trainatomy.timing.contention import contention_in, power_in, slowed
from trainatomy.timing.cost_model import (
    CostModel,
    KernelCost,
    cost_model_of,
    general_rule_only,
    kernel_cost,
    precision_of,
)
from trainatomy.timing.extrapolation import attainable_share
from trainatomy.timing.host_costs import (
    PARTS,
    CPUCosts,
    by_one_thread,
    cpu_costs,
    driver_costs,
    driver_work,
    first_call_seconds,
    not_collating,
)
from trainatomy.timing.intervals import convolution_share, interval_name, interval_seconds, slow_pace
from trainatomy.timing.launch import backward_share, batch_bytes, launch_seconds, loop_seconds
from trainatomy.timing.one_stream import COLLECTIVES, StepTimeline
from trainatomy.timing.streams import OnLaunch
from trainatomy.timing.timeline import LaunchCosts, has_one_stream, replay_step

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.catalog.gpus import GPU
    from trainatomy.catalog.links import Links


def mean_over_period(rare: Time, other: Time, period: int) -> Time:
    """Return the time of the mean step of ``period`` steps, of which one is ``rare`` and the rest are like ``other``.

    What is in seconds and what is counted is a mean; rates follow from it.  The rest is that of the kind that takes
    most of the time.
    """
    share = 1 / period

    def mean(one: float, another: float) -> float:
        return share * one + (1 - share) * another

    def of_time(one: float | None, another: float | None) -> float | None:
        if one is None or another is None:
            return None
        return mean(one * rare.step_seconds, another * other.step_seconds) / seconds

    seconds, flop = mean(rare.step_seconds, other.step_seconds), mean(rare.flop, other.flop)
    rate = rare.step_seconds / seconds
    longest = rare if rare.step_seconds > (period - 1) * other.step_seconds else other
    return replace(
        longest,
        step_seconds=seconds,
        interval_seconds=(
            mean(rare.interval_seconds[0], other.interval_seconds[0]),
            mean(rare.interval_seconds[1], other.interval_seconds[1]),
        ),
        samples_per_second=rare.samples_per_second * rate,
        tokens_per_second=None if rare.tokens_per_second is None else rare.tokens_per_second * rate,
        gpu_seconds=mean(rare.gpu_seconds, other.gpu_seconds),
        host_seconds=mean(rare.host_seconds, other.host_seconds),
        phases={
            phase: mean(rare.phases.get(phase, 0.0), other.phases.get(phase, 0.0))
            for phase in {**rare.phases, **other.phases}
        },
        flop=round(flop),
        flop_per_second=flop / seconds,
        model_flop_utilisation=of_time(rare.model_flop_utilisation, other.model_flop_utilisation),
        attainable_utilisation=of_time(rare.attainable_utilisation, other.attainable_utilisation),
        launches=round(mean(rare.launches, other.launches)),
        general_rule_only=tuple(sorted({*rare.general_rule_only, *other.general_rule_only})),
        power=None,  # it differs between the two kinds
        at_paces=tuple(
            PacedStep(one.pace, mean(one.step_seconds, another.step_seconds))
            for one, another in zip(rare.at_paces, other.at_paces, strict=True)
        ),
        slow_host=rare.slow_host
        and other.slow_host
        and replace(rare.slow_host, step_seconds=mean(rare.slow_host.step_seconds, other.slow_host.step_seconds)),
    )


Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's step: what it executes, and where and how it runs.

    Attributes:
        operations: Its operations.
        gpu: The GPU it runs on.
        loop: Key of the CPU costs of the loop: trainer, pytorch, inference or evaluation.
        tf32: Whether fp32 matrix products and convolutions may use tensor cores; None: only convolutions may.
        samples: Samples that the rank processes in a step.
        calibration: A calibration to use instead of the shipped ones.
        driver_calls: The allocator's calls to the driver, from replaying the whole allocation trace.
        links: The links to the other GPUs; None: there are none.
        collated: Whether the loop makes batches of samples.  If not, a function returns them as they are, and the CPU
            only waits until they are copied.
        one_thread: Whether operations on tensors of the CPU run on one thread, as in processes that torchrun starts.
    """

    operations: Operations
    gpu: GPU
    loop: str
    tf32: bool | None
    samples: int
    calibration: Calibration | None = None
    driver_calls: Sequence[DriverCall] = ()
    links: Links | None = None
    collated: bool = True
    one_thread: bool = False

    @property
    def cost_model(self) -> CostModel:
        """The cost model of its GPU."""
        return cost_model_of(self.gpu, self.calibration, tf32=self.tf32, links=self.links)

    def kept(self, name: str, pace: float, make: Callable[[], Kept]) -> Kept:
        """Return what its operations keep of the CPU's times, or make it: it does not depend on the GPU."""
        key = name, len(self.operations.operations), pace, self.loop, self.samples, self.collated, self.one_thread
        before, found = self.operations.on_host.get(key, (None, None))
        if found is None or before is not self.calibration:
            found = make()
            self.operations.on_host[key] = self.calibration, found
        return cast("Kept", found)

    def cpu_costs(self, pace: float) -> CPUCosts:
        """Return the CPU costs on a host that takes ``pace`` times as long as the assumed one."""
        costs = _cpu_costs(self.calibration, pace)[0]
        if not self.collated:
            costs = not_collating(costs)
        return by_one_thread(costs) if self.one_thread else costs

    def launches(self, pace: float) -> tuple[float, ...]:
        """Return the CPU time of each operation on such a host, without the driver's work."""
        return self.kept(
            "launches", pace, lambda: tuple(launch_seconds(self.operations, self.cpu_costs(pace), self.loop))
        )

    def backward_share(self) -> float:
        """Return the share of the CPU time that autograd's thread spends, as in a loop that collates on all threads."""
        costs = _cpu_costs(self.calibration)[0]
        launches = self.launches(1.0) if costs == self.cpu_costs(1.0) else None
        return backward_share(self.operations, costs, self.loop, launches)


def predict_step_time(
    step: RankStep,
    *,
    tokens_per_sample: int | None,
    current_software: bool = True,
    gpus: int = 1,
    data_parallel_size: int = 1,
    pipeline: Pipeline | None = None,
    paces: Sequence[float] = (),
) -> Time:
    """Predict how long a rank's step takes.

    Args:
        step: The step.
        tokens_per_sample: Tokens of a sample, or ``None`` if samples are not text.
        current_software: Whether the software is of the versions that the calibrations measured.  If not, the
            uncalibrated interval applies.
        gpus: GPUs of the training.
        data_parallel_size: Ranks that process different samples.
        pipeline: The step of the whole pipeline that the rank belongs to; its ``paces`` are not predicted here.
        paces: CPU times as multiples of the assumed host's, for each of which the step is predicted too.
    """
    operations, cost_model = step.operations, step.cost_model
    kernels = [kernel_cost(call, cost_model) for call in operations.calls]
    timeline, bubble, slow_host = replayed(step), 0.0, None
    if _host_section(step.calibration) is None:
        slow_host = PacedStep(slow_pace(), replayed(step, pace=slow_pace()).seconds)
    if pipeline is not None:
        if slow_host is not None:
            slow_host = replace(
                slow_host, step_seconds=pipeline.step_seconds * slow_host.step_seconds / timeline.seconds
            )
        timeline.seconds, bubble = pipeline.step_seconds, pipeline.bubble_share
    bound = bound_by(operations, kernels, timeline)
    calibrated = cost_model.calibrated and current_software and bound != "transfers"
    flop = sum((operations.calls[one.call].flop or 0) * one.repeats for one in operations.operations)
    at_peak, attainable = _utilisation(step, timeline.seconds)
    rate = step.samples / timeline.seconds
    tokens = None if tokens_per_sample is None else rate * tokens_per_sample
    return Time(
        step_seconds=timeline.seconds,
        interval_seconds=interval_seconds(
            timeline.seconds,
            slow_host,
            bound,
            interval_name(calibrated=calibrated, unmeasured=cost_model.unmeasured),
            convolving=convolution_share(operations, kernels),
        ),
        samples_per_second=rate,
        tokens_per_second=tokens,
        bound_by=bound,
        gpu_seconds=timeline.gpu_seconds,
        host_seconds=timeline.cpu_seconds,
        phases=timeline.phase_gpu_seconds,
        flop=flop,
        flop_per_second=flop / timeline.seconds,
        model_flop_utilisation=at_peak,
        attainable_utilisation=attainable,
        launches=sum(kernels[one.call].launches * one.repeats for one in operations.operations),
        priced_by=cost_model.source,
        host=_cpu_costs(step.calibration)[1],
        general_rule_only=tuple(sorted(general_rule_only(operations.calls))),
        communication=_communication(timeline, step.links, gpus, data_parallel_size, rate, tokens, bubble),
        pipeline=pipeline,
        power=None if pipeline is not None else timeline.power,
        at_paces=tuple(
            PacedStep(pace, replayed(step, pace=pace).seconds) for pace in sorted(paces if pipeline is None else ())
        ),
        probe_seconds=probe_seconds(step.calibration),
        backward_host_share=step.kept("backward", 1.0, step.backward_share),
        slow_host=slow_host,
        calibrated=calibrated,
        first_step_extra_seconds=first_call_seconds(operations.calls),
    )


def replayed(
    step: RankStep, *, at_once: Collection[str] = (), pace: float = 1.0, on_launch: OnLaunch | None = None
) -> StepTimeline:
    """Replay a rank's step; operations named in ``at_once`` take no time, the CPU ``pace`` times as long.

    Copies of batches also take longer beside a slower CPU.  Where the GPU would draw more power than it may, arithmetic
    takes longer (``power.py``), except with ``at_once``.  ``on_launch``: see ``replay_streams``.
    """
    operations, cost_model = step.operations, step.cost_model
    slower_copies = pace ** reference_host().copy_exponent
    kernels = [
        KernelCost(0.0, 0.0, 0.0, 0)
        if call.name in at_once
        else _at_pace(call, kernel_cost(call, cost_model), slower_copies)
        for call in operations.calls
    ]
    costs = _launch_costs(step, pace)

    def replay(kernels: Sequence[KernelCost], on_launch: OnLaunch | None) -> StepTimeline:
        busy = [(cost_model.busy_seconds(kernel), kernel.launches) for kernel in kernels]
        return replay_step(operations, busy, costs, on_launch, contention_in(operations, kernels, cost_model.chip))

    if cost_model.power is None or at_once:
        return replay(kernels, on_launch)
    noted: list[tuple[int, float, float, float, float]] = []
    notes = on_launch is not None and not has_one_stream(operations)  # a step on one stream is replayed without
    timeline = replay(kernels, (lambda *launch: noted.append(launch)) if notes else None)
    power = power_in(operations, kernels, timeline.seconds, cost_model.power)
    if power.slowdown > 1 or (on_launch is not None and not notes):
        timeline = replay(slowed(kernels, power.slowdown), on_launch)
    elif on_launch is not None:
        for launch in noted:
            on_launch(*launch)
    timeline.power = power
    return timeline


def _launch_costs(step: RankStep, pace: float) -> LaunchCosts:
    """Return the CPU's times in a step, with the driver's work added to the launches that cause it."""
    costs, operations = step.cpu_costs(pace), step.operations
    driver = driver_work(operations, step.driver_calls, driver_costs(step.gpu, step.calibration))
    launches = list(step.launches(pace))
    for index, work in driver.items():
        launches[index] += work.seconds
    synchronized = {index for index, work in driver.items() if work.waits}
    of_loop = step.kept("loop", pace, lambda: loop_seconds(operations, costs, step.loop, step.samples))
    return LaunchCosts(launches, costs, of_loop, synchronized)


def _at_pace(call: Call, cost: KernelCost, slower_copies: float) -> KernelCost:
    """Return the cost of a call beside a host that takes ``slower_copies`` times as long to copy a batch."""
    return cost._replace(seconds=cost.seconds * slower_copies) if batch_bytes(call) else cost


def _communication(
    timeline: StepTimeline,
    links: Links | None,
    gpus: int,
    data_parallel_size: int,
    samples_per_second: float,
    tokens_per_second: float | None,
    bubble_share: float,
) -> Communication | None:
    """Return the figures of a training on several GPUs."""
    if links is None:
        return None
    lost = timeline.exposed_seconds + timeline.slowed_seconds
    return Communication(
        seconds=timeline.communication_seconds,
        exposed_seconds=timeline.exposed_seconds,
        slowed_seconds=timeline.slowed_seconds,
        scaling_efficiency=max(1 - lost / timeline.seconds - bubble_share, 0.0),
        gpus=gpus,
        data_parallel_size=data_parallel_size,
        total_samples_per_second=samples_per_second * data_parallel_size,
        total_tokens_per_second=None if tokens_per_second is None else tokens_per_second * data_parallel_size,
        links=links.names,
        links_assumed=links.assumed,
    )


def bound_by(operations: Operations, kernels: Sequence[KernelCost], timeline: StepTimeline) -> Bound:
    """Return what bounds the step.

    ``host`` if the CPU is busy for longer than the GPU; otherwise communication, copies between CPU and GPU
    (``transfers``), arithmetic or memory bandwidth, whichever takes most of the GPU's time: communication where it is
    exposed, arithmetic and memory bandwidth by what bounds the kernels.
    """
    if timeline.cpu_seconds > timeline.gpu_seconds:
        return "host"
    arithmetic = traffic = transfers = 0.0
    for operation in operations.operations:
        kernel, call = kernels[operation.call], operations.calls[operation.call]
        if call.name.startswith(COLLECTIVES):
            continue
        if crosses(call):
            transfers += kernel.seconds * operation.repeats
        elif kernel.flop_seconds > kernel.bytes_seconds:
            arithmetic += kernel.seconds * operation.repeats
        else:
            traffic += kernel.seconds * operation.repeats
    if timeline.exposed_seconds > max(arithmetic, traffic, transfers):
        return "communication"
    if transfers > max(arithmetic, traffic):
        return "transfers"
    return "arithmetic" if arithmetic > traffic else "memory bandwidth"


def _utilisation(step: RankStep, seconds: float) -> tuple[float | None, float | None]:
    """Return model FLOP utilisation (MFU) and the same relative to the rate that the best products attain.

    Each is the time of the model's FLOP at that rate, by precision, over the step's time.  Recomputation in the
    backward pass does not count as FLOP of the model.
    """
    at_peak = attainable = 0.0
    known, chip = True, step.cost_model.chip
    for index, count in _model_runs(step.operations).items():
        call = step.operations.calls[index]
        rate = precision_of(call, chip)
        ideal = (call.flop or 0) * count / chip.rate(rate)
        share = attainable_share(step.gpu, rate)
        known = known and share is not None
        at_peak += ideal
        attainable += ideal / (share or 1.0)
    if not at_peak:
        return None, None
    return at_peak / seconds, attainable / seconds if known else None


def _model_runs(operations: Operations) -> dict[int, int]:
    """Count how often each call with FLOP runs in a step, recomputation left out, by index of the call."""
    runs: dict[int, int] = {}
    for operation in operations.operations:
        if operation.phase != "recompute" and operations.calls[operation.call].flop:
            runs[operation.call] = runs.get(operation.call, 0) + operation.repeats
    return runs


def _cpu_costs(calibration: Calibration | None, pace: float = 1.0) -> tuple[CPUCosts, str]:
    """Return the CPU costs and the name of the host they belong to.

    They are the reference host's, scaled by the factors of ``calibration`` if it was compared with the same reference.
    Parts without a factor are taken as on an otherwise idle host.  All are multiplied by ``pace``.
    """
    known = reference_host()
    factors, name = dict.fromkeys(PARTS, known.quiet), known.name
    if (section := _host_section(calibration)) is not None:
        factors, name = {**factors, **section.get("factors", {})}, f"as calibrated, beside {known.name}"
    return cpu_costs(known.microseconds, factors, pace, known.recurrent_exponent, known.copy_exponent), name


def probe_seconds(calibration: Calibration | None) -> dict[str, float]:
    """Return the time of the probe of a host's pace, by its name, on the host whose CPU costs are assumed."""
    section = _host_section(calibration)
    if section is None:
        return dict(reference_host().probe_seconds)
    return {name: value / 1e6 for name, value in section.get("probe_us", {}).items()}


def _host_section(calibration: Calibration | None) -> Mapping[str, Any] | None:
    """Return what a calibration says of its host, if it was compared with the reference host."""
    section: Mapping[str, Any] = calibration.sections.get("host", {}) if calibration else {}
    return section if section.get("reference") == reference_host().id else None


def timed_operations(step: RankStep) -> tuple[tuple[TimedOperation, ...], float]:
    """Return the operations of a rank's step with their times, in launch order, and the step's duration.

    Views are left out.  In a pipeline the rank works without pauses, as if it never waited for another.
    """
    operations = step.operations
    found: list[TimedOperation] = []

    def note(index: int, launched: float, launch_end: float, begin: float, seconds: float) -> None:
        operation = operations.operations[index]
        call = operations.calls[operation.call]
        if call.is_view:
            return
        found.append(
            TimedOperation(
                name=call.name,
                module=operation.module,
                phase=operation.phase,
                stream=operation.stream,
                launched=launched,
                launch_seconds=launch_end - launched,
                begin=begin,
                seconds=seconds,
                event=operation.event,
            )
        )

    seconds = replayed(step, on_launch=note).seconds
    return tuple(found), seconds
