"""A training that was measured on a GPU.

Pace of a machine's CPU while a training ran on it.

Power, clock and heat of a GPU while a training ran on it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import fmean
from typing import Literal

from trainatomy.results.host import HostBill
from trainatomy.results.loader import DataWait
from trainatomy.results.memory import Memory, ModuleActivations, OutOfMemoryPoint
from trainatomy.results.tasks import Checkpoint, Evaluation, Generation, RestoredCheckpoint

TRIMMED_SHARE = 0.2
"""Share of the readings that are left out at either end before the mean is taken: some are of stalls."""


@dataclass(frozen=True, slots=True)
class HostPace:
    """Seconds that a fixed piece of CPU work (the probe) took, on the threads that launch the kernels of a training.

    Attributes:
        probe: Name and version of the work; only times of the same probe can be compared.
        before_seconds: Times just before the first timed step.
        during_seconds: Times between timed steps.
        after_seconds: Times just after the last one.
        reference_seconds: Time on the reference host while nothing else ran on it; ``None``: not known.
        others_share: Time that other processes ran meanwhile, as a share of all processors' time; ``None``: not known.
        stolen_share: Time that the hypervisor gave to other machines, likewise.
        throttled_share: Share of the time in which the container's limit of processors stopped its processes.
        waited_share: Waits for a processor, as a share of the time in which the launching threads ran or waited;
            ``None``: not known.
        exponent: Power of the probe's time with which a step's CPU time grows.
        backward_seconds: The part of each time that autograd's thread took, which launches backward passes; in the
            order of the times before, between and after the steps.  Empty: not known.
        backward_reference_share: That part's share of ``reference_seconds``; ``None``: not known.
    """

    probe: str
    before_seconds: tuple[float, ...] = ()
    during_seconds: tuple[float, ...] = ()
    after_seconds: tuple[float, ...] = ()
    reference_seconds: float | None = None
    others_share: float | None = None
    stolen_share: float | None = None
    throttled_share: float | None = None
    waited_share: float | None = None
    exponent: float = 1.0
    backward_seconds: tuple[float, ...] = ()
    backward_reference_share: float | None = None

    @property
    def seconds(self) -> float:
        """Mean time beside the steps, without the extremes: the last one before them, those between, the first after.

        A step takes as long as its parts together, so that a mean says more of it than a median does.  Where nothing
        was read between steps, all times before and after them count.
        """
        return _mean_beside(self.before_seconds, self.during_seconds, self.after_seconds)

    @property
    def relative(self) -> float | None:
        """The pace beside the reference host's; above 1 this host was slower."""
        return None if self.reference_seconds is None else self.beside(self.reference_seconds)

    def beside(self, seconds: float, backward_share: float | None = None) -> float:
        """Return the pace as a multiple of that of a host on which the probe takes so long and no thread waits.

        Args:
            seconds: Time of the probe on that host.
            backward_share: Share of a step's CPU time that autograd's thread spends.  The two threads are on different
                processors, each of which other work may slow, so that each share counts at its own thread's pace.
        """
        running = 1.0 - (self.waited_share or 0.0)
        parts = self._parts()
        if backward_share is None or parts is None or self.backward_reference_share is None:
            return float((self.seconds / seconds) ** self.exponent / running)
        main, backward = parts
        reference = self.backward_reference_share * seconds
        main_pace = (main / (seconds - reference)) ** self.exponent
        backward_pace = (backward / reference) ** self.exponent
        return float(((1 - backward_share) * main_pace + backward_share * backward_pace) / running)

    def _parts(self) -> tuple[float, float] | None:
        """Return the mean times of the probe on the main thread and on autograd's; ``None``: not known."""
        times = (self.before_seconds, self.during_seconds, self.after_seconds)
        if len(self.backward_seconds) != sum(map(len, times)):
            return None
        left = iter(self.backward_seconds)
        backward = [tuple(next(left) for _ in part) for part in times]
        main = [
            tuple(a - b for a, b in zip(part, taken, strict=True)) for part, taken in zip(times, backward, strict=True)
        ]
        return _mean_beside(*main), _mean_beside(*backward)


def _mean_beside(before: tuple[float, ...], during: tuple[float, ...], after: tuple[float, ...]) -> float:
    beside = sorted((*before[-1:], *during, *after[:1]) if during else (*before, *after))
    left_out = max(1, int(TRIMMED_SHARE * len(beside)))
    return fmean(beside[left_out:-left_out] or beside)


