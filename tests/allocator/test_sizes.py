"""Rounding, rule by rule; the source of each is named in ``blocks.py``."""

from __future__ import annotations

import pytest

from trainatomy.allocator.blocks import LARGE_SEGMENT_BYTES, MIB, block_bytes, round_to_division, segment_bytes
from trainatomy.allocator.settings import AllocatorSettings


@pytest.mark.parametrize(
    ("requested", "block"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (125018112, 125018112)],
)
def test_round_size(requested: int, block: int) -> None:
    assert block_bytes(requested, ()) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (125018112, 120 * MIB),
    ],
)
def test_get_allocation_size(block: int, segment: int) -> None:
    assert segment_bytes(block, LARGE_SEGMENT_BYTES) == segment


def test_large_segment_is_a_setting_since_2_13() -> None:
    settings = AllocatorSettings.parse("large_segment_size_mb:64", (2, 13))
    assert segment_bytes(2 * MIB, settings.large_segment_bytes) == 64 * MIB
    assert segment_bytes(12 * MIB, settings.large_segment_bytes) == 12 * MIB


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [(1200, 4, 1280), (1024, 4, 1024), (1025, 4, 1280), (1793, 4, 2048), (2048, 4, 2048), (5, 8, 8), (7, 2, 8)],
)
def test_roundup_power2_next_division(size: int, divisions: int, rounded: int) -> None:
    assert round_to_division(size, divisions) == rounded


@pytest.mark.parametrize(
    ("requested", "block"),
    [
        (2048, 2048),  # not above 512 x divisions: multiples of 512
        (2049, 2560),
        (5 * MIB + 1, 6 * MIB),
        (129 * MIB, 129 * MIB),  # from 128 MiB on: one division is no division
    ],
)
def test_divisions_apply_by_interval(requested: int, block: int) -> None:
    settings = AllocatorSettings.parse("roundup_power2_divisions:[64:4,>:1]", (2, 9))
    assert block_bytes(requested, settings.roundup_power2_divisions) == block
