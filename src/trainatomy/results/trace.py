"""Allocation trace: every allocation and release of device memory, in the order in which they happened.

A simulation writes it from executed operations; a run on a GPU from PyTorch's own memory history.  The simulated
allocator and the memory breakdown read both alike.

A predicted training in detail: every allocation with its address, every operation with its times.

Reports, snapshots and traces are made from it.  It is asked for separately because of its size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from trainatomy.results.operations import OperationBreakdown

Action = Literal["alloc", "free", "empty_cache"]
DriverAction = Literal["malloc", "map", "free", "unmap", "refused"]


PRIVATE_POOL = 1 << 20
"""Streams in a private memory pool: an allocation's ``stream`` is this number times the pool's, plus the stream's."""


WORKSPACES = frozenset({"cublas_workspace", "cublaslt_workspace", "hipblas_workspace", "hipblaslt_workspace"})
"""Labels of the workspaces that libraries of matrix products keep; those of AMD GPUs are hipBLAS' and hipBLASLt's."""


def pool_of(stream: int) -> int:
    """Return the private pool of an allocation, by its ``stream``; 0 for none."""
    return stream // PRIVATE_POOL


class Event(NamedTuple):
    """An allocation, a release, or ``torch.cuda.empty_cache()``.

    Attributes:
        action: Kind of the event.
        allocation: Index into ``AllocationTrace.origins``, unique for each allocation; -1 for ``empty_cache``.
        bytes: Requested size, before the allocator rounds it; 0 for ``free`` and ``empty_cache``.
        stream: Number of the CUDA stream that was current at an allocation, 0 for the default stream, plus
            ``PRIVATE_POOL`` times the number of the private pool (CUDA graphs), if there is one; the allocator keeps
            blocks of each apart.
    """

    action: Action
    allocation: int
    bytes: int
    stream: int = 0


class DriverCall(NamedTuple):
    """A call of the driver that the allocator made while it served an event.

    Attributes:
        event: Index of the event.
        action: ``malloc`` takes a segment and ``map`` pages of an expandable one; ``free`` and ``unmap`` return them;
            ``refused`` is a failed attempt to take memory.
        bytes: Size of the segment or pages.
    """

    event: int
    action: DriverAction
    bytes: int


class Origin(NamedTuple):
    """Code that an allocation came from.

    Attributes:
        operation: Name of the operator, or of the workspace.
        module: Path of the module in the model, "" where there is none.
        phase: load, forward, recompute, backward, optimizer, zero_grad or other.
        step: Optimizer step, from 0; -1 before the first.
    """

    operation: str
    module: str
    phase: str
    step: int


@lru_cache(maxsize=1 << 16)
def shared_origin(operation: str, module: str, phase: str, step: int) -> Origin:
    """Return an origin, the same object for equal ones: a trace has millions of a few thousand."""
    return Origin(operation, module, phase, step)


class Mark(NamedTuple):
    """Moment before the event of that index: ``loaded``, ``step``, ``forward``, ``forward end``, ..."""

    event: int
    name: str
    step: int


class StreamUse(NamedTuple):
    """``Tensor.record_stream``: the allocation's release waits for the work launched on that stream so far.

    Attributes:
        event: Number of events before the call.
        allocation: Index into ``AllocationTrace.origins``.
        stream: Number of the stream that uses the memory.
    """

    event: int
    allocation: int
    stream: int


class CPUWait(NamedTuple):
    """The CPU waits for the GPU.

    Attributes:
        event: Number of events before the wait.
        done: For each stream that is waited for, number of events before the last work that is then done; None: all
            streams are done.
    """

    event: int
    done: Mapping[int, int] | None


class PinnedBlock(NamedTuple):
    """A block of pinned host memory, which takes addresses among those of the GPU's memory.

    Attributes:
        allocation: Number of allocations before it.
        bytes: Its size.
    """

    allocation: int
    bytes: int


class CollectiveUse(NamedTuple):
    """An asynchronous collective, whose tensors NCCL's process group holds until it has seen that it is over.

    Its watchdog looks every 100 ms; what it has seen to be over is let go when the process calls the next collective
    (``shelvesToUnstash_`` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, torch 2.8-2.13).  To wait for the work
    lets go at once; to wait for its future, as DDP does, does not.

    Attributes:
        event: Number of events before the collective.
        allocations: Indices into ``AllocationTrace.origins`` of its tensors.
        in_backward: True if it was called in a backward pass.
    """

    event: int
    allocations: tuple[int, ...]
    in_backward: bool


class PlansTried(NamedTuple):
    """Plans of a convolution that ``cudnn.benchmark`` tries.

    Attributes:
        workspaces: Bytes of each, the one that is expected to be kept first.
        timed: How many of those that there is memory for are timed; the fastest of them is kept.
    """

    workspaces: tuple[int, ...]
    timed: int