ClockReason = Literal[
    "idle",
    "clock setting",
    "power cap",
    "hardware slowdown",
    "sync boost",
    "thermal",
    "hardware thermal",
    "power brake",
    "display clock setting",
]
"""Why the driver lowers the clock, as NVML's bits of clock event reasons say it, in the order of the bits."""


@dataclass(frozen=True, slots=True)
class PowerSample:
    """A reading of the GPU; ``None``: the driver does not report it.

    Attributes:
        seconds: Time since the first timed step began.
        watts: Power draw.
        clock_mhz: Clock of the multiprocessors.
        celsius: Temperature.
        reasons: Why the clock was below its maximum.
    """

    seconds: float
    watts: float | None
    clock_mhz: int | None
    celsius: int | None
    reasons: tuple[ClockReason, ...] = ()


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A stretch of the run in which the driver lowered the clock.

    Attributes:
        reason: Why.
        first_step: First step in it, from 0.
        last_step: Last step in it.
        time_share: Its share of the timed seconds.
        clock_loss: Mean clock in it below the maximum, as a share of the maximum; ``None``: not known.
    """

    reason: ClockReason
    first_step: int
    last_step: int
    time_share: float
    clock_loss: float | None


@dataclass(frozen=True, slots=True)
class PowerLimits:
    """Limits of the GPU; ``None``: the driver does not report it."""

    watts: float | None = None
    default_watts: float | None = None
    clock_mhz: int | None = None
    celsius: int | None = None


@dataclass(frozen=True, slots=True)
class PowerUse:
    """Power of the whole GPU during the timed steps, sampled by a thread.

    Attributes:
        seconds: Duration of the timed steps.
        joules: Energy in them; ``None``: the run was too short, or the driver reports none.
        counted: The energy is that of the GPU's counter; otherwise it is the integral of the sampled power.
        joules_per_sample: Energy of one training sample.
        joules_per_token: Energy of one token; ``None`` if samples are not text.
        limits: The GPU's limits.
        slowdowns: Where the driver lowered the clock.
        samples: The readings; of a long run every second, fourth … one.
        reading_seconds: Mean time that the thread took for a reading.
        period_seconds: Time from one reading to the next.
    """

    seconds: float
    joules: float | None
    counted: bool
    joules_per_sample: float | None
    joules_per_token: float | None
    limits: PowerLimits
    slowdowns: tuple[Slowdown, ...]
    samples: tuple[PowerSample, ...]
    reading_seconds: float
    period_seconds: float


Status = Literal["completed", "out of memory"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Memory held at one stage of a measured run, in bytes; ``None`` where the driver does not report it.

    ``name`` is idle, first tensor, model loaded or training (its peak). ``device_bytes`` is the process as nvidia-smi
    shows it; ``nvml_used_bytes`` is the raw ``used`` of the first version of the NVML call, which includes the
    driver's own reservation.
    """

    name: str
    device_bytes: int | None
    nvml_used_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Another process on the GPU during the run, and the most it held (``None``: the driver does not report it)."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """One process of a training that was measured on several GPUs; the fields are those of ``Measurement``."""

    rank: int
    status: Status
    message: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int | None
    context_bytes: int | None
    nccl_bytes: int | None
    model_bytes: int | None
    num_alloc_retries: int
    step_seconds: float | None
    synchronized_step_seconds: float | None
    steps: int
    memory: Memory | None = None
    modules: tuple[ModuleActivations, ...] = ()
    timed_step_seconds: tuple[float, ...] = ()
    recorded_step_seconds: float | None = None
    out_of_memory: OutOfMemoryPoint | None = None
    host_pace: HostPace | None = None

    @classmethod
    def of(cls, measurement: Measurement) -> RankMeasurement:
        """Return what ``measurement`` says of its own rank."""
        return cls(**{each.name: getattr(measurement, each.name) for each in fields(cls)})


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same step on a GPU; ``None`` where a figure could not be read.

    ``device_bytes`` is the process as nvidia-smi shows it (NVML's figure less the driver's own reservation),
    ``process_bytes`` NVML's own figure for the process, ``nvml_used_bytes`` the raw ``used`` of the first version of
    the NVML call, ``idle_bytes`` the same before the first tensor, and ``context_bytes`` what the first tensor added
    outside of PyTorch's allocator.

    ``memory`` is the breakdown at the measured peak, from the allocations recorded on the GPU; its total equals
    ``device_bytes`` where that is known.  ``step_seconds`` is the median of ``timed_step_seconds``: the steps after
    the warm-up of a run without recording; their mean with ``data.lengths``.
    ``recorded_step_seconds`` is the median of the run whose allocations were recorded (``None`` without one).
    ``out_of_memory`` is the failed allocation and the memory held then.  ``tape_file`` is the file with the
    allocation trace; ``neighbours`` are other processes on the GPU.

    On several GPUs the figures are those of the process ``rank``, which is 0 unless only another one ran out of memory;
    ``other_ranks`` holds the others, and rates are those of the rank itself.  ``nccl_bytes`` is what the process
    group and its first collective took outside of PyTorch's allocator.  ``synchronized_step_seconds`` is the median of
    steps after each of which the CPU waited for the GPU.  ``evaluation`` is the evaluation that ran
    during the training.  ``host_pace``, ``power`` and ``data_wait`` are the CPU's speed, the GPU's power and the
    time that steps waited for their data, all during the timed steps.  ``skipped_steps`` is the number of first
    optimizer steps that gradient scaling skipped; ``None`` where it decides about none.  ``host_bill`` is what this
    process and those that it started took of the host.
    """

    name: str
    workload: dict[str, object]
    status: Status
    gpu: str
    driver: str
    versions: dict[str, str]
    date: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int | None
    process_bytes: int | None
    nvml_used_bytes: int | None
    idle_bytes: int | None
    context_bytes: int | None
    model_bytes: int | None
    num_alloc_retries: int
    step_seconds: float | None
    steps: int
    message: str
    tape_file: str | None
    memory: Memory | None = None
    modules: tuple[ModuleActivations, ...] = ()
    stages: tuple[Stage, ...] = ()
    timed_step_seconds: tuple[float, ...] = ()
    recorded_step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    neighbours: tuple[OtherProcess, ...] = ()
    out_of_memory: OutOfMemoryPoint | None = None
    notes: tuple[str, ...] = ()
    rank: int = 0
    nccl_bytes: int | None = None
    synchronized_step_seconds: float | None = None
    other_ranks: tuple[RankMeasurement, ...] = ()
    evaluation: Evaluation | None = None
    generation: Generation | None = None
    checkpoint: Checkpoint | None = None
    restored: tuple[RestoredCheckpoint, ...] = ()
    host_pace: HostPace | None = None
    power: PowerUse | None = None
    data_wait: DataWait | None = None
    skipped_steps: int | None = None
    host_bill: HostBill | None = None

    @property
    def ranks(self) -> dict[int, RankMeasurement]:
        """The figures of every rank by its number; a training on one GPU has rank 0 only."""
        every = (RankMeasurement.of(self), *self.other_ranks)
        return {each.rank: each for each in sorted(every, key=lambda one: one.rank)}


@dataclass(frozen=True, slots=True)
class Utilization:
    """The memory of one GPU, in bytes; ``None``: the driver does not report it.

    Attributes:
        gpu: Product name.
        used_bytes: NVML's *used* by the first version of the call, which the guides print.
        driver_bytes: The driver's own reservation, a part of it.
        process_bytes: Memory of this process.
        other_bytes: Memory of other processes that NVML lists.
        others: Number of those processes.
        unlisted_bytes: What else is used: a part of this process's context that the driver counts for no process, and
            processes that NVML does not list.
        reserved_bytes: Bytes that PyTorch's allocator holds in this process (0 before CUDA is used).
        allocated_bytes: Bytes that it has handed out.
        can_hide: Whether NVML cannot list processes outside of this container.
    """

    gpu: str
    used_bytes: int | None
    driver_bytes: int | None
    process_bytes: int | None
    other_bytes: int | None
    others: int | None
    unlisted_bytes: int | None
    reserved_bytes: int
    allocated_bytes: int
    can_hide: bool = False

    @property
    def context_bytes(self) -> int | None:
        """Bytes of the process outside of PyTorch's allocator: CUDA context, kernels, libraries."""
        return None if self.process_bytes is None else max(0, self.process_bytes - self.reserved_bytes)
