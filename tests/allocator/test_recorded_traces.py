"""Simulated allocator against PyTorch itself: six runs on an H200 (torch 2.11.0+cu130, driver 580.159.04)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from recorded import NAMES, RecordedAddresses, load

from trainatomy.allocator import AllocatorSettings, replay

if TYPE_CHECKING:
    from array import array

SETTINGS = AllocatorSettings(torch_version=(2, 11))


def segments_in(reserved: array[int]) -> list[tuple[int, int]]:
    """Return (event, bytes) of each growth of the reserved memory."""
    return [(i, after - before) for i, (before, after) in enumerate(pairwise([0, *reserved])) if after > before]


def test_all_recordings_ship() -> None:
    assert len(NAMES) == 6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("addresses", ["recorded", "predicted"])
def test_every_segment_is_predicted(name: str, addresses: str) -> None:
    recording = load(name)
    policy = RecordedAddresses(recording.segments) if addresses == "recorded" else None
    result = replay(recording.trace, SETTINGS, addresses=policy)
    assert result.peak_allocated_bytes == recording.case["peak_alloc_all"]
    assert result.allocated_bytes[-1] == recording.case.get("end_alloc", result.allocated_bytes[-1])
    assert result.peak_reserved_bytes == recording.case["peak_reserved_all"]
    assert result.reserved_bytes[-1] == recording.case["end_reserved"]
    assert segments_in(result.reserved_bytes) == [(event, size) for event, size, _ in recording.segments]


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_that_is_one_segment_too_small(name: str) -> None:
    """Replay with less than the reserved peak (releases cached segments) and the allocated peak (fails)."""
    recording = load(name)
    tight = replay(recording.trace, SETTINGS, recording.case["peak_reserved_all"] - 1)
    assert tight.num_alloc_retries > 0
    short = replay(recording.trace, SETTINGS, recording.case["peak_alloc_all"] - 1)
    assert short.out_of_memory is not None
    assert short.out_of_memory_at == len(short.allocated_bytes) - 1
    assert short.out_of_memory.reserved <= recording.case["peak_alloc_all"] - 1
