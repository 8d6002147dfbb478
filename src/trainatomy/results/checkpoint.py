"""Space that a checkpoint of a training takes on disk and on the GPU, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RestoringPurpose = Literal["resume", "best"]
"""Why a checkpoint is loaded: to continue its training, or because it is the best one at the end."""

FSDP_WEIGHTS = "pytorch_model_fsdp"
"""Beginning of the name of accelerate's files and folders with FSDP's weights (accelerate/utils/constants.py)."""


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """A checkpoint that the Trainer loads, in bytes.

    Attributes:
        purpose: Why it is loaded: before the first step, or after the last.
        own_allocated_bytes: Peak of allocated memory of the GPU while it is loaded; None in a measurement.
        allocated_before_bytes: Peak of allocated memory until it is loaded.
        allocated_after_bytes: Peak of allocated memory until it has been loaded.
        host_bytes: Largest file, or tensor of a sharded one, that is in host memory at once; None in a measurement.
    """

    purpose: RestoringPurpose
    allocated_before_bytes: int
    allocated_after_bytes: int
    own_allocated_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that the Trainer saves between two steps, in bytes.

    Attributes:
        files: Size of each file by its name.
        kept: Checkpoints that are kept (``save_total_limit``); None: all.
        allocated_before_bytes: Peak of allocated memory of the GPU until it is saved.
        allocated_after_bytes: Peak of allocated memory until it has been saved.
        own_allocated_bytes: Peak of allocated memory while it is saved; None in a measurement.
        host_bytes: Most that is copied to host memory at once while it is saved; None in a measurement.
    """

    files: dict[str, int]
    kept: int | None
    allocated_before_bytes: int
    allocated_after_bytes: int
    own_allocated_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Size on disk."""
        return sum(self.files.values())

    @property
    def weights_bytes(self) -> int:
        """Size of the files with weights; FSDP writes a second one when it saves whole weights."""
        weights = (name for name in self.files if name.endswith(".safetensors") or name.startswith(FSDP_WEIGHTS))
        return sum(self.files[name] for name in weights)

    @property
    def states_bytes(self) -> int:
        """Size of the files with optimizer states."""
        return sum(size for name, size in self.files.items() if name.startswith("optimizer"))

    @property
    def is_sharded(self) -> bool:
        """True if every rank writes its own part, of which the files are one."""
        return any(name.endswith(".distcp") for name in self.files)
