"""Analyze the memory of an allocation trace: the breakdown at the peak, and whether it fits.

Assign every allocation of a trace to a component of the memory breakdown.

Labels decide where the run knew the purpose (weights, gradients, optimizer states, inputs, workspaces).  The rest
follows from when an allocation was made and freed: one that was made in a forward pass (or its recomputation) and is
still held when that pass ends is an activation saved for backward; anything else made in forward, backward or the
optimizer is temporary.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from trainatomy.allocator.replay import Peaks, Replay, peaks_of, replay, replay_on_least, unlimited_replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.logits import logits_and_loss
from trainatomy.analysis.variants import StepClock, layout_range, peak_range, plan_range, released_by_clock
from trainatomy.results.memory import Components, Instant, Line, Memory, ModuleActivations, OutOfMemoryPoint, Verdict
from trainatomy.results.trace import AllocationTrace, DriverCall

_NEVER = 1 << 62

LABELLED = {
    "weight": ("weights", "parameters"),
    "buffer": ("weights", "buffers"),
    "reference_weight": ("weights", "reference model"),
    "average_weight": ("weights", "moving average"),
    "replica_weight": ("weights", "replica of this step"),
    "scale": ("weights", "scales of quantised weights"),
    "weight_copy": ("weights", "16-bit copies kept by autocast"),
    "gradient": ("gradients", "gradients"),
    "optimizer_state": ("optimizer_states", "optimizer states"),
    "master_weight": ("optimizer_states", "fp32 master weights"),
    "gathered_weight": ("gathered_weights", "gathered weights"),
    "communication_buffer": ("communication_buffers", "communication buffers"),
    "key_value_cache": ("key_value_cache", "keys and values"),
    "input": ("functionality", "inputs"),
    "cublas_workspace": ("functionality", "cuBLAS workspaces"),
    "cublaslt_workspace": ("functionality", "cuBLASLt workspaces"),
    "hipblas_workspace": ("functionality", "hipBLAS workspaces"),
    "hipblaslt_workspace": ("functionality", "hipBLASLt workspaces"),
}
"""Component and line of the memory breakdown by label."""


_FORWARDS = ("evaluation forward", "evaluation forward end")
"""Marks around the forward of an evaluation batch."""


class Purpose(NamedTuple):
    """A component of the memory breakdown, and a line within it."""

    component: str
    line: str


_OF_LABELS = {label: Purpose(*purpose) for label, purpose in LABELLED.items()}
_OF_PHASES = {
    phase: Purpose("temporary", phase)
    for phase in ("backward", "optimizer", "prefill", "decode", "saving", "restoring")
}
_OF_THE_LOOP = Purpose("functionality", "kept by the loop")
_TEMPORARY = Purpose("temporary", "forward")
_SAVED = Purpose("activations", "saved for backward")
_SAVED_BY_RECOMPUTATION = Purpose("activations", "saved by recomputation")


class Lifetimes(NamedTuple):
    """Index of the events that made and that freed each allocation (a huge number if never)."""

    born: list[int]
    died: list[int]


def lifetimes(trace: AllocationTrace) -> Lifetimes:
    """Return when each allocation of a trace was made and freed; the trace keeps it until it grows."""
    length, known = trace.replayed.get("lifetimes", (None, None))
    if length == len(trace.events):
        found: Lifetimes = known
        return found
    count = len(trace.origins)
    born, died = [_NEVER] * count, [_NEVER] * count
    for index, (action, number, _, _) in enumerate(trace.events):
        if action == "alloc":
            born[number] = index
        elif action == "free":
            died[number] = index
    trace.replayed["lifetimes"] = len(trace.events), Lifetimes(born, died)
    return Lifetimes(born, died)


def purposes(trace: AllocationTrace, lives: Lifetimes) -> list[Purpose]:
    """Return the purpose of each allocation, by its number."""
    ends = {
        "forward": [m.event for m in trace.marks if m.name == "forward end"],
        "recompute": [m.event for m in trace.marks if m.name == "recompute end"],
    }
    evaluated = [(m.event, m.name) for m in trace.marks if m.name in _FORWARDS]
    ends["evaluation"] = [event for event, name in evaluated if name == _FORWARDS[1]]
    begins = [event for event, name in evaluated if name == _FORWARDS[0]]
    labels, found = trace.labels, list[Purpose]()
    for number, (_, _, phase, _) in enumerate(trace.origins):
        label = labels.get(number)
        if label is not None:
            found.append(_OF_LABELS.get(label) or Purpose("functionality", label))
        elif phase in ends:
            found.append(_of_forward(phase, lives.born[number], lives.died[number], ends[phase], begins))
        else:
            found.append(_OF_PHASES.get(phase, _OF_THE_LOOP))
    return found


def _of_forward(phase: str, born: int, died: int, ends: Sequence[int], begins: Sequence[int]) -> Purpose:
    """Return the purpose of an allocation of a forward pass; ``ends``: of all passes in this phase."""
    if phase == "evaluation":
        return _in_evaluation(born, died, begins, ends)
    later = bisect_right(ends, born)
    if died < (ends[later] if later < len(ends) else _NEVER):
        return _TEMPORARY
    return _SAVED_BY_RECOMPUTATION if phase == "recompute" else _SAVED


def _in_evaluation(born: int, died: int, begins: Sequence[int], ends: Sequence[int]) -> Purpose:
    """Return the purpose of an allocation of an evaluation: temporary, if it dies in the forward that made it."""
    forwards, done = bisect_right(begins, born), bisect_right(ends, born)
    if forwards > done and (done >= len(ends) or died < ends[done]):
        return Purpose("temporary", "evaluation")
    return Purpose("gathered_outputs", "outputs gathered by evaluation")


COMPONENTS = ("weights", "optimizer_states", "gradients", "activations", "temporary", "functionality")
OTHER_COMPONENTS = ("gathered_weights", "communication_buffers", "gathered_outputs", "key_value_cache")
"""Components that only some trainings have, in display order."""
_ORDER = (*COMPONENTS, *OTHER_COMPONENTS)
TIGHT_SHARE = 0.05
"""A training that leaves less than this share of the GPU's memory free is called tight."""
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LAYER_OR_ROOT = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class MemoryAnalysis:
    """The memory breakdown of a trace, and the per-allocation data it was computed from.

    Attributes:
        memory: Peaks and the memory breakdown at the peak.
        modules: Activations at the peak by module.
        out_of_memory: Where the training would stop, or ``None`` if it fits.
        purposes: The purpose of each allocation, by its number.
        sizes: The block size of each allocation in bytes, by its number.
        held_at_peak: Numbers of the allocations held at the peak.
        skipped_workspaces: Allocations of one step that a library did without for lack of memory.
        driver_calls: The allocator's calls to the driver (see ``Replay``).
        allocated_bytes: Allocated bytes after each event.
        reserved_bytes: Reserved bytes after each event.
    """

    memory: Memory
    modules: tuple[ModuleActivations, ...]
    out_of_memory: OutOfMemoryPoint | None
    purposes: Sequence[Purpose]
    sizes: Sequence[int]
    held_at_peak: Sequence[int] = ()
    skipped_workspaces: Sequence[int] = ()
    driver_calls: Sequence[DriverCall] = ()
    allocated_bytes: Sequence[int] = ()
    reserved_bytes: Sequence[int] = ()


