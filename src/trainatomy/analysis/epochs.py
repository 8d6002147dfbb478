"""Replays an epoch whose steps differ, and follows its memory from step to step."""

from __future__ import annotations

from collections.abc import Sequence

from trainatomy.allocator.least import replay_on_least
from trainatomy.allocator.replay import Replay, replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.results.lengths import OrderPrediction
from trainatomy.results.trace import AllocationTrace


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


def replay_order(
    trace: AllocationTrace,
    step_ends: Sequence[int],
    settings: AllocatorSettings,
    outside_bytes: int,
    *,
    gpu_bytes: int,
    least_bytes: int,
    seed: int,
    steps: tuple[int, ...],
    longest: tuple[int, ...],
    rank: int = 0,
) -> OrderPrediction:
    """Replay an epoch.

    Args:
        trace: Its allocations.
        step_ends: Number of events at the end of each step.
        settings: Settings of the allocator.
        outside_bytes: Memory of the GPU that is not the allocator's.
        gpu_bytes: Memory of the GPU.
        least_bytes: Memory of the smallest GPU on which the orders replayed so far run, at least that of the GPU; an
            order that runs out of memory is shown as on that GPU, or on the smallest one on which it runs.
        seed: Seed of the order of samples.
        steps: Numbers of the steps.
        longest: Tokens of the longest row of each.
        rank: Rank that has these batches.
    """
    starts = (0, *step_ends[:-1])

    def on(size: int) -> Replay:
        return replay(trace, settings, max(size - outside_bytes, 0), device_bytes=size)

    unlimited = replay(trace, settings, device_bytes=gpu_bytes)
    allocated, reserved = unlimited.allocated_bytes, unlimited.reserved_bytes
    bounded = unlimited if unlimited.peak_reserved_bytes <= gpu_bytes - outside_bytes else on(gpu_bytes)
    fits = bounded.out_of_memory is None
    shown = bounded if fits or least_bytes == gpu_bytes else on(least_bytes)
    if shown.out_of_memory is not None:
        shown = replay_on_least(trace, settings, least_bytes, outside_bytes, unlimited)
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
