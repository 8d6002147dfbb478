"""Replays an epoch whose steps differ, and follows its memory from step to step.

Memory that grows with each step: what steps allocate and nothing ever releases.

A loop that keeps losses with their graphs, or outputs, holds more after each step, and runs out of memory long after
the steps that were simulated.  A loader that is some batches ahead also holds more in its first steps, and an average
of the weights appears once: memory grows for good where each of the last steps adds to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainatomy.allocator.blocks import block_bytes
from trainatomy.allocator.replay import Replay, replay, replay_on_least
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import held_after, lifetimes
from trainatomy.results.lengths import OrderPrediction
from trainatomy.results.script import Growth
from trainatomy.results.trace import AllocationTrace, Origin


def steps_to_replay(longest: Sequence[int], most: int) -> tuple[int, ...]:
    """Return which steps of an epoch to replay: all, or the first ``most`` and those that matter after them.

    Reserved memory grows when a batch comes that is longer than any before it; such a step is replayed with the one
    before it, whose tensors it meets.

    Args:
        longest: Tokens of the longest row of each step.
        most: Steps from the start that are always replayed.
    """
    if len(longest) <= most:
        return tuple(range(len(longest)))
    chosen = set(range(most))
    record = max(longest[:most])
    for step in range(most, len(longest)):
        if longest[step] > record:
            record = longest[step]
            chosen |= {step - 1, step}
    return tuple(sorted(chosen))


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that an epoch is replayed in.

    Attributes:
        settings: Settings of the allocator.
        outside_bytes: Memory of the GPU that is not the allocator's.
        gpu_bytes: Memory of the GPU.
        least_bytes: Memory of the smallest GPU on which the orders replayed so far run, at least that of the GPU; an
            order that runs out of memory is shown as on that GPU, or on the smallest one on which it runs.
    """

    settings: AllocatorSettings
    outside_bytes: int
    gpu_bytes: int
    least_bytes: int

    def replay(self, trace: AllocationTrace, gpu_bytes: int) -> Replay:
        """Replay a trace on a GPU of this size, within what the allocator may take of it."""
        return replay(trace, self.settings, max(gpu_bytes - self.outside_bytes, 0), device_bytes=gpu_bytes)


def replay_order(
    trace: AllocationTrace,
    step_ends: Sequence[int],
    room: Room,
    *,
    seed: int,
    steps: tuple[int, ...],
    longest: tuple[int, ...],
    rank: int = 0,
) -> OrderPrediction:
    """Replay an epoch.

    Args:
        trace: Its allocations.
        step_ends: Number of events at the end of each step.
        room: The memory it is replayed in.
        seed: Seed of the order of samples.
        steps: Numbers of the steps.
        longest: Tokens of the longest row of each.
        rank: Rank that has these batches.
    """
    starts, gpu_bytes = (0, *step_ends[:-1]), room.gpu_bytes
    unlimited = replay(trace, room.settings, device_bytes=gpu_bytes)
    allocated, reserved = unlimited.allocated_bytes, unlimited.reserved_bytes
    enough = unlimited.peak_reserved_bytes <= gpu_bytes - room.outside_bytes
    bounded = unlimited if enough else room.replay(trace, gpu_bytes)
    fits = bounded.out_of_memory is None
    shown = bounded if fits or room.least_bytes == gpu_bytes else room.replay(trace, room.least_bytes)
    if shown.out_of_memory is not None:
        shown = replay_on_least(trace, room.settings, room.least_bytes, room.outside_bytes, unlimited)
    return OrderPrediction(
        seed=seed,
        steps=steps,
        longest=longest,
        allocated_bytes=tuple(max(allocated[start:end]) for start, end in zip(starts, step_ends, strict=True)),
        reserved_bytes=tuple(reserved[end - 1] for end in step_ends),
        peak_allocated_bytes=shown.peak_allocated_bytes,
        peak_reserved_bytes=shown.peak_reserved_bytes,
        num_alloc_retries=bounded.num_alloc_retries,
        fits=fits,
        rank=rank,
    )


def worst_of(orders: Sequence[OrderPrediction]) -> OrderPrediction:
    """Return the order that needs the most memory: one that does not fit, else the one that reserves the most."""

    def needs(one: OrderPrediction) -> tuple[bool, int, int]:
        reserved = max(one.reserved_bytes) if one.fits else one.peak_reserved_bytes
        return not one.fits, reserved, one.peak_allocated_bytes

    return max(orders, key=needs)


_STEPS = 3
"""Steps that it takes: two of them must have added to what the one before them held."""
_LAST_STEPS = 5
"""Steps that are looked at, of more."""
_MOMENTS = ("optimizer end", "backward end", "step end")
"""Moments at which steps are compared, the first of which they have: a loop holds the same of each step then."""

_STAYS = frozenset({"weight", "buffer", "scale", "gradient", "optimizer_state"})
"""Contents of which more in a later step are none that a loop forgets to release."""
Place = tuple[str, str]
"""Operation and module."""


def growth_of(trace: AllocationTrace, spare_bytes: int, ending: Mapping[Place, int] | None = None) -> Growth | None:
    """Return what each step adds to the memory of a training; None if nothing does, or steps are too few to tell.

    Args:
        trace: Allocations of its steps.
        spare_bytes: Memory of the GPU that was free after them.
        ending: Bytes that places add until they add no more, which are no growth if they are there.
    """
    if ending and sum(ending.values()) > spare_bytes:
        ending = None
    moments = _moments(trace)
    if len(moments) < _STEPS:
        return None
    held = list(_held(trace, list(moments.values())[-_LAST_STEPS:]))
    added = [{place: later[place] - earlier[place] for place in later} for earlier, later in pairwise(held)]
    growing = {
        place: min(one[place] for one in added[-2:])
        for place in added[-1]
        if all(one.get(place, 0) > 0 for one in added)
    }
    ends = [growing.pop(place) for place in ending or () if place in growing]
    # What takes the place of other memory, as a later batch that of the first, adds nothing.
    total = min(sum(growing.values()), held[-1].total() - held[-2].total() - sum(ends))
    if total <= 0:
        return None
    operation, module = max(growing, key=lambda place: growing[place])
    return Growth(total, operation, module, len(moments) + max(0, spare_bytes) // total)


def live_bytes(trace: AllocationTrace) -> int:
    """Return the bytes that are allocated at the end of a trace."""
    return sum(size for _, size in _held_after(trace, len(trace.events)))


def _moments(trace: AllocationTrace) -> dict[int, int]:
    """Return the number of events at the same moment of each step."""
    for name in _MOMENTS:
        found = {mark.step: mark.event for mark in trace.marks if mark.name == name and mark.step >= 0}
        if found:
            return found
    return {}


def _held(trace: AllocationTrace, moments: list[int]) -> Iterator[Counter[Place]]:
    """Yield the bytes of the blocks that are held at each moment, by what allocated them."""
    for moment in moments:
        held: Counter[Place] = Counter()
        for number, size in _held_after(trace, moment):
            if trace.labels.get(number) not in _STAYS:
                held[place_of(trace.origins[number])] += block_bytes(size, ())
        yield held


def _held_after(trace: AllocationTrace, count: int) -> Iterator[tuple[int, int]]:
    """Yield the allocations that are held after so many events, and their bytes."""
    births = lifetimes(trace).born
    for number in held_after(trace, count - 1):
        yield number, trace.events[births[number]].bytes


def place_of(origin: Origin) -> Place:
    """Return what made an allocation."""
    return origin.operation, origin.module
