"""The least memory with which a trace runs: a GPU of exactly that size is enough, and one of a little less is not."""

from __future__ import annotations

import pytest
from recorded import NAMES, load

from trainatomy.allocator import AllocatorSettings, replay
from trainatomy.allocator.blocks import MIB
from trainatomy.allocator.replay import PRECISION_BYTES, PRECISION_SHARE, replay_on_least
from trainatomy.results.trace import AllocationTrace, Event, Origin

CONTEXT = 500 * MIB
DEFAULT = AllocatorSettings()


def growing(pieces: int, size: int, *, choices: bool = False) -> AllocationTrace:
    """Return the trace of a tensor that grows by concatenation, as outputs that an evaluation gathers.

    ``choices``: each time with a workspace that its library can do without.
    """
    trace = AllocationTrace()

    def allocate(count: int) -> int:
        number = len(trace.origins)
        trace.origins.append(Origin("aten::cat", "", "evaluation", 0))
        trace.events.append(Event("alloc", number, count))
        return number

    held = None
    for grown in range(1, pieces + 1):
        piece = allocate(size)
        if choices:
            workspace = allocate(2 * pieces * size)
            trace.choices[workspace] = 0
            trace.events.append(Event("free", workspace, 0))
        larger = allocate(grown * size)
        trace.events += [Event("free", number, 0) for number in (held, piece) if number is not None]
        held = larger
    return trace


def least_size(trace: AllocationTrace, settings: AllocatorSettings, too_small: int) -> int:
    unlimited = replay(trace, settings, device_bytes=too_small)
    return replay_on_least(trace, settings, too_small, CONTEXT, unlimited).peak_reserved_bytes + CONTEXT


def runs(trace: AllocationTrace, settings: AllocatorSettings, size: int) -> bool:
    return replay(trace, settings, max(size - CONTEXT, 0), device_bytes=size).out_of_memory is None


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64"])
@pytest.mark.parametrize("trace", [growing(16, 300 * MIB), growing(5, 40 * MIB), growing(12, 200 * MIB, choices=True)])
def test_a_gpu_of_that_size_is_enough_and_a_little_less_is_not(trace: AllocationTrace, conf: str) -> None:
    settings = AllocatorSettings.parse(conf, (2, 13))
    size = least_size(trace, settings, 100 * MIB)
    less = size - max(PRECISION_BYTES, int(PRECISION_SHARE * size)) - MIB
    assert runs(trace, settings, size) and not runs(trace, settings, less)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_runs_need_what_they_allocate_and_a_little_more(name: str) -> None:
    trace = load(name).trace
    unlimited = replay(trace, DEFAULT)
    size = least_size(trace, DEFAULT, unlimited.peak_allocated_bytes // 2)
    less = size - max(PRECISION_BYTES, int(PRECISION_SHARE * size)) - MIB
    assert unlimited.peak_allocated_bytes <= size - CONTEXT <= unlimited.peak_reserved_bytes
    assert runs(trace, DEFAULT, size) and not runs(trace, DEFAULT, less)


def test_the_cache_of_a_gpu_of_any_size_does_not_count() -> None:
    """Check a sum of 136 pieces that no freed block fits, of which at most 31 are held at a time."""
    trace = growing(16, 300 * MIB)
    unlimited = replay(trace, DEFAULT)
    assert unlimited.peak_reserved_bytes > 3 * unlimited.peak_allocated_bytes
    assert least_size(trace, DEFAULT, 1000 * MIB) - CONTEXT < 1.35 * unlimited.peak_allocated_bytes


def test_a_share_of_the_gpu_that_may_be_used_makes_it_larger() -> None:
    settings = AllocatorSettings.parse("per_process_memory_fraction:0.5", (2, 13))
    trace = growing(8, 300 * MIB)
    unlimited = replay(trace, settings, device_bytes=1000 * MIB)
    assert unlimited.out_of_memory is not None
    found = replay_on_least(trace, settings, 1000 * MIB, CONTEXT, unlimited)
    assert found.out_of_memory is None and found.peak_allocated_bytes == replay(trace, DEFAULT).peak_allocated_bytes
