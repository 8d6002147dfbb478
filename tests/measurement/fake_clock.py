"""A clock that only the test advances, and CUDA events that take their times from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest


@dataclass
class Machine:
    """A CPU and a GPU: ``now`` is the CPU's time, ``busy_until`` the time at which the GPU has done all its work."""

    now: float = 0.0
    busy_until: float = 0.0

    def compute(self, seconds: float) -> None:
        """Give the GPU work."""
        self.busy_until = max(self.busy_until, self.now) + seconds

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the clock and CUDA's events."""
        machine = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object = None) -> None:
                self.at = max(machine.now, machine.busy_until)

            def query(self) -> bool:
                return True

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1000

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
        monkeypatch.setattr("time.perf_counter", lambda: machine.now)
