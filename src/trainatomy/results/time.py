"""The predicted time of a training step, and what bounds it, as plain values.

Work of the ranks of a pipeline in a step, as plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

from trainatomy.results.measurement import HostPace

Bound = Literal["arithmetic", "memory bandwidth", "host", "communication", "transfers"]


@dataclass(frozen=True, slots=True)
class Communication:
    """Time that a step on several GPUs spends on communication, and the throughput of all of them together.

    Attributes:
        seconds: Sum of the durations of this rank's collectives.
        exposed_seconds: Time in which the GPU does nothing else: a collective runs and no kernel of the model.
        scaling_efficiency: The step's time without exposed communication, without the time that kernels take longer
            beside it, and without the bubble of a pipeline, over the step's time: the rate of one of these GPUs
            relative to one that does the same work and waits for nobody.
        gpus: GPUs of the training.
        data_parallel_size: Ranks that process different samples.
        total_samples_per_second: Samples that all ranks process per second.
        total_tokens_per_second: Tokens that all ranks process per second; None if samples are not text.
        links: Names of the links: inside a machine, then between machines.
        links_assumed: True if nobody said what joins the machines.
        slowed_seconds: Time that the model's kernels take longer because collectives run beside them.
    """

    seconds: float
    exposed_seconds: float
    scaling_efficiency: float
    gpus: int
    data_parallel_size: int
    total_samples_per_second: float
    total_tokens_per_second: float | None
    links: tuple[str, ...]
    links_assumed: bool = False
    slowed_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The step of a whole pipeline, of which a rank runs some stages.

    Attributes:
        schedule: PyTorch's name of the order of work.
        stages: Number of stages.
        micro_batches: Number of micro-batches in a step.
        step_seconds: Duration of the step, by the dependencies between the stages.
        bubble_share: Share of all ranks' time in which they wait for each other.
        rank_seconds: Time in which each rank of the pipeline works, in the order of the ranks.
    """

    schedule: str
    stages: int
    micro_batches: int
    step_seconds: float
    bubble_share: float
    rank_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PacedStep:
    """The predicted time of a step on a host whose CPU takes `pace` times as long as the one assumed."""

    pace: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Power:
    """The GPU's mean power in a step.

    Attributes:
        watts: Mean power; at most the limit.
        full_clock_watts: Mean power that the step would draw at full clocks.
        limit_watts: Power that the driver allows.
        slowdown: How many times as long arithmetic takes at the clocks that the limit allows.
    """

    watts: float
    full_clock_watts: float
    limit_watts: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class Time:
    """The time of one optimizer step (in inference, of one forward pass) on one rank.

    Attributes:
        step_seconds: Duration of the step.
        interval_seconds: Low and high end of the interval that holds in 9 of 10 cases like those it was derived from.
        samples_per_second: Samples that the rank processes per second.
        tokens_per_second: Tokens that it processes per second; None if samples are not text.
        bound_by: `host` if launching the work takes the CPU longer than executing it takes the GPU; otherwise what most
            of the GPU's time goes into; `communication` if that is waiting for other GPUs.
        gpu_seconds: Time in which the GPU executes kernels.
        host_seconds: Time in which the CPU is busy.
        phases: The GPU's seconds by phase.
        flop: FLOP by PyTorch's formulas, recomputation included.
        flop_per_second: `flop` over the step's time.
        model_flop_utilisation: MFU: the time that the model's FLOP (without recomputation) would take at the data
            sheet's peak of each precision, over the step's time. None if no operation has a formula.
        attainable_utilisation: The same at the rates that large matrix products are known to attain. Also None if
            nobody published them for a precision.
        launches: Number of kernels.
        priced_by: Where the costs of kernels come from: a calibration or the data sheet.
        host: The host whose CPU costs are assumed.
        general_rule_only: Operators whose time is predicted from their memory traffic alone.
        communication: Figures of a training on several GPUs; None on one.
        pipeline: The step of the whole pipeline; None without one.
        power: The GPU's mean power; None where that of its architecture was not measured, in pipelines, and where
            batches differ in length.
        at_paces: The step on faster and slower hosts, where that was asked for, slowest last.
        first_epoch_extra_seconds: What the mean step of a first epoch takes longer, because libraries plan operators
            anew for each length of batches; not part of `step_seconds`.
        first_step_extra_seconds: What the first step takes longer, because libraries plan its operators; not part of
            `step_seconds`. 0 where batches differ in length, whose first epoch takes longer.
        probe_seconds: Time of the probe of a host's pace on the assumed host, by the probe's name; empty: not known.
        backward_host_share: Share of the CPU's time that the thread spends which launches backward passes; None: not
            known.
        slow_host: The step on the slowest of the hosts that `interval_seconds` covers; None where a calibration has
            measured the host.
        calibrated: Whether a calibration has measured such a GPU with this software; other intervals are wider.
    """

    step_seconds: float
    interval_seconds: tuple[float, float]
    samples_per_second: float
    tokens_per_second: float | None
    bound_by: Bound
    gpu_seconds: float
    host_seconds: float
    phases: dict[str, float]
    flop: int
    flop_per_second: float
    model_flop_utilisation: float | None
    attainable_utilisation: float | None
    launches: int
    priced_by: str
    host: str
    general_rule_only: tuple[str, ...]
    communication: Communication | None = None
    pipeline: Pipeline | None = None
    power: Power | None = None
    at_paces: tuple[PacedStep, ...] = ()
    first_epoch_extra_seconds: float = 0.0
    first_step_extra_seconds: float = 0.0
    probe_seconds: dict[str, float] = field(default_factory=dict)
    backward_host_share: float | None = None
    slow_host: PacedStep | None = None
    calibrated: bool = True

    def pace_of(self, host: HostPace) -> float | None:
        """Return the pace of a measured host beside the assumed one; None where the latter is not known."""
        assumed = self.probe_seconds.get(host.probe)
        return None if assumed is None else host.beside(assumed, self.backward_host_share)

    @property
    def first_epoch_step_seconds(self) -> float:
        """The mean step of an epoch whose lengths have not occurred before, which is what a measurement times."""
        return self.step_seconds + self.first_epoch_extra_seconds

    def step_seconds_at(self, pace: float) -> float | None:
        """Return the time of the step on a host of this pace, from `at_paces`; None outside of them.

        Between two of them it is interpolated. A step is a maximum of sums of CPU times and GPU times, which is convex
        in the pace, so the result is never too short.
        """
        known = sorted([*((one.pace, one.step_seconds) for one in self.at_paces), (1.0, self.step_seconds)])
        for (low, fast), (high, slow) in pairwise(known):
            if low <= pace <= high:
                return fast + (slow - fast) * (pace - low) / (high - low) if high > low else fast
        return self.step_seconds if pace == 1.0 else None


class Work(NamedTuple):
    """A part of a micro-batch in a stage.

    Attributes:
        kind: ``forward``, ``backward``, or a half of a divided backward pass: ``backward_input``, ``backward_weight``.
        stage: Index of the stage in the whole pipeline.
        micro_batch: Index of the micro-batch in the step.
    """

    kind: str
    stage: int
    micro_batch: int


class StageRun(NamedTuple):
    """Begin and end of the operations of a part of a micro-batch, as indices into ``Operations.operations``."""

    work: Work
    begin: int
    end: int
