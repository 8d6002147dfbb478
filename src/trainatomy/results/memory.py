"""The bill: what every part of GPU memory holds at the instant of the peak, as plain values.

Device memory is what ``nvidia-smi`` shows for the process.  It is the sum of ``Components.as_dict()`` exactly: what
PyTorch's allocator has handed out at its peak (weights ... functionality), what it holds besides (``cache``), and what
lies outside of it (``context``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from trainatomy.results.time import Time

Verdict = Literal["fits", "tight", "does not fit"]
Basis = Literal["measured", "computed", "assumed"]


@dataclass(frozen=True, slots=True)
class Components:
    """Bytes by what they are for. All but ``cache`` and ``context`` are allocator blocks, rounding included.

    ``weights`` includes ``weight_copies``: the 16-bit copies that autocast keeps while a forward pass runs.
    """

    weights: int
    optimizer_states: int
    gradients: int
    activations: int
    temporary: int
    functionality: int
    cache: int
    context: int

    def as_dict(self) -> dict[str, int]:
        """The components by name, in the order in which they are shown."""
        return asdict(self)

    @property
    def total_bytes(self) -> int:
        """What ``nvidia-smi`` shows for the process, in bytes."""
        return sum(self.as_dict().values())


@dataclass(frozen=True, slots=True)
class Line:
    """A part of one component: what it is (``16-bit copies kept by autocast``, ``cuBLAS workspaces``), bytes, number of
    tensors."""

    component: str
    name: str
    bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """A module (path in the model, layers folded to ``encoder.layer.*``) and the activations that it holds at the
    peak."""

    module: str
    activation_bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Instant:
    """When and where: optimizer step (from 0), phase (load, forward, recompute, backward, optimizer), module,
    operation."""

    step: int
    phase: str
    module: str
    operation: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that the prediction rests on, e.g. ('context', '527 MiB', 'measured', 'H200, driver 580')."""

    name: str
    value: str
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """The guide's rule beside what this training holds. Bytes per parameter without activations and temporaries.

    ``rule`` is what the guides say (18 for mixed precision with AdamW, 16 in fp32, 6 for inference in mixed precision,
    ...; None where they name no rule), ``parts`` what is held by component, ``reasons`` why they differ, one sentence
    each.
    """

    parameters: int
    trainable_parameters: int
    actual: float
    parts: dict[str, float]
    rule: float | None
    rule_name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """What the allocator and the driver hold, in bytes. ``requested`` is before rounding to blocks."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    peak_requested_bytes: int
    model_bytes: int
    components: Components
    lines: tuple[Line, ...]
    peak: Instant
    num_alloc_retries: int


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """Bytes allocated by component after an event; ``event`` counts allocations and releases from the start."""

    event: int
    step: int
    phase: str
    components: dict[str, int]


@dataclass(frozen=True, slots=True)
class GPUSummary:
    """The card that was asked about: id, product name, bytes that CUDA can use, compute capability."""

    id: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class OutOfMemoryPoint:
    """Where a training that does not fit would stop: what was asked for and what was held then, bytes."""

    instant: Instant
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """One predicted training: the answer first, then what it rests on.

    ``fits`` means that the allocator, with what the card leaves after context and driver, never runs out.
    ``room_bytes`` is what is left of the card at the peak (negative: what is short); ``verdict`` is ``tight`` when it
    fits with less than 5 % of the card left, or only because the allocator frees its cache on the way
    (``num_alloc_retries`` > 0).  ``without_workspace``: calls of convolutions in a step that take another, slower
    algorithm since the workspace of the first choice does not fit; where it is not 0, the training fits thanks to that.
    """

    name: str
    workload: dict[str, object]
    card: GPUSummary
    fits: bool
    verdict: Verdict
    room_bytes: int
    memory: Memory
    modules: tuple[ModuleShare, ...]
    bytes_per_parameter: BytesPerParameter
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    out_of_memory: OutOfMemoryPoint | None
    timeline: tuple[TimelinePoint, ...]
    seconds_taken: float
    versions: dict[str, str]
    time: Time | None = None
    without_workspace: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """What the card and PyTorch hold at one stage of a measured run, bytes; ``None``: the driver does not say.

    ``name``: idle, first tensor, model loaded, training (its peak). ``device_bytes``: as nvidia-smi shows the process;
    ``nvml_used_bytes``: the raw ``used`` of the first NVML call, which counts the driver's own share too.
    """

    name: str
    device_bytes: int | None
    nvml_used_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another process that used the card during the run: its id, its name, and what it held at most, bytes (``None``:
    the driver does not say)."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same step on a GPU. ``None`` where it could not be read. ``status``: completed or out of memory.

    ``device_bytes`` is what nvidia-smi shows for the process (NVML, the driver's own reservation taken off);
    ``process_bytes`` NVML's own figure for the process; ``nvml_used_bytes`` is the raw ``used`` of the first NVML call;
    ``idle_bytes`` what NVML said before the first tensor; ``context_bytes`` what the first tensor cost outside of
    PyTorch's allocator.

    ``memory`` is the bill at the measured peak, from the allocations that happened on the GPU; its total is
    ``device_bytes`` where that is known.  ``step_seconds`` is the median of ``timed_step_seconds``, the steps after
    the warm-up of a run in which nothing was recorded; ``recorded_step_seconds`` the median of the run whose
    allocations were (``None``: there was no such run).  ``out_of_memory``: what was held and asked for when it failed.
    """

    name: str
    workload: dict[str, object]
    status: Literal["completed", "out of memory"]
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
    modules: tuple[ModuleShare, ...] = ()
    stages: tuple[Stage, ...] = ()
    timed_step_seconds: tuple[float, ...] = ()
    recorded_step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    neighbours: tuple[Neighbour, ...] = ()
    out_of_memory: OutOfMemoryPoint | None = None
    notes: tuple[str, ...] = ()
