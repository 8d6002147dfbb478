"""What a checkpoint of a training takes on disk and on the GPU, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that the Trainer saves between two steps, in bytes.

    Attributes:
        files: Size of each file by its name.
        kept: Checkpoints that are kept (``save_total_limit``); None: all.
        allocated_before_bytes: Peak of allocated memory of the GPU until it is saved.
        allocated_after_bytes: Peak of allocated memory until it has been saved.
        own_allocated_bytes: Peak of allocated memory while it is saved; None in a measurement.
    """

    files: dict[str, int]
    kept: int | None
    allocated_before_bytes: int
    allocated_after_bytes: int
    own_allocated_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Size on disk."""
        return sum(self.files.values())

    @property
    def weights_bytes(self) -> int:
        """Size of the files with weights."""
        return sum(size for name, size in self.files.items() if name.endswith(".safetensors"))
