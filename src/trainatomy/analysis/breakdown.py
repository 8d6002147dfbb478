"""Settle a tape: what the allocator made of it, what was held at the peak, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainatomy.allocator.replay import Replay, replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.balance import by_component, by_module, held_after, lines
from trainatomy.analysis.purposes import Purpose, lifetimes, purposes
from trainatomy.results.memory import Components, Instant, Memory, ModuleActivations, OutOfMemoryPoint, Verdict
from trainatomy.results.trace import AllocationTrace, DriverCall

#: A training that leaves less of the card than this is called tight.
TIGHT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Settlement:
    """The bill, and what it was drawn from: the purpose and the block size (bytes) of every allocation.

    ``forgone``: allocations of one step that a library did without for lack of memory; ``driver_calls``: see
    ``Replay``.
    """

    memory: Memory
    modules: tuple[ModuleActivations, ...]
    out_of_memory: OutOfMemoryPoint | None
    purposes: Sequence[Purpose]
    sizes: Sequence[int]
    forgone: Sequence[int] = ()
    driver_calls: Sequence[DriverCall] = ()


def settle(trace: AllocationTrace, settings: AllocatorSettings, card_bytes: int, context_bytes: int) -> Settlement:
    """Replay the tape on a card of ``card_bytes`` of which the context takes ``context_bytes``.

    A training that does not fit is shown as it would be on a card that is large enough.
    """
    unlimited = replay(trace, settings, device_bytes=card_bytes)
    capacity = card_bytes - context_bytes
    enough = unlimited.peak_reserved_bytes <= capacity
    bounded = unlimited if enough else replay(trace, settings, max(capacity, 0), device_bytes=card_bytes)
    shown = bounded if bounded.out_of_memory is None else unlimited
    return settle_replayed(trace, shown, context_bytes, _failure(trace, bounded))


def settle_replayed(
    trace: AllocationTrace, shown: Replay, context_bytes: int, failure: OutOfMemoryPoint | None = None
) -> Settlement:
    """Settle a tape of which it is known what the allocator made of it."""
    kinds = purposes(trace, lifetimes(trace))
    held = held_after(trace, shown.peak_allocated_at) if shown.peak_allocated_at is not None else []
    memory = _memory(trace, shown, kinds, held, context_bytes)
    modules = by_module(trace, held, kinds, shown.block_bytes)
    forgone = _of_last_step(trace, shown.forgone)
    return Settlement(memory, modules, failure, kinds, shown.block_bytes, forgone, shown.driver_calls)


def verdict(memory: Memory, card_bytes: int, out_of_memory: OutOfMemoryPoint | None) -> Verdict:
    """``tight``: it fits with little to spare, or only because the allocator gives its cache back on the way."""
    if out_of_memory is not None:
        return "does not fit"
    scarce = card_bytes - memory.device_bytes < TIGHT_SHARE * card_bytes
    return "tight" if scarce or memory.num_alloc_retries else "fits"


def _of_last_step(trace: AllocationTrace, allocations: Sequence[int]) -> tuple[int, ...]:
    """Those of the last step that has any: what a library did without once, it does without in every step to come."""
    last = max((trace.origins[number].step for number in allocations), default=0)
    return tuple(number for number in allocations if trace.origins[number].step == last)


def _memory(
    trace: AllocationTrace, shown: Replay, kinds: Sequence[Purpose], held: Sequence[int], context_bytes: int
) -> Memory:
    parts = by_component(held, kinds, shown.block_bytes)
    cache = shown.peak_reserved_bytes - shown.peak_allocated_bytes
    loaded = next((mark.event for mark in trace.marks if mark.name == "loaded"), 0)
    return Memory(
        peak_allocated_bytes=shown.peak_allocated_bytes,
        peak_reserved_bytes=shown.peak_reserved_bytes,
        device_bytes=shown.peak_reserved_bytes + context_bytes,
        peak_requested_bytes=_peak_requested(trace, set(shown.forgone)),
        model_bytes=shown.allocated_bytes[loaded - 1] if loaded else 0,
        components=Components.from_dict({**parts, "cache": cache, "context": context_bytes}),
        lines=lines(held, kinds, shown.block_bytes),
        peak=_instant(trace, shown.peak_allocated_at),
        num_alloc_retries=shown.num_alloc_retries,
    )


def _peak_requested(trace: AllocationTrace, forgone: set[int]) -> int:
    sizes: dict[int, int] = {}
    now = peak = 0
    for action, allocation, size, _ in trace.events:
        if action == "alloc":
            sizes[allocation] = size = 0 if allocation in forgone else size
            now += size
            peak = max(peak, now)
        elif action == "free":
            now -= sizes.pop(allocation)
    return peak


def _instant(trace: AllocationTrace, event: int | None) -> Instant:
    if event is None or trace.events[event].action != "alloc":  # nothing was ever held: no event is a peak
        return Instant(-1, "load", "", "")
    origin = trace.origins[trace.events[event].allocation]
    return Instant(origin.step, origin.phase, origin.module, origin.operation)


def _failure(trace: AllocationTrace, bounded: Replay) -> OutOfMemoryPoint | None:
    failure = bounded.out_of_memory
    if failure is None:
        return None
    instant = _instant(trace, bounded.out_of_memory_at)
    return OutOfMemoryPoint(instant, failure.requested, failure.allocated, failure.reserved)
