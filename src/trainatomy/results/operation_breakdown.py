"""The operations of a step by group, phase, module and operator, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from trainatomy.results.experts import Experts


@dataclass(frozen=True, slots=True)
class GroupShare:
    """A group of operations in one phase (`step`: all phases). Shares are of the whole phase, 0 to 1.

    Attributes:
        operations: Number of operations.
        bytes: Compulsory traffic in GPU memory: each distinct input read and each output written once, as in arXiv
            2007.00072. Further passes of kernels (a second read, a sort) are part of `seconds` only.
        intensity: FLOP per byte; None if nothing is moved.
        peak_bytes: Results of the group that are held at the peak of memory; only for `step`.
        seconds: Predicted GPU time.
        bound_by: The resource that bounds most of that time.
        measured_seconds: Measured GPU time.
    """

    group: str
    phase: str
    operations: int
    flop: int
    bytes: int
    intensity: float | None
    flop_share: float
    bytes_share: float
    peak_bytes: int | None = None
    seconds: float | None = None
    seconds_share: float | None = None
    bound_by: str | None = None
    measured_seconds: float | None = None
    measured_share: float | None = None


@dataclass(frozen=True, slots=True)
class HeavyOperation:
    """All calls of one operator in one module (layers folded) and phase."""

    operation: str
    module: str
    phase: str
    group: str
    calls: int
    flop: int | None
    bytes: int
    flop_share: float
    bytes_share: float
    seconds: float | None = None
    seconds_share: float | None = None
    bound_by: str | None = None
    measured_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ModuleOperations:
    """All operations of one module (layers folded), without those of its submodules."""

    module: str
    operations: int
    flop: int
    bytes: int
    flop_share: float
    bytes_share: float
    seconds: float | None = None
    seconds_share: float | None = None
    measured_seconds: float | None = None
    measured_share: float | None = None


@dataclass(frozen=True, slots=True)
class CollectiveShare:
    """All collectives of one kind between groups of one size, or copies between the memories of two GPUs (`copy`).

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, ….
        ranks: GPUs that take part.
        calls: Calls in a step.
        bytes: Bytes of their whole messages, as nccl-tests counts them.
        seconds: Predicted time of one GPU.
        bus_bytes_per_second: Predicted bus bandwidth, as nccl-tests defines it.
    """

    kind: str
    ranks: int
    calls: int
    bytes: int
    seconds: float | None = None
    bus_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Unformulated:
    """An operator without a FLOP formula: how often it runs, the bytes it moves, and the reason."""

    operation: str
    calls: int
    bytes: int
    bytes_share: float
    why: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A general statement of the guides, checked against this step.

    Attributes:
        name: `backward_to_forward_flop` or `activation_bytes`.
        forward: FLOP, or bytes moved by activation functions, of forward.
        backward: The same of backward.
        ratio: `backward` over `forward`; None if that is not defined.
        recompute: FLOP of recomputation in the backward pass; None if there is none.
        operators: The activation functions.
        forward_reads_per_write: Bytes that they read in forward for each byte written.
        backward_reads_per_write: The same in backward.
    """

    name: str
    forward: float
    backward: float
    ratio: float | None
    recompute: float | None = None
    operators: tuple[str, ...] = ()
    forward_reads_per_write: float | None = None
    backward_reads_per_write: float | None = None


@dataclass(frozen=True, slots=True)
class WastefulShape:
    """A matrix product whose shape the GPU cannot use well.

    Attributes:
        kind: `alignment` and `best alignment` (a dimension is not a multiple of 16 or 128 bytes), `tiles` or `waves`.
        shape: Batch, m, n, k of [m, k] x [k, n].
        dimension: The dimension that is misaligned (m, n or k), or the size of a tile.
        size: Its size, or how many tiles the result has.
        multiple: What the size should be a multiple of.
        padded: The next such multiple; for tiles, how many the GPU would compute in the same time.
        used: Share of the GPU's work that counts.
        gain_seconds: Predicted gain of the step if the dimension is padded; None if it was not computed.
    """

    kind: str
    operation: str
    module: str
    phase: str
    calls: int
    shape: tuple[int, int, int, int]
    dimension: str
    size: int
    multiple: int
    padded: int
    used: float
    flop_share: float
    gain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Padding:
    """A size that is better padded, for all products that it is a dimension of.

    Attributes:
        size: The size, which becomes `padded`, a multiple of `multiple`.
        products: Number of products in the step with this dimension.
        modules: Modules that they belong to.
        setting: The setting of the workload that decides the size; empty if none does.
        value: Its value, which becomes `padded_value`.
        kind: What the setting is: vocab, length, width, batch, or empty.
        factor: The size is this many times the value.
        gain_seconds: Predicted gain of the step's products; None if times were not predicted.
    """

    size: int
    padded: int
    multiple: int
    products: int
    modules: tuple[str, ...]
    setting: str
    value: int
    padded_value: int
    kind: str = ""
    factor: int = 1
    gain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PublishedShares:
    """Shares of the same operations as others measured them, percent by group."""

    source: str
    flop_percent: dict[str, float]
    time_percent: dict[str, float]


@dataclass(frozen=True, slots=True)
class Joined:
    """The match between a profile and the predicted operations.

    Attributes:
        operations: Number of predicted operations found in the profile.
        of: Number of predicted operations.
        seconds: GPU seconds of the profile that were assigned to operations.
        of_seconds: All GPU seconds of the profile.
        only_predicted: Operators not found in the profile, with their number.
        only_measured: Operators only found in the profile, with their number.
    """

    operations: int
    of: int
    seconds: float
    of_seconds: float
    only_predicted: dict[str, int]
    only_measured: dict[str, int]


@dataclass(frozen=True, slots=True)
class OperationBreakdown:
    """A training step by its operations.

    Attributes:
        operations: Number of operations that run kernels on the GPU.
        aside: Number of operations that run no kernel of a group, by kind (views, host, reads by the host, transfers).
        by_rule: Operators that no table names, whose group was derived from their form.
        experts: The experts of a mixture of experts.
        gpu_name: Product name of the GPU; empty in breakdowns of earlier versions.
    """

    name: str
    workload: dict[str, object]
    card: str
    operations: int
    flop: int
    bytes: int
    groups: tuple[GroupShare, ...]
    heaviest: tuple[HeavyOperation, ...]
    unformulated: tuple[Unformulated, ...]
    by_rule: tuple[str, ...]
    aside: dict[str, int]
    claims: tuple[Claim, ...]
    shapes: tuple[WastefulShape, ...]
    paddings: tuple[Padding, ...] = ()
    modules: tuple[ModuleOperations, ...] = ()
    seconds: float | None = None
    measured_seconds: float | None = None
    joined: Joined | None = None
    published: PublishedShares | None = None
    notes: tuple[str, ...] = ()
    collectives: tuple[CollectiveShare, ...] = ()
    experts: Experts | None = None
    gpu_name: str = ""

    @property
    def gpu(self) -> str:
        """The GPU; the field keeps the name that version 1 of the JSON gives it."""
        return self.card