def analyze_memory(
    trace: AllocationTrace,
    settings: AllocatorSettings,
    gpu_bytes: int,
    context_bytes: int,
    nccl_bytes: int = 0,
    clock: StepClock | None = None,
    *,
    layouts: bool | Literal["scarce"] = False,
) -> MemoryAnalysis:
    """Replay a trace through the simulated allocator and analyze the outcome.

    A training that does not fit is shown as it would be on the smallest GPU on which it runs, and its calls to the
    driver, which take time, as on one with plenty of memory.

    Args:
        trace: The allocations and frees of a run.
        settings: The allocator's settings (``PYTORCH_CUDA_ALLOC_CONF``).
        gpu_bytes: The GPU's memory.
        context_bytes: Bytes of it that the CUDA context and the libraries' kernels take.
        nccl_bytes: Bytes of it that NCCL takes.
        clock: Predicted times, which releases that wait for streams or NCCL depend on (see ``late_releases``).
        layouts: Replay it with other addresses of segments, too (``Memory.layouts``; see ``are_wanted``).
    """
    unlimited, kinds = unlimited_replay(trace, settings, gpu_bytes), _kept_purposes(trace)
    capacity = gpu_bytes - context_bytes - nccl_bytes
    enough = unlimited.peak_reserved_bytes <= capacity
    bounded = unlimited if enough else replay(trace, settings, max(capacity, 0), device_bytes=gpu_bytes)
    if (failure := _out_of_memory_point(trace, bounded)) is not None:
        least = replay_on_least(trace, settings, gpu_bytes, gpu_bytes - capacity, unlimited)
        needed = analyze_replay(trace, least, context_bytes, failure, nccl_bytes, kinds)
        return replace(needed, driver_calls=unlimited.driver_calls)
    found = analyze_replay(trace, bounded, context_bytes, nccl_bytes=nccl_bytes, kinds=kinds)
    by_clock = released_by_clock(trace, clock) if clock is not None and trace.stream_uses else None
    if by_clock is not None:
        (by_time,) = peaks_of(by_clock, settings, gpu_bytes)
        found = replace(found, memory=_with_reserved(found.memory, min(by_time.reserved_bytes, capacity)))
    at_once = Peaks(unlimited.peak_allocated_bytes, unlimited.peak_reserved_bytes)
    peaks = peak_range(trace, settings, gpu_bytes, found.memory, at_once, clock)
    plans = plan_range(trace, settings, gpu_bytes, found.memory)
    others = None
    if are_wanted(layouts, found.memory, gpu_bytes) and not found.memory.num_alloc_retries:
        others = layout_range(by_clock or trace, settings, gpu_bytes, found.memory)
    return replace(found, memory=replace(found.memory, range=peaks, plans=plans, layouts=others))


