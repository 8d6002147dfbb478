"""A predicted training as a memory snapshot of PyTorch, for https://pytorch.org/memory_viz and its other readers.

The format is that of ``torch.cuda.memory._snapshot`` (torch/csrc/cuda/memory_snapshot.cpp, torch 2.9-2.13).  The viewer
(torch/utils/viz/MemoryViz.js) reads pickles of the protocols 2 to 4; it colours allocations by ``category``, and fails
unless some entry has the category ``unknown``.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from trainatomy.reporters.labels import PHASES, component
from trainatomy.results.detail import Allocation, Detail, Segment, SegmentEvent, Source

PROTOCOL = 4
_DEVICE = 0
_NO_POOL = (0, 0)
_UNKNOWN = "unknown"


def memory_snapshot(detail: Detail) -> bytes:
    """Return the pickle of a snapshot.

    An allocation has two frames: its operation in its module, and what it holds.  ``time_us`` counts events, because
    not all of them have a predicted time.
    """
    frames = [_frames(source) for source in detail.sources]
    content = {
        "segments": [_segment(segment, detail.allocations, frames) for segment in detail.segments],
        "device_traces": [list(_entries(detail, frames))],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": detail.allocator,
            "expandable_segments": "expandable_segments:True" in detail.allocator,
        },
    }
    return pickle.dumps(content, protocol=PROTOCOL)


def _frames(source: Source) -> list[dict[str, Any]]:
    step = "before the first step" if source.step < 0 else f"step {source.step + 1}"
    phase = PHASES.get(source.phase, source.phase)
    return [
        {"name": source.operation or "(no operation)", "filename": source.module or "(no module)", "line": 0},
        {"name": f"{component(source.component).title}: {source.line}", "filename": f"{step}, {phase}", "line": 0},
    ]


def _entries(detail: Detail, frames: Sequence[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the entries of the trace: what the driver was asked for comes before the event that needed it."""
    born = {each.born: each for each in detail.allocations}
    died = {each.died: each for each in detail.allocations if each.died >= 0}
    driver: dict[int, list[SegmentEvent]] = {}
    for one in detail.segment_events:
        driver.setdefault(one.event, []).append(one)
    for event in range(detail.events):
        for one in driver.get(event, ()):
            yield _entry(one.action, one.address, one.bytes, one.stream, event, [], _UNKNOWN)
        if event in born:
            yield _of_allocation("alloc", born[event], event, detail, frames)
        if event in died:
            yield _of_allocation("free_requested", died[event], event, detail, frames)
            yield _of_allocation("free_completed", died[event], event, detail, frames)


def _of_allocation(
    action: str, one: Allocation, event: int, detail: Detail, frames: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:
    category = component(detail.sources[one.source].component).title
    return _entry(action, one.address, one.requested, one.stream, event, frames[one.source], category)


def _entry(
    action: str, address: int, size: int, stream: int, event: int, frames: list[dict[str, Any]], category: str
) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "time_us": event,
        "pool_id": _NO_POOL,
        "frames": frames,
        "category": category,
    }


def _segment(
    segment: Segment, allocations: Sequence[Allocation], frames: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for block in segment.blocks:
        held = allocations[block.allocation] if block.allocation >= 0 else None
        blocks.append(
            {
                "address": block.address,
                "size": block.bytes,
                "requested_size": held.requested if held else 0,
                "state": "active_allocated" if held else "inactive",
                "frames": frames[held.source] if held else [],
            }
        )
    active = [block for block in blocks if block["state"] == "active_allocated"]
    allocated = sum(block["size"] for block in active)
    return {
        "device": _DEVICE,
        "address": segment.address,
        "total_size": segment.bytes,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": _NO_POOL,
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": blocks,
    }
