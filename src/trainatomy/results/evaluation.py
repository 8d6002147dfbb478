"""Memory and time of an evaluation during a training, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation between two steps of a training, in bytes and seconds.

    Attributes:
        batch_size: Samples per batch.
        batches: Number of batches.
        samples: Number of samples.
        allocated_before_bytes: Peak of allocated memory until the evaluation begins.
        reserved_before_bytes: Peak of reserved memory until it begins.
        allocated_after_bytes: Peak of allocated memory until it ends.
        reserved_after_bytes: Peak of reserved memory until it ends; the cache keeps what the evaluation took.
        own_allocated_bytes: Peak of allocated memory while it runs; None in a measurement.
        seconds: Its duration; None where times were not asked for.  A measured one is the first of its training.
        first_extra_seconds: What the first evaluation takes longer, because kernels are loaded and planned for shapes
            that no step had; None in a measurement.
        first_on_machine_seconds: What the first one on a machine takes even longer, because CUDA compiles a kernel of
            cuDNN and keeps it; None in a measurement.
    """

    batch_size: int
    batches: int
    samples: int
    allocated_before_bytes: int
    reserved_before_bytes: int
    allocated_after_bytes: int
    reserved_after_bytes: int
    own_allocated_bytes: int | None = None
    seconds: float | None = None
    first_extra_seconds: float | None = None
    first_on_machine_seconds: float | None = None

    @property
    def added_reserved_bytes(self) -> int:
        """Reserved memory that the training would not need without evaluations."""
        return self.reserved_after_bytes - self.reserved_before_bytes