def are_wanted(layouts: bool | Literal["scarce"], memory: Memory, gpu_bytes: int) -> bool:
    """Return whether to try what moves peaks a little; ``"scarce"``: only where it may change the verdict.

    That is where the reserved memory could not double. Other addresses and skipped steps have moved it by a few
    percent.
    """
    if layouts == "scarce":
        return gpu_bytes - memory.device_bytes - memory.peak_reserved_bytes < TIGHT_SHARE * gpu_bytes
    return layouts


def _kept_purposes(trace: AllocationTrace) -> Sequence[Purpose]:
    """Return the purposes of a finished trace's allocations, which it keeps: they depend on nothing else."""
    key = "purposes", len(trace.events)
    if key not in trace.replayed:
        trace.replayed[key] = purposes(trace, lifetimes(trace))
    found: Sequence[Purpose] = trace.replayed[key]
    return found


def analyze_replay(
    trace: AllocationTrace,
    replayed: Replay,
    context_bytes: int,
    failure: OutOfMemoryPoint | None = None,
    nccl_bytes: int = 0,
    kinds: Sequence[Purpose] | None = None,
) -> MemoryAnalysis:
    """Analyze a trace whose replay is known, and perhaps the purposes of its allocations."""
    kinds = kinds or purposes(trace, lifetimes(trace))
    held = held_after(trace, replayed.peak_allocated_at) if replayed.peak_allocated_at is not None else []
    return MemoryAnalysis(
        memory=_memory(trace, replayed, kinds, held, context_bytes, nccl_bytes),
        modules=activations_by_module(trace, held, kinds, replayed.block_bytes),
        out_of_memory=failure,
        purposes=kinds,
        sizes=replayed.block_bytes,
        held_at_peak=held,
        skipped_workspaces=_of_last_step(trace, replayed.skipped_workspaces),
        driver_calls=replayed.driver_calls,
        allocated_bytes=replayed.allocated_bytes,
        reserved_bytes=replayed.reserved_bytes,
    )


def verdict(memory: Memory, gpu_bytes: int, out_of_memory: OutOfMemoryPoint | None) -> Verdict:
    """Return whether a training fits; ``tight``: barely, or only because the allocator frees its cache.

    Where memory depends on timing, on the fastest plans, on addresses or on skipped steps, it has to fit in the worst
    case.
    """
    if out_of_memory is not None:
        return "does not fit"
    scarce = gpu_bytes - memory.worst_device_bytes < TIGHT_SHARE * gpu_bytes
    return "tight" if scarce or memory.num_alloc_retries else "fits"


def held_after(trace: AllocationTrace, event: int) -> list[int]:
    """Return the numbers of the allocations that are held after the event of that index, the oldest first."""
    births, deaths = lifetimes(trace)
    held = [number for number, born in enumerate(births) if born <= event < deaths[number]]
    return sorted(held, key=births.__getitem__)


def bytes_by_component(held: Sequence[int], purposes: Sequence[Purpose], sizes: Sequence[int]) -> dict[str, int]:
    """Sum the block sizes of the ``held`` allocations by component; all of ``COMPONENTS`` are present."""
    totals = dict.fromkeys(_ORDER, 0)
    for number in held:
        totals[purposes[number].component] += sizes[number]
    return {name: size for name, size in totals.items() if size or name in COMPONENTS}


