"""Replays of hand-written allocation traces."""

from __future__ import annotations

import pytest

from trainatomy.allocator import AllocatorSettings, OutOfMemory, replay
from trainatomy.allocator.blocks import MIB
from trainatomy.results.trace import AllocationTrace, Event, Origin, PinnedBlock

DEFAULT = AllocatorSettings()


def test_series_sizes_and_peaks() -> None:
    events = [
        Event("alloc", 0, 1000),
        Event("alloc", 1, 0),
        Event("alloc", 2, 30 * MIB),
        Event("free", 2, 0),
        Event("empty_cache", -1, 0),
        Event("free", 1, 0),
    ]
    result = replay(AllocationTrace(events), DEFAULT)
    assert list(result.block_bytes) == [1024, 0, 30 * MIB]
    assert list(result.allocated_bytes) == [1024, 1024, 1024 + 30 * MIB, 1024, 1024, 1024]
    assert list(result.reserved_bytes) == [2 * MIB, 2 * MIB, 32 * MIB, 32 * MIB, 2 * MIB, 2 * MIB]
    assert (result.peak_allocated_bytes, result.peak_allocated_at) == (1024 + 30 * MIB, 2)
    assert (result.peak_reserved_bytes, result.peak_reserved_at) == (32 * MIB, 2)
    assert result.out_of_memory is None
    assert result.out_of_memory_at is None


def test_an_empty_trace() -> None:
    result = replay(AllocationTrace(), DEFAULT)
    assert (result.peak_allocated_bytes, result.peak_allocated_at) == (0, None)


def test_out_of_memory_ends_the_replay() -> None:
    events = [Event("alloc", 0, 30 * MIB), Event("alloc", 1, 30 * MIB), Event("free", 0, 0)]
    result = replay(AllocationTrace(events), DEFAULT, 40 * MIB)
    assert isinstance(result.out_of_memory, OutOfMemory)
    assert result.out_of_memory_at == 1
    assert list(result.allocated_bytes) == [30 * MIB, 30 * MIB]
    assert list(result.block_bytes) == [30 * MIB, 0]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Event("free", 0, 0)], "event 0: allocation 0 is freed but not allocated"),
        ([Event("alloc", 0, 1), Event("alloc", 0, 1)], "event 1: allocation 0 is allocated twice"),
    ],
)
def test_impossible_traces(events: list[Event], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(AllocationTrace(events), DEFAULT)


class Journal:
    """Address policy that records its calls."""

    def __init__(self) -> None:
        self.notes: list[str | int] = []

    def take(self, size: int) -> int:
        self.notes.append(size // MIB)
        return 1000 * MIB * len(self.notes)

    def give_back(self, address: int, size: int) -> None:
        self.notes.append(-size // MIB)

    def kernels_loaded(self) -> None:
        self.notes.append("kernels")

    def handle_created(self) -> None:
        self.notes.append("handle")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({2: "cublas_workspace", 4: "cublas_workspace"}, [12, "kernels", 14, "handle", 16, 18, "handle", 20]),
        ({}, [12, "kernels", "handle", 14, 16, 18, 20]),
    ],
)
def test_addresses_depend_on_when_libraries_load(labels: dict[int, str], expected: list[str | int]) -> None:
    events = [Event("alloc", n, (12 + 2 * n) * MIB) for n in range(5)]
    origins = [Origin("", "", "load" if n == 0 else "forward", 0) for n in range(5)]
    journal = Journal()
    replay(AllocationTrace(events, origins, labels), DEFAULT, addresses=journal)
    assert journal.notes == expected


def test_large_blocks_of_pinned_host_memory_take_addresses() -> None:
    """A training with checkpoints in host memory lays out its segments around them (see ``segments.py``)."""
    events = [
        Event("alloc", 0, 20 * MIB),
        Event("alloc", 1, 30 * MIB),
        Event("free", 0, 0),
        Event("alloc", 2, 64 * MIB),
    ]
    origins = [Origin("", "", "load", 0) for _ in range(3)]
    pinned = [PinnedBlock(1, 32 * MIB), PinnedBlock(1, 4096), PinnedBlock(2, 8 * MIB), PinnedBlock(3, 16 * MIB)]
    journal = Journal()
    replay(AllocationTrace(events, origins, pinned=pinned), DEFAULT, addresses=journal)
    assert journal.notes == [20, 32, 30, 8, 64, "kernels", "handle"]
