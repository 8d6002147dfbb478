"""The bill: what every part of GPU memory holds at the instant of the peak, as plain values.

Device memory is what ``nvidia-smi`` shows for the process.  It is the sum of ``Components.as_dict()`` exactly: what
PyTorch's allocator has handed out at its peak (weights ... functionality), what it holds besides (``cache``), and what
lies outside of it (``context``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["fits", "tight", "does not fit"]


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
class OutOfMemoryPoint:
    """Where a training that does not fit would stop: what was asked for and what was held then, bytes."""

    instant: Instant
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
