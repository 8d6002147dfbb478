"""The tape: every allocation and release of device memory, in the order in which they happened.

A run without a GPU writes it from executed operations; a run on a GPU from PyTorch's own memory history.
The allocator twin and the ledger read both alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Action = Literal["alloc", "free", "empty_cache"]
DriverAction = Literal["malloc", "map", "free", "unmap", "refused"]


class Event(NamedTuple):
    """One thing that happened to device memory.

    ``allocation`` is an index into ``Tape.origins`` (unique for each allocation, -1 for ``empty_cache``);
    ``bytes`` is the size that was requested, before the allocator rounds it (0 for ``free`` and ``empty_cache``).
    """

    action: Action
    allocation: int
    bytes: int
    stream: int = 0


class DriverCall(NamedTuple):
    """The allocator turned to the driver while it served the event of that index: it took a segment (``malloc``) or
    pages of an expandable one (``map``), gave them back (``free``, ``unmap``), or was refused (``refused``)."""

    event: int
    action: DriverAction
    bytes: int


class Origin(NamedTuple):
    """Where an allocation came from. ``phase``: load, forward, recompute, backward, optimizer, zero_grad or other."""

    operation: str
    module: str
    phase: str
    step: int


class Mark(NamedTuple):
    """Something began or ended before the event of that index: ``loaded``, ``step``, ``forward``, ``forward end``,
    ..."""

    event: int
    name: str
    step: int


@dataclass(slots=True)
class AllocationTrace:
    """A stream of events and, for each allocation, its origin and what it turned out to hold (``labels``, see the
    ledger).

    ``choices``: workspaces that their library does without where memory lacks, and the number of the decision that each
    belongs to: a library decides once for all calls that are alike.
    """

    events: list[Event] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    choices: dict[int, int] = field(default_factory=dict)
