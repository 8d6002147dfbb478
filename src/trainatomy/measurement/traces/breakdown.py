"""Compute the measured memory breakdown of a real run from its allocation history.

The trace is analyzed as a simulated one is, but PyTorch's counters and the driver decide the totals.  Where the replay
of the trace disagrees, the difference is a line of its own in the breakdown, and a note says so.

Label the allocations of a real run that no tensor's address identifies: inputs, workspaces, repeated passes.

Notes label weights, gradients and optimizer states by address; these functions infer the rest from the trace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import (
    Lifetimes,
    activations_by_module,
    analyze_replay,
    breakdown_lines,
    bytes_by_component,
    bytes_of_logits,
    held_after,
    lifetimes,
)
from trainatomy.catalog.versions import Workspaces
from trainatomy.measurement.traces.history import AllocationHistory
from trainatomy.measurement.traces.layout import Segments, release_on_request, replay_history
from trainatomy.measurement.traces.trace import attribute_repeated_passes, to_trace
from trainatomy.option import shared_fields
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Components, Instant, Line, Memory, ModuleActivations, OutOfMemoryPoint
from trainatomy.results.trace import AllocationTrace
from trainatomy.units import exact_bytes

_BETWEEN_STEPS = (
    "loaded",
    "step",
    "step end",
    "backward end",
    "zero_grad end",
    "optimizer end",
    "evaluation end",
    "saving end",
    "restoring end",
)
"""Marks after which a loop may move a batch to the GPU."""
_BACKWARD_PHASES = ("backward", "recompute")
_NEVER = 1 << 62
BUFFERS_NOTE = (
    "the measured breakdown has no line for communication buffers: PyTorch shows no addresses of what DataParallel "
    "flattens for its transfers, so they are among activations, gradients and temporary buffers"
)
"""A note on the memory breakdown of a measured training with DataParallel."""


def label_remaining(
    trace: AllocationTrace, sizes: Workspaces | None, tracked_steps: Sequence[int] = ()
) -> tuple[int, ...]:
    """Label inputs and workspaces, and attribute repeated passes to modules.

    Args:
        trace: The trace to label in place.
        sizes: Sizes of the cuBLAS and cuBLASLt workspaces on that GPU.
        tracked_steps: Steps in which module calls were recorded.

    Returns:
        The steps whose modules remain unknown.
    """
    unknown_steps = attribute_repeated_passes(trace, tracked_steps) if tracked_steps else ()
    lives = lifetimes(trace)
    label_inputs(trace, lives)
    label_inputs_of_forward(trace, lives)
    if sizes is not None and not sizes.per_call:
        label_workspaces(trace, lives, "cublas_workspace", sizes.cublas_bytes)
        label_workspaces(trace, lives, "cublaslt_workspace", sizes.cublaslt_bytes)
    return unknown_steps


def label_inputs(trace: AllocationTrace, lives: Lifetimes) -> None:
    """Label as input the memory allocated between steps or micro-batches and alive when the next forward begins.

    Considers phase ``other`` only, and keeps existing labels (an optimizer may create its states before the first
    step).
    """
    forwards = [mark.event for mark in trace.marks if mark.name == "forward"]
    marks = [mark.event for mark in trace.marks]
    for number, origin in enumerate(trace.origins):
        if origin.phase != "other" or number in trace.labels:
            continue
        born = lives.born[number]
        mark, forward = bisect_right(marks, born), bisect_right(forwards, born)
        between = mark > 0 and trace.marks[mark - 1].name in _BETWEEN_STEPS
        if between and forward < len(forwards) and lives.died[number] >= forwards[forward]:
            trace.labels[number] = "input"


def label_inputs_of_forward(trace: AllocationTrace, lives: Lifetimes) -> None:
    """Label as input the memory that a forward allocates before its first module call and still holds then.

    Inference loops move their batch there.  Does nothing for a forward whose modules are unknown.
    """
    for mark in trace.marks:
        if mark.name != "forward":
            continue
        before: list[int] = []
        for index in range(mark.event, len(trace.events)):
            event = trace.events[index]
            if event.action != "alloc":
                continue
            origin = trace.origins[event.allocation]
            if origin.phase != "forward":
                break
            if origin.module:
                held = [number for number in before if lives.died[number] > index and number not in trace.labels]
                trace.labels |= dict.fromkeys(held, "input")
                break
            before.append(event.allocation)


def label_workspaces(trace: AllocationTrace, lives: Lifetimes, label: str, size: int) -> None:
    """Label the first allocation of exactly ``size`` bytes that is never freed, once per thread (forward, backward).

    A workspace is kept until the process ends, and each thread allocates its own at its first matrix product.
    """
    if not size:
        return
    found: set[bool] = set()
    for event in trace.events:
        number = event.allocation
        if event.action != "alloc" or event.bytes != size or lives.died[number] < _NEVER or number in trace.labels:
            continue
        is_backward = trace.origins[number].phase in _BACKWARD_PHASES
        if is_backward not in found:
            found.add(is_backward)
            trace.labels[number] = label


UNEXPLAINED = "not explained by the recorded allocations"
RESERVED_NOTE = "peak reserved"
"""Prefix of the note that the reserved totals differ; it means nothing for a history that covers only a part of a run,
because the peak of reserved memory may lie in another part."""
_NO_MODULES = (
    "no modules: step {step}, in which {what} lies, matches none of the steps whose module calls were recorded"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An out-of-memory error as its exception describes it.

    Attributes:
        instant: Position in the loop.
        requested_bytes: Size of the failed request, rounded as in the message.
        allocated_bytes: Allocated bytes then.
        reserved_bytes: Reserved bytes then.
    """

    instant: Instant
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    def to_point(self) -> OutOfMemoryPoint:
        """Return the failure as a result value."""
        return OutOfMemoryPoint(self.instant, self.requested_bytes, self.allocated_bytes, self.reserved_bytes)


