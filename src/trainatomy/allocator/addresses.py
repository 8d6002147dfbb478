"""Which address the driver gives to a segment: it decides between two free blocks of equal size.

This is observation, not documentation: two runs of BERT-large on an H200 (driver 580.159.04, CUDA 13.0, torch 2.11.0,
2026-11-21; 319 and 300 segments) show that the driver

* takes address space from the top down, in reservations that are aligned to 32 MiB and rounded up to multiples of it
  (20 MiB take a reservation of 32, 120 MiB one of 128);
* fills a reservation from its start, and serves a segment from the free tail of the lowest reservation in which it
  fits (two of 16 MiB share one reservation, 2 MiB follow one of 20);
* sets aside a range of 414 MiB with the context.  Once the first kernels of the step are loaded, the libraries take
  64 MiB of it, and segments of the large pool fill the rest upwards before anything else.

On those runs random addresses change the peak of reserved memory by up to 2.7 %; these rules reproduce it exactly.

Not modelled, because it differs between processes: gaps that the host's own mappings leave or open (the order of a few
reservations changes while weights are copied).  What happens after ``cudaFree`` was not seen; assumed: a reservation
that is wholly free returns to the address space, and the highest gap that fits is taken first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Final, Protocol

from trainatomy.allocator.sizes import MIB, SMALL_SEGMENT_BYTES, round_up

RESERVATION_BYTES: Final = 32 * MIB
CONTEXT_RANGE_BYTES: Final = (414 - 64) * MIB
TOP_ADDRESS: Final = 0x7F00_0000_0000
"""An arbitrary start: only the order of addresses matters."""
ADDRESS_LIMIT: Final = 1 << 48


class AddressPolicy(Protocol):
    """Places segments in the address space of the device."""

    def take(self, size: int) -> int:
        """The address of a new segment of ``size`` bytes."""

    def give_back(self, address: int, size: int) -> None:
        """A segment was freed."""

    def kernels_loaded(self) -> None:
        """The model is on the device, and its first step begins."""


class FreeRanges:
    """Unused ranges of addresses, sorted; neighbours are merged only within the bounds that the caller gives."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._largest = 0
        """No range is larger; after some were taken all may be smaller."""

    def take(self, size: int, *, highest: bool = False) -> int | None:
        """The start of the lowest range that fits, or the end of the highest; None if none does."""
        if size > self._largest:
            return None
        order = range(len(self._ranges))
        for i in reversed(order) if highest else order:
            address, room = self._ranges[i]
            if room < size:
                continue
            rest = room - size
            self._ranges[i : i + 1] = [(address if highest else address + size, rest)] if rest else []
            return address + rest if highest else address
        self._largest = max((room for _, room in self._ranges), default=0)
        return None

    def add(self, address: int, size: int, low: int, high: int) -> tuple[int, int]:
        """Add a range, merged with those in [low, high) that touch it; returns the union."""
        ranges = self._ranges
        i = bisect_left(ranges, (address, 0))
        if i < len(ranges) and ranges[i][0] == address + size < high:
            size += ranges.pop(i)[1]
        if i and ranges[i - 1][0] >= low and sum(ranges[i - 1]) == address:
            address, room = ranges.pop(i - 1)
            size += room
            i -= 1
        ranges.insert(i, (address, size))
        self._largest = max(self._largest, size)
        return address, size

    def remove(self, address: int, size: int) -> None:
        """Forget a whole range."""
        self._ranges.remove((address, size))


class TopDownReservations:
    """The placement described above; address space is never short."""

    def __init__(self) -> None:
        self._bottom = TOP_ADDRESS
        self._gaps = FreeRanges()
        """Address space above ``_bottom`` that was given back."""
        self._holes = FreeRanges()
        """What segments leave of their reservations."""
        self._context = FreeRanges()
        self._reservations: list[tuple[int, int]] = []
        """(address, size), sorted."""
        self._is_open = False

    def kernels_loaded(self) -> None:
        """Open the range that the context set aside; a second call changes nothing."""
        if not self._is_open:
            self._is_open = True
            self._context.add(TOP_ADDRESS, CONTEXT_RANGE_BYTES, TOP_ADDRESS, ADDRESS_LIMIT)

    def take(self, size: int) -> int:
        """In the context's range, else in the lowest hole that fits, else at the start of a new reservation."""
        address = self._context.take(size) if size > SMALL_SEGMENT_BYTES else None
        if address is None:
            address = self._holes.take(size)
        return self._reserve(size) if address is None else address

    def _reserve(self, size: int) -> int:
        reserved = round_up(size, RESERVATION_BYTES)
        address = self._gaps.take(reserved, highest=True)
        if address is None:
            self._bottom -= reserved
            address = self._bottom
        insort(self._reservations, (address, reserved))
        if reserved > size:
            self._holes.add(address + size, reserved - size, address, address + reserved)
        return address

    def give_back(self, address: int, size: int) -> None:
        """Merge the range with the holes beside it; a reservation that is empty becomes a gap."""
        if address >= TOP_ADDRESS:
            self._context.add(address, size, TOP_ADDRESS, ADDRESS_LIMIT)
            return
        index = bisect_right(self._reservations, (address, ADDRESS_LIMIT)) - 1
        start, reserved = self._reservations[index]
        hole = self._holes.add(address, size, start, start + reserved)
        if hole == (start, reserved):
            del self._reservations[index]
            self._holes.remove(start, reserved)
            self._gaps.add(start, reserved, 0, ADDRESS_LIMIT)
