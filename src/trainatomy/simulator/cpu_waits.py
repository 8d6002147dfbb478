"""Work known to be done on the GPU when the CPU has waited for a stream: also what that stream had waited for."""

from __future__ import annotations

from trainatomy.results.trace import CPUWait
from trainatomy.simulator.streams import SyncKind


class CPUWaits:
    """Follows the waits between streams, and notes those of the CPU.

    Attributes:
        noted: The CPU's waits, in order.
    """

    def __init__(self) -> None:
        self.noted: list[CPUWait] = []
        self._waited_for: dict[int, dict[int, int]] = {}
        self._at_record: dict[int, dict[int, int]] = {}

    def synchronize(self, kind: SyncKind, stream: int, event: int, now: int) -> None:
        """Note a synchronisation (see ``Streams``); ``now``: number of events of the allocation trace so far."""
        if kind == "record":
            self._at_record[event] = self._done(stream, now)
        elif kind == "wait":
            _merge(self._waited_for.setdefault(stream, {}), self._at_record.get(event, {}))
        else:
            done = None if stream < 0 else self._at_record.get(event) or self._done(stream, now)
            self.noted.append(CPUWait(now, done))

    def read(self, stream: int, now: int) -> None:
        """Note that the CPU reads a result on a stream."""
        self.noted.append(CPUWait(now, self._done(stream, now)))

    def _done(self, stream: int, now: int) -> dict[int, int]:
        """Return the number of events up to which each stream is done, once a stream is."""
        return {**self._waited_for.get(stream, {}), stream: now}


def _merge(known: dict[int, int], other: dict[int, int]) -> None:
    for stream, event in other.items():
        known[stream] = max(event, known.get(stream, 0))
