"""Allocation traces that were recorded on a GPU: their format, and the trace that is replayed.

``recordings/*.json.xz`` contain the complete PyTorch memory history from the start of the process to the last step:
``events`` (a positive number allocates so many bytes, -n frees the allocation made n allocations ago), ``segments``
([index of the event, MiB, address in MiB] of each ``segment_alloc``) and ``case`` (the run, and PyTorch's own peaks).
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainatomy.allocator import AllocatorSettings, CachingAllocator
from trainatomy.allocator.blocks import MIB
from trainatomy.results.trace import AllocationTrace, Event, Origin

RECORDINGS = Path(__file__).parent / "recordings"
NAMES = sorted(path.name.removesuffix(".json.xz") for path in RECORDINGS.glob("*.json.xz"))


@dataclass(frozen=True)
class Recording:
    """A recorded run: ``segments`` are (event, bytes, address)."""

    trace: AllocationTrace
    segments: list[tuple[int, int, int]]
    case: dict[str, Any]


@cache
def load(name: str) -> Recording:
    """Read a recording."""
    stored = json.loads(lzma.decompress((RECORDINGS / f"{name}.json.xz").read_bytes()))
    events: list[Event] = []
    count = 0
    for number in stored["events"]:
        if number > 0:
            events.append(Event("alloc", count, number))
            count += 1
        else:
            events.append(Event("free", count + number, 0))
    loaded = _loaded_allocations(events, stored["case"]["alloc_model"])
    origins = [Origin("", "", "load" if n < loaded else "forward", 0) for n in range(count)]
    segments = [(event, size * MIB, address * MIB) for event, size, address in stored["segments"]]
    return Recording(AllocationTrace(events, origins), segments, stored["case"])


def _loaded_allocations(events: list[Event], allocated_bytes: int) -> int:
    """Return the number of allocations after which the model was loaded, by PyTorch's allocated bytes at that point."""
    simulated = CachingAllocator(AllocatorSettings())
    handles: dict[int, int] = {}
    for event in events:
        if event.action == "alloc":
            handles[event.allocation] = simulated.malloc(event.bytes)
        else:
            simulated.free(handles[event.allocation])
        if simulated.allocated_bytes == allocated_bytes:
            return event.allocation + 1
    raise AssertionError("the model never was loaded")


class RecordedAddresses:
    """Address policy that returns the driver's recorded addresses in order."""

    def __init__(self, segments: list[tuple[int, int, int]]) -> None:
        self._left = list(reversed(segments))

    def take(self, size: int) -> int:
        _, recorded, address = self._left.pop()
        assert recorded == size
        return address

    def give_back(self, address: int, size: int) -> None:
        raise AssertionError("no segment was freed in these runs")

    def kernels_loaded(self) -> None:
        pass

    def handle_created(self) -> None:
        pass