def breakdown_lines(held: Sequence[int], purposes: Sequence[Purpose], sizes: Sequence[int]) -> tuple[Line, ...]:
    """Return the lines of the memory breakdown in the order of the components, within each the largest first."""
    totals: dict[Purpose, list[int]] = defaultdict(lambda: [0, 0])
    for number in held:
        entry = totals[purposes[number]]
        entry[0] += sizes[number]
        entry[1] += 1
    found = [Line(purpose.component, purpose.line, size, count) for purpose, (size, count) in totals.items()]
    return tuple(sorted(found, key=lambda line: (_ORDER.index(line.component), -line.bytes)))


def bytes_of_logits(
    trace: AllocationTrace, held: Sequence[int], purposes: Sequence[Purpose], sizes: Sequence[int]
) -> dict[str, int]:
    """Sum the block sizes of the held allocations that hold logits or belong to the loss, by component."""
    found = bytes_by_component(sorted(logits_and_loss(trace).intersection(held)), purposes, sizes)
    return {name: size for name, size in found.items() if size}


def activations_by_module(
    trace: AllocationTrace, held: Sequence[int], purposes: Sequence[Purpose], sizes: Sequence[int]
) -> tuple[ModuleActivations, ...]:
    """Sum the held activations by module, layers folded, the largest first."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for number in held:
        if purposes[number].component == "activations":
            entry = totals[fold_layers(trace.origins[number].module)]
            entry[0] += sizes[number]
            entry[1] += 1
    shares = (ModuleActivations(module, size, count) for module, (size, count) in totals.items())
    return tuple(sorted(shares, key=lambda share: -share.activation_bytes))


def fold_layers(path: str, *, root: bool = False) -> str:
    """Replace layer numbers: ``encoder.layer.7.attention`` becomes ``encoder.layer.*.attention``.

    ``root``: also a number at the beginning (``3.attention``), as in a model that is a ``Sequential`` itself.
    """
    return (_LAYER_OR_ROOT if root else _LAYER).sub("*", path)


def _of_last_step(trace: AllocationTrace, allocations: Sequence[int]) -> tuple[int, ...]:
    """Keep the allocations of the last step that has any: a library that once does without continues to do so."""
    last = max((trace.origins[number].step for number in allocations), default=0)
    return tuple(number for number in allocations if trace.origins[number].step == last)


def _memory(
    trace: AllocationTrace,
    replayed: Replay,
    kinds: Sequence[Purpose],
    held: Sequence[int],
    context_bytes: int,
    nccl_bytes: int,
) -> Memory:
    parts = bytes_by_component(held, kinds, replayed.block_bytes)
    outside = {"nccl": nccl_bytes} if nccl_bytes else {}
    cache = replayed.peak_reserved_bytes - replayed.peak_allocated_bytes
    loaded = next((mark.event for mark in trace.marks if mark.name == "loaded"), 0)
    return Memory(
        peak_allocated_bytes=replayed.peak_allocated_bytes,
        peak_reserved_bytes=replayed.peak_reserved_bytes,
        device_bytes=replayed.peak_reserved_bytes + context_bytes + nccl_bytes,
        peak_requested_bytes=replayed.peak_requested_bytes,
        model_bytes=replayed.allocated_bytes[loaded - 1] if loaded else 0,
        components=Components.from_dict({**parts, **outside, "cache": cache, "context": context_bytes}),
        lines=breakdown_lines(held, kinds, replayed.block_bytes),
        logits_and_loss=bytes_of_logits(trace, held, kinds, replayed.block_bytes),
        peak=_instant(trace, replayed.peak_allocated_at),
        num_alloc_retries=replayed.num_alloc_retries,
    )


def _with_reserved(memory: Memory, reserved: int) -> Memory:
    """Return the memory with another reserved peak, whose difference is cache."""
    more = reserved - memory.peak_reserved_bytes
    return replace(
        memory,
        peak_reserved_bytes=reserved,
        device_bytes=memory.device_bytes + more,
        components=replace(memory.components, cache=memory.components.cache + more),
    )


def _instant(trace: AllocationTrace, event: int | None) -> Instant:
    if event is None or trace.events[event].action != "alloc":  # nothing was ever held: no event is a peak
        return Instant(-1, "load", "", "")
    origin = trace.origins[trace.events[event].allocation]
    return Instant(origin.step, origin.phase, origin.module, origin.operation)


def _out_of_memory_point(trace: AllocationTrace, bounded: Replay) -> OutOfMemoryPoint | None:
    failure = bounded.out_of_memory
    if failure is None:
        return None
    instant = _instant(trace, bounded.out_of_memory_at)
    return OutOfMemoryPoint(instant, failure.requested, failure.allocated, failure.reserved)
