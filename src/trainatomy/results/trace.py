"""Allocation trace: every allocation and release of device memory, in the order in which they happened.

A simulation writes it from executed operations; a run on a GPU from PyTorch's own memory history.  The simulated
allocator and the memory breakdown read both alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Action = Literal["alloc", "free", "empty_cache"]
DriverAction = Literal["malloc", "map", "free", "unmap", "refused"]


class Event(NamedTuple):
    """An allocation, a release, or ``torch.cuda.empty_cache()``.

    Attributes:
        action: Kind of the event.
        allocation: Index into ``AllocationTrace.origins``, unique for each allocation; -1 for ``empty_cache``.
        bytes: Requested size, before the allocator rounds it; 0 for ``free`` and ``empty_cache``.
        stream: Number of the CUDA stream that was current at an allocation, 0 for the default stream; the allocator
            keeps a pool for each.
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
        rank: Rank of the process in a training on several GPUs.
        stream_uses: Calls of ``Tensor.record_stream``.  The simulated allocator does not wait for these streams.
        cpu_waits: Waits of the CPU for streams, where memory depends on them.
        collectives: Asynchronous collectives.
        pinned: Blocks of pinned host memory that activations take.
    """

    events: list[Event] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    choices: dict[int, int] = field(default_factory=dict)
    trials: dict[int, PlansTried] = field(default_factory=dict)
    rank: int = 0
    stream_uses: list[StreamUse] = field(default_factory=list)
    cpu_waits: list[CPUWait] = field(default_factory=list)
    collectives: list[CollectiveUse] = field(default_factory=list)
    pinned: list[PinnedBlock] = field(default_factory=list)
