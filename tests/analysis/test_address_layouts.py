"""The range of peaks over places in the address space where the driver may put segments."""

from __future__ import annotations

from traces_by_hand import GIB, MIB, TraceBuilder

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory, verdict
from trainatomy.results.memory import PeakRange
from trainatomy.results.trace import AllocationTrace


def tied(scale: int) -> AllocationTrace:
    """Return a trace that needs a new segment where the rest of an older one lies below a whole one of its size."""
    builder = TraceBuilder()
    first, second = builder.allocate(6 * scale), builder.allocate(6 * scale)
    builder.free(first, second)
    begin = builder.allocate(3 * scale)
    builder.allocate(6 * scale)
    rest = builder.allocate(3 * scale)
    whole = builder.allocate(3 * scale)
    builder.free(rest, whole)
    builder.allocate(3 * scale)  # in the rest or in the whole one: the lower of them
    builder.free(begin)
    builder.allocate(6 * scale)  # fits into the older segment unless its rest was taken
    return builder.trace


def test_a_tie_that_addresses_decide_gives_a_range() -> None:
    memory = analyze_memory(tied(200 * MIB), AllocatorSettings(), 8 * GIB, 0, layouts=True).memory
    assert memory.peak_reserved_bytes == 3000 * MIB
    assert memory.layouts == PeakRange((3000 * MIB, 3000 * MIB), (3000 * MIB, 4200 * MIB))
    assert verdict(memory, 4100 * MIB, None) == "tight"


def test_small_trainings_and_expandable_segments_have_none() -> None:
    assert analyze_memory(tied(10 * MIB), AllocatorSettings(), 8 * GIB, 0, layouts=True).memory.layouts is None
    expandable = AllocatorSettings(expandable_segments=True)
    assert analyze_memory(tied(200 * MIB), expandable, 8 * GIB, 0, layouts=True).memory.layouts is None


def test_a_search_does_not_ask() -> None:
    assert analyze_memory(tied(200 * MIB), AllocatorSettings(), 8 * GIB, 0).memory.layouts is None
