"""A predicted training in detail: every allocation with its address, every operation with its times.

Reports, snapshots and traces are made from it.  It is asked for separately because of its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainatomy.results.operation_breakdown import OperationBreakdown

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
