"""Which address the driver gives to a segment: it decides between two free blocks of equal size.

This is observation, not documentation: two runs of BERT-large on an H200 (driver 580.159.04, CUDA 13.0, torch 2.11.0,
2026-11-21; 319 and 300 segments) show that the driver

* takes address space from the top down, in reservations that are aligned to 32 MiB and rounded up to multiples of it
  (20 MiB take a reservation of 32, 120 MiB one of 128);
* fills a reservation from its start, and serves a segment from the free tail of the lowest reservation in which it fits
  (two of 16 MiB share one reservation, 2 MiB follow one of 20).

Not modelled, because it differs between processes: gaps that the host's own mappings leave or open (the order of a few
reservations changes while weights are copied), and one range of about 420 MiB that the context sets aside, which
is filled upwards by the first segments after the first large kernels were loaded.  What happens after ``cudaFree`` was not seen;
assumed: a reservation that is wholly free returns to the address space, and the highest gap that fits is taken first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Final, Protocol

from trainatomy.allocator.sizes import MIB, round_up

RESERVATION_BYTES: Final = 32 * MIB
TOP_ADDRESS: Final = 0x7F00_0000_0000
ADDRESS_LIMIT: Final = 1 << 48


class AddressPolicy(Protocol):
    """Places segments in the address space of the device."""

    def take(self, size: int) -> int:
        """The address of a new segment of ``size`` bytes."""

    def give_back(self, address: int, size: int) -> None:
        """A segment was freed."""


class TopDownReservations:
    """The placement described above; address space is never short."""

    def __init__(self, top: int = TOP_ADDRESS) -> None:
        self._bottom = top
        self._gaps: list[tuple[int, int]] = []
        """Free address space above ``_bottom``: (address, size), sorted."""
        self._holes: list[tuple[int, int]] = []
        """Free ranges inside reservations: (address, size), sorted."""
        self._largest_hole = 0
        """No hole is larger; it may be smaller."""
        self._reservations: list[tuple[int, int]] = []
        """(address, size), sorted."""

    def take(self, size: int) -> int:
        """The lowest hole that fits, else the start of a new reservation."""
        if size <= self._largest_hole:
            for i, (address, room) in enumerate(self._holes):
                if room >= size:
                    del self._holes[i]
                    self._leave_hole(address + size, room - size)
                    return address
            self._largest_hole = max((room for _, room in self._holes), default=0)
        reserved = round_up(size, RESERVATION_BYTES)
        address = self._reserve(reserved)
        insort(self._reservations, (address, reserved))
        self._leave_hole(address + size, reserved - size)
        return address

    def _leave_hole(self, address: int, size: int) -> None:
        if size:
            insort(self._holes, (address, size))
            self._largest_hole = max(self._largest_hole, size)

    def _reserve(self, size: int) -> int:
        for i in reversed(range(len(self._gaps))):
            address, room = self._gaps[i]
            if room >= size:
                self._gaps.pop(i)
                if room > size:
                    insort(self._gaps, (address, room - size))
                return address + room - size
        self._bottom -= size
        return self._bottom

    def give_back(self, address: int, size: int) -> None:
        """Merge the range with the holes beside it; a reservation that is empty becomes a gap."""
        index = bisect_right(self._reservations, (address, ADDRESS_LIMIT)) - 1
        start, reserved = self._reservations[index]
        address, size = _absorb(self._holes, address, size, start, start + reserved)
        if size == reserved:
            del self._reservations[index]
            insort(self._gaps, _absorb(self._gaps, address, size, 0, ADDRESS_LIMIT))
        else:
            self._leave_hole(address, size)


def _absorb(ranges: list[tuple[int, int]], address: int, size: int, low: int, high: int) -> tuple[int, int]:
    """Take from sorted ``ranges`` those within [low, high) that touch the given one, and return the union."""
    i = bisect_left(ranges, (address, 0))
    if i < len(ranges) and ranges[i][0] == address + size < high:
        size += ranges.pop(i)[1]
    if i and low <= ranges[i - 1][0] and sum(ranges[i - 1]) == address:
        before, room = ranges.pop(i - 1)
        return before, room + size
    return address, size
