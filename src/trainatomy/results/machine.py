"""Facts about a machine: its GPUs, their links, power and heat, the installed software, the host.

Plain values, so that every check of ``trainatomy.doctor`` is a function of them.  ``None`` means unknown: the driver,
the container or the system did not say.  Sizes are bytes, rates bytes per second, clocks MHz, temperatures degrees
Celsius.

Faults of a machine: findings, worst first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainatomy.results.measurement import ClockReason


@dataclass(frozen=True, slots=True)
class Power:
    """Draw and limits of a GPU in watts, and what holds its clocks down.

    Attributes:
        reasons: Why the clock is below its maximum.
        energy_joules: Energy since the driver was loaded.
    """

    watts: float | None = None
    limit_watts: float | None = None
    default_watts: float | None = None
    reasons: tuple[ClockReason, ...] = ()
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of the multiprocessors and of the memory, now and at most."""

    sm: int | None = None
    sm_max: int | None = None
    memory: int | None = None
    memory_max: int | None = None


@dataclass(frozen=True, slots=True)
class Temperature:
    """Temperature of a GPU, the highest at which it works at full speed, where it slows down and where it stops."""

    now: int | None = None
    highest: int | None = None
    slowdown: int | None = None
    shutdown: int | None = None


@dataclass(frozen=True, slots=True)
class PCIe:
    """The PCIe link of a GPU.

    Attributes:
        generation: Now; an idle GPU lowers it to save power.
        max_generation: What GPU and slot can do together.
        gpu_generation: What the GPU can do.
        width: Lanes now.
        max_width: Lanes that GPU and slot can use together.
        replays: Packets sent again since the driver was loaded.
    """

    generation: int | None = None
    max_generation: int | None = None
    gpu_generation: int | None = None
    width: int | None = None
    max_width: int | None = None
    replays: int | None = None


@dataclass(frozen=True, slots=True)
class NVLinks:
    """The NVLink links of a GPU.

    Attributes:
        active: Numbers of the links that are up.
        inactive: Numbers of those that are not.
        generation: NVLink's version.
        errors: Counts by kind (``replay``, ``recovery``, ``crc``), over all links.
        fabric: State of the registration with NVSwitch's fabric: ``not supported``, ``not started``, ``in progress``,
            ``completed``.
    """

    active: tuple[int, ...] = ()
    inactive: tuple[int, ...] = ()
    generation: int | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    fabric: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryHealth:
    """Errors of a GPU's memory.

    Attributes:
        ecc: Whether errors are corrected.
        ecc_pending: Whether they will be after the next reset.
        corrected: Errors corrected since the driver was loaded.
        uncorrected: Errors that could not be corrected, since the driver was loaded.
        retired_pages: Pages that are no longer used (GPUs before Ampere).
        remapped_rows: Rows replaced after errors that could not be corrected (since Ampere).
        repair_pending: Pages or rows wait for a reset to be replaced.
        repair_failed: No spare rows are left.
    """

    ecc: bool | None = None
    ecc_pending: bool | None = None
    corrected: int | None = None
    uncorrected: int | None = None
    retired_pages: int | None = None
    remapped_rows: int | None = None
    repair_pending: bool | None = None
    repair_failed: bool | None = None


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Rates of copies of one GPU in bytes per second, by kind, with the state of the GPU while they ran.

    Attributes:
        rates: ``pinned_to_device``, ``device_to_pinned``, ``pageable_to_device``, ``device_to_device``.
        pcie: The link while data was copied.
        replays: PCIe packets sent again while data was copied.
        power: While matrices were multiplied.
        clocks: While matrices were multiplied.
    """

    rates: Mapping[str, float]
    pcie: PCIe = PCIe()
    replays: int | None = None
    power: Power = Power()
    clocks: Clocks = Clocks()


@dataclass(frozen=True, slots=True)
class Process:
    """A process that holds memory of a GPU or uses the host's processors (``cpus``: how many of them)."""

    pid: int
    name: str = ""
    bytes: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, slots=True)
