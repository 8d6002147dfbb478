"""Order between operations of several streams: what each has to wait for, by the indices of operations."""

from __future__ import annotations

from collections.abc import Iterable

from trainatomy.results.operations import Operations
from trainatomy.simulator.streams import SyncKind

_NONE: frozenset[int] = frozenset()


class OperationOrder:
    """Notes which operations have to be over before the next one of a stream, or of the CPU, begins."""

    def __init__(self) -> None:
        self._last: dict[int, frozenset[int]] = {}
        self._awaited: dict[int, frozenset[int]] = {}
        self._recorded: dict[int, frozenset[int]] = {}
        self._cpu_awaits = _NONE

    def clear(self) -> None:
        """Forget all operations: a step begins."""
        for table in (self._last, self._awaited, self._recorded):
            table.clear()
        self._cpu_awaits = _NONE

    def append(self, operations: Operations, stream: int) -> None:
        """Note the operation that is about to be appended, and what it waits for."""
        position = len(operations.operations)
        if self._cpu_awaits:
            operations.cpu_waits[position] = tuple(sorted(self._cpu_awaits))
            self._cpu_awaits = _NONE
        if awaited := self._awaited.pop(stream, None):
            operations.dependencies[position] = tuple(sorted(awaited))
        self.note_last(position, stream)

    def note_last(self, position: int, stream: int) -> None:
        """Note the last operation of a stream."""
        self._last[stream] = frozenset((position,))

    def wait_for(self, positions: Iterable[int], stream: int) -> None:
        """Let the next operation on a stream wait for operations."""
        self._awaited[stream] = self._awaited.get(stream, _NONE) | frozenset(positions)

    def wait_for_stream(self, other: int, stream: int) -> None:
        """Let the next operation on a stream wait for all that another stream was given."""
        self.wait_for(self._given(other), stream)

    def synchronize(self, kind: SyncKind, stream: int, event: int) -> None:
        """Note a synchronisation of streams (see ``Streams``)."""
        if kind == "record":
            self._recorded[event] = self._given(stream)
        elif kind == "wait":
            self.wait_for(self._recorded.get(event, _NONE), stream)
        elif event >= 0:
            self._cpu_awaits |= self._recorded.get(event, _NONE)
        else:
            chosen = self._last if stream < 0 else {stream: self._last.get(stream, _NONE)}
            self._cpu_awaits = self._cpu_awaits.union(*chosen.values())

    def _given(self, stream: int) -> frozenset[int]:
        """Return the last operation of a stream, and those that its next one waits for."""
        return self._last.get(stream, _NONE) | self._awaited.get(stream, _NONE)