@dataclass(frozen=True, slots=True)
class MeasuredTotals:
    """Totals read during the run, in bytes.

    ``device_bytes`` is the driver's figure (``None``: unknown), ``model_bytes`` what was allocated once the model was
    loaded, ``num_alloc_retries`` how often the allocator released its cache to serve a request.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int | None
    model_bytes: int | None
    num_alloc_retries: int

    @classmethod
    def of(cls, measurement: Measurement) -> MeasuredTotals:
        """Return the totals of ``measurement``."""
        return cls(**shared_fields(cls, measurement))

    @property
    def context_bytes(self) -> int:
        """Bytes outside of PyTorch's allocator; 0 if the driver's figure is unknown."""
        return 0 if self.device_bytes is None else max(self.device_bytes - self.peak_reserved_bytes, 0)


@dataclass(frozen=True, slots=True)
class MeasuredBreakdown:
    """The measured memory breakdown, at the peak or at the out-of-memory failure."""

    memory: Memory
    modules: tuple[ModuleActivations, ...]
    out_of_memory: OutOfMemoryPoint | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllocatorSetup:
    """The allocator's settings and the sizes of library workspaces, which decide a run's allocations."""

    settings: AllocatorSettings
    workspaces: Workspaces


def measured_breakdown(
    history: AllocationHistory,
    setup: AllocatorSetup,
    totals: MeasuredTotals,
    tracked_steps: Sequence[int],
    failure: Failure | None = None,
    segments: Segments = (),
) -> MeasuredBreakdown:
    """Compute the breakdown of a recorded run at its peak or, if it ran out of memory, at ``failure``.

    Args:
        history: The recorded allocations.
        setup: The allocator settings and workspace sizes of the run.
        totals: The totals that were read during the run.
        tracked_steps: Steps in which module calls were recorded.
        failure: The out-of-memory error that ended the run.
        segments: The segments at the beginning of the history (see ``layout.replay_history``).
    """
    if failure is not None:
        return _breakdown_at_failure(history, setup, totals, tracked_steps, failure, segments)
    trace = to_trace(release_on_request(history))
    unknown_steps = label_remaining(trace, setup.workspaces, tracked_steps)
    replay = replay_history(history, trace, setup.settings, segments)
    analyzed = analyze_replay(trace, replay, totals.context_bytes)
    memory, notes = reconcile(analyzed.memory, totals)
    if memory.peak.step not in unknown_steps and tracked_steps:
        return MeasuredBreakdown(memory, analyzed.modules, None, notes)
    no_modules = _NO_MODULES.format(step=memory.peak.step + 1, what="the peak")
    return MeasuredBreakdown(memory, (), None, (*notes, no_modules))


def _breakdown_at_failure(
    history: AllocationHistory,
    setup: AllocatorSetup,
    totals: MeasuredTotals,
    tracked_steps: Sequence[int],
    failure: Failure,
    segments: Segments,
) -> MeasuredBreakdown:
    """Compute the breakdown of the memory held when the last request failed."""
    refusals = [index for index, event in enumerate(history.events) if event.action == "oom"]
    failed_at = next((note.at for note in history.notes if note.name == "failed"), len(history.events))
    end = refusals[-1] if refusals else failed_at
    notes = [note._replace(at=min(note.at, end)) for note in history.notes if note.at <= end or note.name == "failed"]
    until = replace(history, events=history.events[:end], notes=notes)
    trace = to_trace(release_on_request(until))
    unknown_steps = label_remaining(trace, setup.workspaces, tracked_steps)
    analyzed = analyze_replay(trace, replay_history(until, trace, setup.settings, segments), totals.context_bytes)
    held = held_after(trace, len(trace.events))
    parts = bytes_by_component(held, analyzed.purposes, analyzed.sizes)
    allocated = sum(parts.values())
    reserved = max(failure.reserved_bytes, allocated)
    memory = replace(
        analyzed.memory,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + totals.context_bytes,
        components=Components.from_dict({**parts, "cache": reserved - allocated, "context": totals.context_bytes}),
        lines=breakdown_lines(held, analyzed.purposes, analyzed.sizes),
        logits_and_loss=bytes_of_logits(trace, held, analyzed.purposes, analyzed.sizes),
        peak=failure.instant,
        num_alloc_retries=totals.num_alloc_retries,
    )
    requested = history.events[end].bytes if refusals else failure.requested_bytes
    point = OutOfMemoryPoint(failure.instant, requested, allocated, reserved)
    if failure.instant.step in unknown_steps:
        no_modules = _NO_MODULES.format(step=failure.instant.step + 1, what="the failure")
        return MeasuredBreakdown(memory, (), point, (no_modules,))
    return MeasuredBreakdown(memory, activations_by_module(trace, held, analyzed.purposes, analyzed.sizes), point, ())


def reconcile(memory: Memory, totals: MeasuredTotals) -> tuple[Memory, tuple[str, ...]]:
    """Return ``memory`` with the totals that were read during the run, and a note for each total that differed."""
    notes = []
    allocated, reserved = totals.peak_allocated_bytes, totals.peak_reserved_bytes
    parts, items = memory.components, memory.lines
    if missing := allocated - memory.peak_allocated_bytes:
        parts = replace(parts, functionality=parts.functionality + missing)
        items = (*items, Line("functionality", UNEXPLAINED, missing, 0))
        notes.append(
            _difference_note(
                "peak allocated", memory.peak_allocated_bytes, allocated, "a line of inputs and workspaces"
            )
        )
    if memory.peak_reserved_bytes != reserved:
        notes.append(_difference_note(RESERVED_NOTE, memory.peak_reserved_bytes, reserved, "the cache"))
    if totals.device_bytes is None:
        notes.append("the driver does not report what the process holds, so the breakdown has no CUDA context")
    return replace(
        memory,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_bytes=reserved + totals.context_bytes,
        model_bytes=memory.model_bytes if totals.model_bytes is None else totals.model_bytes,
        components=replace(parts, cache=reserved - allocated, context=totals.context_bytes),
        lines=items,
        num_alloc_retries=totals.num_alloc_retries,
    ), tuple(notes)


def _difference_note(what: str, replayed: int, counted: int, where: str) -> str:
    return (
        f"{what}: PyTorch counted {exact_bytes(counted)} bytes, the replay of the recorded allocations gives "
        f"{exact_bytes(replayed)}; the difference is in {where}"
    )