@dataclass(slots=True)
class AllocationTrace:
    """Events of one process on one GPU, with the origin of each allocation.

    Attributes:
        events: All events in order.
        origins: Origin of each allocation, by its number.
        labels: Contents of allocations where they are known (weight, gradient, ...), by their numbers.
        marks: Moments of the run.
        choices: Workspaces that their library does without when memory is short, by their numbers; the value numbers
            the decision that each belongs to, as a library decides once for all equal calls.
        trials: Plans that were tried, by the number of the allocation for them; its number in ``choices`` is that of
            the workspaces of the plan that is kept.
        places: Allocations that take the place of a released one in a private pool, by their numbers; the value is
            that allocation's number (``_cuda_setCheckpointPoolState``).
        rank: Rank of the process in a training on several GPUs.
        output_layers: Paths of the modules that make logits.
        around_output_layers: Paths of the modules that these lie in.
        stream_uses: Calls of ``Tensor.record_stream``.  The simulated allocator does not wait for these streams.
        cpu_waits: Waits of the CPU for streams, where memory depends on them.
        collectives: Asynchronous collectives.
        pinned: Blocks of pinned host memory that activations take.
        replayed: Replays of a finished trace that serve several predictions, by what they depend on.
    """

    events: list[Event] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    choices: dict[int, int] = field(default_factory=dict)
    trials: dict[int, PlansTried] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    rank: int = 0
    output_layers: set[str] = field(default_factory=set)
    around_output_layers: set[str] = field(default_factory=set)
    stream_uses: list[StreamUse] = field(default_factory=list)
    cpu_waits: list[CPUWait] = field(default_factory=list)
    collectives: list[CollectiveUse] = field(default_factory=list)
    pinned: list[PinnedBlock] = field(default_factory=list)
    replayed: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def blank(self) -> AllocationTrace:
        """Return a trace of the same process without events, for a trace that is made of this one."""
        return AllocationTrace(
            rank=self.rank, output_layers=self.output_layers, around_output_layers=self.around_output_layers
        )


SegmentAction = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]
"""Names that ``torch.cuda.memory._snapshot`` uses."""


class Source(NamedTuple):
    """Properties shared by allocations that come from the same code and hold the same.

    Attributes:
        component: Component of the memory breakdown.
        line: Line within it.
        operation: Name of the operator, or of the workspace.
        module: Path of the module in the model, "" where there is none.
        phase: As in ``results.trace.Origin``.
        step: Optimizer step, from 0; -1 before the first.
    """

    component: str
    line: str
    operation: str
    module: str
    phase: str
    step: int


class Allocation(NamedTuple):
    """An allocation, from its event to its release.

    Attributes:
        born: Number of the event that made it.
        died: Number of the event that released it; -1 if none did.
        bytes: Size of its block.
        requested: Size that was asked for.
        address: Address of its block, as simulated.
        stream: Number of the CUDA stream.
        source: Index into ``Detail.sources``.
    """

    born: int
    died: int
    bytes: int
    requested: int
    address: int
    stream: int
    source: int


class SegmentEvent(NamedTuple):
    """Memory that the allocator took from the driver or returned, while it served the event of that number."""

    event: int
    action: SegmentAction
    address: int
    bytes: int
    stream: int


class Block(NamedTuple):
    """A block of a segment; ``allocation``: index into ``Detail.allocations``, -1 for a free block."""

    address: int
    bytes: int
    allocation: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment at the end of the simulated run."""

    address: int
    bytes: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[Block, ...]


class TimedOperation(NamedTuple):
    """An operation of one step on the timelines of the CPU and the GPU, in seconds from the begin of the step.

    Attributes:
        name: Name of the operator.
        module: Path of its module.
        phase: As in ``results.operations.Operation``.
        stream: Number of the CUDA stream; -1 and below for communication.
        launched: When the CPU begins to launch it.
        launch_seconds: How long that takes.
        begin: When the GPU begins.
        seconds: How long the GPU takes; 0 if no kernel runs.
        event: Number of events of the allocation trace before it.
    """

    name: str
    module: str
    phase: str
    stream: int
    launched: float
    launch_seconds: float
    begin: float
    seconds: float
    event: int


@dataclass(frozen=True, slots=True)
class Detail:
    """A predicted training, event by event, for the rank that its prediction bills.

    Attributes:
        events: Number of events of the simulated run, up to the end of its last step.
        allocations: Every allocation, in the order of their events.
        sources: Where they come from.
        peak_event: First event after which most is allocated.
        segment_events: What the allocator took from the driver and returned, in order.
        segments: Segments at the end.
        timed: The operations of one step in launch order; empty if no time was predicted.
        step_seconds: Duration of that step.
        operations: The operations by group, phase, module and operator; None where they were not analysed.
        allocator: Settings of the allocator, as in ``PYTORCH_CUDA_ALLOC_CONF``.
    """

    events: int
    allocations: tuple[Allocation, ...]
    sources: tuple[Source, ...]
    peak_event: int
    segment_events: tuple[SegmentEvent, ...] = ()
    segments: tuple[Segment, ...] = ()
    timed: tuple[TimedOperation, ...] = ()
    step_seconds: float = 0.0
    operations: OperationBreakdown | None = None
    allocator: str = ""
