"""What a training does besides its steps: evaluations, generation, checkpoints; and the experts that it holds.

Memory and time of an evaluation during a training, predicted or measured.

Memory and time of a call of ``generate()``, predicted or measured.

Space that a checkpoint of a training takes on disk and on the GPU, predicted or measured.

A mixture of experts: what it holds in memory against what it computes with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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


@dataclass(frozen=True, slots=True)
class Generation:
    """A call of ``generate()``.

    Attributes:
        prompts: Number of prompts.
        sequences: Sequences that are generated at once: prompts times beams, or times returned sequences.
        new_tokens: Tokens generated for each.
        cache_bytes: Keys and values at the end.
        cache_bytes_per_token: Keys and values of one token of one sequence.
        first_token_seconds: Time to the first token: the prompts and the choice of a token; None if it was not asked
            for.
        token_seconds: Mean time of each further token; None also for a single token.
    """

    prompts: int
    sequences: int
    new_tokens: int
    cache_bytes: int
    cache_bytes_per_token: int
    first_token_seconds: float | None = None
    token_seconds: float | None = None


RestoringPurpose = Literal["resume", "best"]
"""Why a checkpoint is loaded: to continue its training, or because it is the best one at the end."""

DISK_BLOCK = 4096
"""Block of a file system: ext4's and XFS's default."""

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
        """Size of all files."""
        return sum(self.files.values())

    @property
    def disk_bytes(self) -> int:
        """Size on disk, where a file takes whole blocks."""
        return sum(-(-size // DISK_BLOCK) * DISK_BLOCK for size in self.files.values())

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


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a model.  Rows are assumed to be spread evenly over them.

    Attributes:
        layers: Layers with experts.
        experts: Experts of such a layer, without shared ones, which every token passes.
        experts_per_token: Experts that a token passes in such a layer.
        parameters: Parameters of the model, all of which are held in memory.
        active_parameters: Parameters that a token is multiplied with: without the experts that it does not pass.
        expert_parameters: Parameters of all experts.
        rows_per_expert: Rows of a batch that each expert gets if they are spread evenly; None if samples are not text.
    """

    layers: int
    experts: int
    experts_per_token: int
    parameters: int
    active_parameters: int
    expert_parameters: int
    rows_per_expert: float | None