class GPUState:
    """One GPU.

    Attributes:
        index: Its number in nvidia-smi, which is not always CUDA's.
        name: Product name.
        uuid: The driver's identity of it.
        capability: Compute capability.
        memory_bytes: As nvidia-smi shows it.
        used_bytes: As nvidia-smi shows it.
        persistence: Whether the driver keeps the GPU initialised without processes.
        compute_mode: ``default``, ``exclusive process`` or ``prohibited``.
        mig: Whether the GPU is split into instances.
        near_cpus: Processors of the GPU's NUMA node.
        utilisation: Share of the last moment in which a kernel ran.
        processes: Compute processes that the driver lists.
        copies: Measured rates; ``None`` if they were not measured.
    """

    index: int
    name: str
    uuid: str = ""
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    mig: bool | None = None
    near_cpus: tuple[int, ...] | None = None
    utilisation: float | None = None
    power: Power = Power()
    clocks: Clocks = Clocks()
    temperature: Temperature = Temperature()
    pcie: PCIe = PCIe()
    nvlinks: NVLinks = NVLinks()
    memory: MemoryHealth = MemoryHealth()
    processes: tuple[Process, ...] = ()
    copies: CopyRates | None = None


@dataclass(frozen=True, slots=True)
class GPUPair:
    """The connection of two GPUs.

    Attributes:
        connection: As ``nvidia-smi topo -m`` writes it: NV#, PIX, PXB, PHB, NODE, SYS.
        peer_access: Whether each can read and write the other's memory.
        copy_rate: Measured bytes per second of a copy from the first to the second.
    """

    first: int
    second: int
    connection: str | None = None
    peer_access: bool | None = None
    copy_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Extension:
    """An installed library with kernels of its own; ``error``: what importing it raised, empty where it works."""

    name: str
    version: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Software:
    """Driver and libraries.

    Attributes:
        driver: Version of the driver; ``None`` where none answers.
        driver_cuda: Newest CUDA that the driver knows.
        driver_error: Why NVML does not answer.
        torch_cuda: CUDA that torch was built with; ``None`` for a build without.
        cuda_error: Why CUDA does not start in torch; empty where it does.
        architectures: What torch has kernels for: ``sm_90``, ``compute_90`` (PTX).
        versions: Installed versions by the name of the package.
        required: Versions that torch's own package asks for, by the name of the package.
        loaded: Versions of the libraries that torch loaded: ``cudnn``, ``nccl``.
        bitsandbytes: CUDA versions that the installed bitsandbytes has a library for.
        extensions: Installed libraries with kernels of their own.
        missing: Those that models would use and that are not installed.
        environment: Variables that change memory or speed.
        flash_attention: Whether torch was built with it.
        matmul_tf32: Whether products of float32 matrices use TF32 by default.
    """

    python: str = ""
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    driver_error: str = ""
    torch: str | None = None
    torch_cuda: str | None = None
    cuda_error: str = ""
    architectures: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, str] = field(default_factory=dict)
    loaded: Mapping[str, str] = field(default_factory=dict)
    bitsandbytes: tuple[str, ...] | None = None
    extensions: tuple[Extension, ...] = ()
    missing: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    flash_attention: bool | None = None
    matmul_tf32: bool | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """Processors, memory and limits of the host.

    Attributes:
        cpus: Logical processors of the machine.
        usable_cpus: Numbers of those that this process may use.
        cpu_quota: Processors that the control group grants at most.
        throttled_share: Share of the control group's periods in which it was stopped by that quota.
        busy_cpus: Processors in use while they were watched.
        busiest: Processes that used them most, without this one.
        memory_limit_bytes: Of the control group.
        memory_used_bytes: Of the control group.
        oom_kills: Processes of the control group that the kernel killed for lack of memory.
        swapped_pages: Pages brought in from swap while it was watched.
        huge_pages: ``always``, ``madvise`` or ``never``.
        shm_bytes: Size of /dev/shm.
        shm_free_bytes: What is left of it.
        memlock_bytes: Memory that a process may lock; -1 for no limit.
        governor: Of the processors' clocks, with its driver: ``powersave`` and ``acpi-cpufreq``.
        container: Kind of container; empty on the machine itself.
        infiniband: Names of InfiniBand devices.
        nvidia_devices: Number of NVIDIA's display devices on the PCI bus.
        amd_devices: The same of AMD's, a processor's own graphics among them.
    """

    cpus: int | None = None
    usable_cpus: tuple[int, ...] | None = None
    cpu_quota: float | None = None
    throttled_share: float | None = None
    load: float | None = None
    busy_cpus: float | None = None
    busiest: tuple[Process, ...] = ()
    memory_bytes: int | None = None
    available_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    oom_kills: int | None = None
    swap_bytes: int | None = None
    swap_used_bytes: int | None = None
    swapped_pages: int | None = None
    huge_pages: str | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    memlock_bytes: int | None = None
    governor: tuple[str, str] | None = None
    container: str = ""
    infiniband: tuple[str, ...] = ()
    nvidia_devices: int | None = None
    amd_devices: int | None = None


