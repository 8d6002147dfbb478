"""What a worker says while it runs, as lines of JSON to whoever started it: where it is, and in the end its result.

A pipe and no file: a full disk takes nothing away, and a worker whose reader is gone ends at its next line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a measurement is. ``run``: control (nothing is recorded) or recorded; ``stage``: loading libraries,
    building the model, first tensor, model loaded, training, settling the bill; ``step`` of ``steps`` are over;
    ``device_bytes``: what the card says that the process holds (``None``: it does not say)."""

    run: str
    stage: str
    step: int = 0
    steps: int = 0
    device_bytes: int | None = None

    def __str__(self) -> str:
        steps = f", step {self.step} of {self.steps}" if self.step else ""
        return f"{self.run} run: {self.stage}{steps}"


class Reporter:
    """Writes lines to a file descriptor; without one it is silent."""

    def __init__(self, descriptor: int | None = None, run: str = "control") -> None:
        self._descriptor = descriptor
        self._last = Progress(run, "loading libraries")

    def stage(self, name: str, device_bytes: int | None = None) -> None:
        """A stage begins; ``device_bytes`` are as before where they were not read."""
        self._tell(device_bytes, stage=name)

    def step(self, step: int, steps: int, device_bytes: int | None) -> None:
        """``step`` steps of ``steps`` are over."""
        self._tell(device_bytes, stage="training", step=step, steps=steps)

    def result(self, result: Mapping[str, Any]) -> None:
        """The run is over; ``result`` as ``gpu.process.job.to_plain`` makes it."""
        self.write({"result": result})

    def _tell(self, device_bytes: int | None, **changes: Any) -> None:
        held = self._last.device_bytes if device_bytes is None else device_bytes
        self._last = replace(self._last, device_bytes=held, **changes)
        self.write({"progress": asdict(self._last)})

    def write(self, content: Mapping[str, Any]) -> None:
        """One line. Raises ``BrokenPipeError`` where nobody reads any more."""
        if self._descriptor is None:
            return
        line = memoryview(json.dumps(content).encode() + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]


def progress_of(content: Mapping[str, Any]) -> Progress:
    """What ``Reporter`` wrote of its progress."""
    return Progress(**content)
