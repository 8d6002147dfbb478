"""``PYTORCH_ALLOC_CONF``; the accepted and refused values were compared with torch 2.13's own parser."""

from __future__ import annotations

import pytest

from trainatomy.allocator import AllocatorSettings
from trainatomy.allocator.blocks import MIB
from trainatomy.errors import WorkloadError


def test_empty_is_the_default() -> None:
    assert AllocatorSettings.parse("", (2, 12)) == AllocatorSettings(torch_version=(2, 12))


def test_options_spaces_and_a_last_comma() -> None:
    settings = AllocatorSettings.parse("expandable_segments: True, max_split_size_mb:128,", (2, 9))
    assert settings.expandable_segments
    assert settings.max_split_size_bytes == 128 * MIB


def test_cpu_only_options_are_accepted() -> None:
    assert AllocatorSettings.parse("pinned_use_background_threads:True,backend:native", (2, 13)) == AllocatorSettings()


@pytest.mark.parametrize(
    ("value", "divisions"),
    [
        ("4", (4,) * 16),
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", (8,) * 7 + (2, 4, 2, 4) + (1,) * 5),
        ("[131072:2,>:4]", (2,) * 16),
    ],
)
def test_divisions(value: str, divisions: tuple[int, ...]) -> None:
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{value}", (2, 13))
    assert settings.roundup_power2_divisions == divisions


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_split_size_md:128", "max_split_size_mb"),
        ("expandable_segment:True", "expandable_segments"),
        ("expandable_segments:true", "True or False"),
        ("expandable_segments", "option:value"),
        ("max_split_size_mb:", "option:value"),
        ("max_split_size_mb:19", "of at least 20"),
        ("max_split_size_mb:12x", "max_split_size_mb"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "of at least 40"),
        ("max_non_split_rounding_mb:10", "of at least 20"),
        ("large_segment_size_mb:10", "above 10"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:x", "between 0 and 1"),
        ("per_process_memory_fraction:2", "from 0 to 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[256:3]", "power of two"),
        ("roundup_power2_divisions:[300:2]", "power of two"),
        ("roundup_power2_divisions:[256:2,>:4", "256"),
        ("backend:cudaMallocAsync", "native"),
        ("qqq:1", "known are"),
    ],
)
def test_errors_name_the_option_and_the_way_out(text: str, part: str) -> None:
    with pytest.raises(WorkloadError, match="allocator") as caught:
        AllocatorSettings.parse(text, (2, 13))
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "since"),
    [
        ("large_segment_size_mb:40", (2, 13)),
        ("per_process_memory_fraction:0.5", (2, 10)),
        ("throw_on_cudamalloc_oom:False", (2, 13)),
        ("expandable_segments_reserve:0.5", (2, 15)),
        ("expandable_segments_reserve_by_class:[a:0.5]", (2, 15)),
    ],
)
def test_options_are_gated_by_version(text: str, since: tuple[int, int]) -> None:
    AllocatorSettings.parse(text, since)
    with pytest.raises(WorkloadError, match=f"since torch {since[0]}.{since[1]}, this is 2.9"):
        AllocatorSettings.parse(text, (2, 9))