@dataclass(frozen=True, slots=True)
class WatchedGPU:
    """A GPU over some seconds of a running training.

    Attributes:
        samples: How often it was read.
        utilisation: Mean share of the time in which a kernel ran.
        watts: Mean draw.
        sm_clock: Mean clock of the multiprocessors.
        hottest: Highest temperature.
        reasons: Share of the samples with each reason for a clock below the maximum.
        pid_bytes: Memory of the watched process and its children, at most.
    """

    index: int
    samples: int
    utilisation: float | None = None
    watts: float | None = None
    sm_clock: float | None = None
    hottest: int | None = None
    reasons: Mapping[ClockReason, float] = field(default_factory=dict)
    pid_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Watched:
    """A running training over some seconds; ``pid_cpus``: processors that its processes used."""

    seconds: float
    gpus: tuple[WatchedGPU, ...]
    pid: int | None = None
    pid_cpus: float | None = None


@dataclass(frozen=True, slots=True)
class MachineState:
    """Everything that was found on a machine.

    Attributes:
        died: What is left of a training that died: an exit code, a line of a log, a message; empty: nothing was given.
        unmeasured: Why nothing was measured: ``unwanted``, ``busy``, ``watching``, ``failed``, ``no gpu``, or empty.
    """

    gpus: tuple[GPUState, ...] = ()
    pairs: tuple[GPUPair, ...] = ()
    software: Software = Software()
    host: Host = Host()
    watched: Watched | None = None
    unmeasured: str = ""
    died: str = ""


Severity = Literal["error", "warning", "note"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first: training runs fail or are wrong; they are slower or at risk; something to know, often on purpose."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Measured cost of a finding.

    Attributes:
        percent: By how many per cent something takes longer, or less of something is left.
        what: Which figure that is, a key of ``reporters.doctor_sentences.COSTS``.
        where: The case in which it was measured.
        source: Who measured it.
    """

    percent: float
    what: str
    where: str
    source: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or should be known.

    Attributes:
        name: Which one, a key of ``catalog/machine_data/findings.yaml``.
        severity: How bad it is.
        gpus: The GPUs concerned.
        values: What was found, for the sentences.
        costs: What it was measured to cost elsewhere.
    """

    name: str
    severity: Severity
    gpus: tuple[int, ...] = ()
    values: Mapping[str, str | int | float] = field(default_factory=dict)
    costs: tuple[Cost, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A machine and its findings, worst first."""

    machine: MachineState
    findings: tuple[Finding, ...]

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def healthy(self) -> bool:
        """True if there are only notes, or nothing."""
        return not (self.count("error") or self.count("warning"))
