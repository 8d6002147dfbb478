"""Operations of one training step, in launch order: input of the timing model and of the operation breakdown.

A simulation writes them from executed operations, as autograd's dispatcher hands them to the GPU's kernels: below
autograd, composite operators as their parts.  Plain values; no torch.

Notes for readers:

- An operation with an output that is not ``on_host`` runs on the GPU; one whose tensors all are, on the CPU.
  ``aten::_to_copy`` and ``aten::copy_`` between the two are copies of a batch or a result.
- ``aten::_local_scalar_dense`` of a tensor that is not on the host is a read by the CPU, which waits for the GPU.
  ``aten::equal``, ``aten::nonzero``, ``aten::masked_select``, ``aten::index`` with a bool index and copies to the host
  wait for it too.
- In-place lists (``aten::_foreach_add_``, ``aten::_fused_adamw_``) have no outputs; ``Call.written`` names the tensors
  that are written.
- Consecutive operations with ``repeats`` above 1 are one micro-batch that runs that many times as a whole.
- The autograd engine's accumulation of gradients is ``aten::add_``, as on a GPU.

The operations of a step by group, phase, module and operator, as plain values.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from trainatomy.results.tasks import Experts
from trainatomy.results.time import StageRun

GRAPH_LAUNCH = "cuda::graph_launch"
"""Name of the launch of a CUDA graph, whose operations follow it."""


class Array(NamedTuple):
    """Tensor as a kernel sees it.

    Attributes:
        shape: Sizes.
        strides: Strides in elements.
        dtype: PyTorch's name without ``torch.``.
        itemsize: Bytes of one element.
        storage: Number of the storage; equal within one call for arguments that share memory.
        on_host: True if it lies in host memory.
        part: Number of the first element's place; equal within one call for arguments that begin at the same place.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    storage: int
    on_host: bool = False
    part: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of all elements in bytes."""
        return self.elements * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in the order of the shape."""
        inner = (prod(self.shape[place + 1 :]) for place in range(len(self.shape)))
        return all(size == 1 or step == own for size, step, own in zip(self.shape, self.strides, inner, strict=True))


SAME_ROW = ("same_row", "True")
"""Among a call's numbers: all its indices are the same, so that it adds to one row of a table."""
CHOSEN_ROWS = ("chosen_rows", "True")
"""Among a call's numbers: the network chose its indices, as a router does, so that some occur far more often."""
CAST_FROM = "cast_from_itemsize"
"""Name among a call's numbers: the operation before has cast its first input from a type whose elements have so many
bytes."""


class Call(NamedTuple):
    """Distinct call of an operator: equal calls of a step share one ``Call``.

    Attributes:
        name: Operator, such as ``aten::addmm``.
        inputs: Its tensors in the order of the schema, lists flattened.
        outputs: Its results, flattened.
        lengths: Number of tensors in each list argument.
        numbers: Other arguments as (name, text), without those left at their defaults.  For a list of optional tensors
            the text shows which are present (``indices``: ``None, *``).
        flop: Floating-point operations by torch's registry (``torch.utils.flop_counter``), None where it has no
            formula.
        written: Positions in ``inputs`` that the operator writes to.
        is_view: True if the results share memory with the arguments and no kernel runs.
        pointwise: True if PyTorch tags the operator as one that works element by element.
    """

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    lengths: tuple[int, ...] = ()
    numbers: tuple[tuple[str, str], ...] = ()
    flop: int | None = None
    written: tuple[int, ...] = ()
    is_view: bool = False
    pointwise: bool = False


class Operation(NamedTuple):
    """An operation of the step.

    Attributes:
        event: Number of events of the allocation trace before it.
        call: Index into ``Operations.calls``.
        phase: As in ``Origin``: forward, recompute, backward, optimizer, zero_grad or other.
        module: Path of the module it belongs to.
        micro_step: Micro-batch, from 0 in the step.
        repeats: Times that the real step runs it; more than once for a micro-batch that stands for others that were
            not executed.
        outputs: Allocations of the trace that hold its results.
        stream: Number of the CUDA stream it is launched on.
        threads: Threads of the process that launch the same at that time, each for another GPU.
        generated: True if it belongs to a further token of ``generate()``, which runs ``repeats`` times.
        captured: True if it belongs to a CUDA graph, which the operation before it launched as a whole.
    """

    event: int
    call: int
    phase: str
    module: str
    micro_step: int
    repeats: int
    outputs: tuple[int, ...] = ()
    stream: int = 0
    threads: int = 1
    generated: bool = False
    captured: bool = False


@dataclass(slots=True)
class Operations:
    """A step in the steady state.

    Attributes:
        calls: Distinct calls.
        operations: Operations in launch order.
        module_calls: Number of calls of modules by phase, for the cost of Python between operations.
        python_calls: Number of calls that take the CPU time besides operations: of hooks of saved tensors, by the class
            that has them, and of what ``simulator.python_calls`` counts, by its name; and the phase
            (``_checkpoint_hook.forward``).
        modules: Number of modules of the model that is trained; 0: not known.
        parameters: Number of its parameter tensors.
        step: Optimizer step that was recorded.
        sharded_calls: Number of operators that Python calls with sharded tensors (``DTensor``) by phase.
        resized_storages: Number of storages that FSDP takes or frees by phase.
        engine_modules: Number of modules whose weights DeepSpeed's engine asks for (ZeRO-3) by phase.
        engine_gradients: Number of gradients that DeepSpeed's engine takes over by phase.
        dependencies: For an operation (by index) those of other streams that must finish before it starts, as
            ``Stream.wait_event`` demands; an index that comes later in ``operations`` means its run in the previous
            step.
        cpu_waits: For an operation (by index) those that must finish before the CPU launches it, as
            ``Event.synchronize`` demands.
        stage_runs: The parts of micro-batches that this rank's stages of a pipeline run, in order.
        on_host: What serves several predictions of the CPU's times of a finished step, by what it depends on.
    """

    calls: list[Call] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    module_calls: dict[str, int] = field(default_factory=dict)
    python_calls: dict[str, int] = field(default_factory=dict)
    modules: int = 0
    parameters: int = 0
    sharded_calls: dict[str, int] = field(default_factory=dict)
    resized_storages: dict[str, int] = field(default_factory=dict)
    engine_modules: dict[str, int] = field(default_factory=dict)
    engine_gradients: dict[str, int] = field(default_factory=dict)
    step: int = -1
    dependencies: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cpu_waits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stage_runs: list[StageRun] = field(default_factory=list)
    on_host: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def blocks(self) -> list[tuple[int, range]]:
        """Return consecutive indices into ``operations`` with the times that a real step runs them as a whole."""
        found: list[tuple[int, range]] = []
        begin = 0
        for repeats, block in groupby([one.repeats for one in self.operations]):
            end = begin + len(list(block))
            found.append((repeats, range(begin, end)))
            begin = end
        return found

    def unrolled(self) -> list[int]:
        """Return indices into ``operations`` in the order of a real step, with micro-batches repeated."""
        return [index for repeats, block in self.blocks() for index in list(block) * repeats]


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
