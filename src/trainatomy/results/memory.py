"""The memory breakdown: what every part of GPU memory holds at its peak.

Device memory is what ``nvidia-smi`` shows for the process.  It equals the sum of ``Components`` to the byte: what
PyTorch's allocator has handed out at its peak (``weights`` to ``functionality``), what it reserves beyond that
(``cache``), and what lies outside of it (``context``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class Components:
    """Bytes by purpose, for the eight standard components and any ``others``.

    All but ``cache``, ``context`` and ``nccl`` are blocks of the allocator, rounding included.  ``weights`` includes
    the 16-bit copies that autocast keeps during a forward pass.  ``functionality`` holds inputs and library workspaces.
    ``others`` holds components that only some training runs have, by name: ``gathered_weights``,
    ``communication_buffers``, ``gathered_outputs`` (of evaluation) and ``key_value_cache`` of the allocator, and
    ``nccl``, what NCCL holds outside of it.
    """

    weights: int = 0
    optimizer_states: int = 0
    gradients: int = 0
    activations: int = 0
    temporary: int = 0
    functionality: int = 0
    cache: int = 0
    context: int = 0
    others: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if clash := set(self.others) & set(STANDARD_COMPONENTS):
            raise ValueError(f"others repeats standard components: {', '.join(sorted(clash))}")

    @classmethod
    def from_dict(cls, sizes: Mapping[str, int]) -> Components:
        """Return the components for bytes by name; names that are not standard become ``others``."""
        others = {name: size for name, size in sizes.items() if name not in STANDARD_COMPONENTS}
        standard = {name: sizes.get(name, 0) for name in STANDARD_COMPONENTS}
        return cls(**standard, others=others)

    def __getitem__(self, name: str) -> int:
        """Return the bytes of one component, 0 for one that this training does not have."""
        return int(getattr(self, name)) if name in STANDARD_COMPONENTS else self.others.get(name, 0)

    def as_dict(self) -> dict[str, int]:
        """Return bytes by name in display order: tensors with ``others``, the cache, and what is outside of it."""
        tensors = {name: self[name] for name in STANDARD_COMPONENTS[:-2]}
        outside = {name: self.others[name] for name in OUTSIDE if name in self.others}
        inside = {name: size for name, size in self.others.items() if name not in outside}
        return {**tensors, **inside, "cache": self.cache, "context": self.context, **outside}

    @property
    def total_bytes(self) -> int:
        """Bytes that ``nvidia-smi`` shows for the process."""
        return sum(self.as_dict().values())


STANDARD_COMPONENTS = tuple(each.name for each in fields(Components) if each.name != "others")
"""Names of the components that every training has, in display order; the last two lie outside of tensors."""

OUTSIDE = ("nccl",)
"""Names of the ``others`` that lie outside PyTorch's allocator."""


@dataclass(frozen=True, slots=True)
class PeakRange:
    """Lowest and highest peaks where they depend on what is known on a GPU only, in bytes."""

    allocated_bytes: tuple[int, int]
    reserved_bytes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SkippedSteps:
    """Peaks of a training in float16 whose first ``steps`` optimizer steps are skipped, in bytes."""

    steps: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """A part of one component, such as ``16-bit copies kept by autocast`` or ``cuBLAS workspaces``."""

    component: str
    name: str
    bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class ModuleActivations:
    """Activations that a module holds at the peak; layers of one kind are folded: ``encoder.layer.*``."""

    module: str
    activation_bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Instant:
    """A point in a training: where in the step, in which module, during which operation.

    ``step`` is the optimizer step from 0, or -1 before the first one; ``phase`` is load, forward, recompute, backward
    or optimizer.
    """

    step: int
    phase: str
    module: str
    operation: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory held by the allocator and the driver at the peak, in bytes.

    Of a training that does not fit it is that on the smallest GPU of the same kind on which the training runs, where
    the allocator frees its cache when memory is short.

    ``peak_requested_bytes`` is before rounding to the allocator's blocks; ``model_bytes`` is allocated once the model
    is loaded; ``lines`` are the parts of the components.  ``logits_and_loss`` are the bytes of each component that hold
    logits or belong to the loss: what the output layer allocates, and what is allocated outside of the model's other
    layers from then on until the gradient reaches it.  ``range`` is given where memory waits for other streams,
    and depends on timing; reserved memory is then as predicted times say, or without them its low end, and the other
    figures are the low end, where memory is free as soon as its tensor dies.
    ``plans`` is given where the peaks depend on which plans ``cudnn.benchmark`` finds the fastest; the other figures
    are those with the plans that cuDNN's heuristics prefer.
    ``layouts`` is given where the peaks depend on where the driver puts segments; the other figures are those with the
    addresses that it chooses where nothing else lies in the address space.
    ``skipped_steps`` is given where the peaks depend on how many first optimizer steps gradient scaling skips, because
    float16 gradients overflow: with one, with two, up to four. More steps are like the last entry, or alternate between
    the last two where these differ.  The other figures are those with as many as the workload says (0 by default).
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    peak_requested_bytes: int
    model_bytes: int
    components: Components
    lines: tuple[Line, ...]
    peak: Instant
    num_alloc_retries: int
    range: PeakRange | None = None
    plans: PeakRange | None = None
    layouts: PeakRange | None = None
    skipped_steps: tuple[SkippedSteps, ...] = ()
    logits_and_loss: dict[str, int] = field(default_factory=dict)

    @property
    def worst_device_bytes(self) -> int:
        """``device_bytes`` in the worst case of timing, plans, addresses and skipped steps."""
        ranges = [peaks for peaks in (self.range, self.plans, self.layouts) if peaks is not None]
        highest = max(
            (
                self.peak_reserved_bytes,
                *(peaks.reserved_bytes[1] for peaks in ranges),
                *(run.reserved_bytes for run in self.skipped_steps),
            )
        )
        return self.device_bytes + highest - self.peak_reserved_bytes

    def totals(self, skipped: int | None = None) -> dict[str, int]:
        """Return ``TOTALS`` by name, of a run in which gradient scaling skipped that many first steps."""
        return totals_of_run({name: getattr(self, name) for name in TOTALS}, self.skipped_steps, skipped)


TOTALS = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
"""The totals of ``Memory``, which a measurement has too."""
MOST_SKIPPED_STEPS = 4
"""Skipped steps that are predicted at most: where a fourth still moves a peak, further ones alternate."""


def totals_of_run(totals: Mapping[str, int], known: Sequence[SkippedSteps], skipped: int | None) -> dict[str, int]:
    """Return ``TOTALS`` by name, of a run in which gradient scaling skipped that many first steps.

    Args:
        totals: Those without skipped steps.
        known: The peaks with them.
        skipped: How many were skipped; None where gradient scaling decided about no step.
    """
    if not skipped or not known:
        return dict(totals)
    beyond = max(skipped - len(known), 0)
    alternates = beyond % 2 if len(known) == MOST_SKIPPED_STEPS else 0
    one = known[min(skipped, len(known)) - 1 - alternates]
    device = totals["device_bytes"] + one.reserved_bytes - totals["peak_reserved_bytes"]
    return dict(zip(TOTALS, (one.allocated_bytes, one.reserved_bytes, device), strict=True))


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """Bytes allocated by component after one event; ``event`` counts allocations and releases from the start."""

    event: int
    step: int
    phase: str
    components: dict[str, int]


@dataclass(frozen=True, slots=True)
class OutOfMemoryPoint:
    """The allocation that fails in a training that does not fit, and the memory held at that instant."""

    instant: Instant
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
