"""Report the progress and the result of a worker process, as lines of JSON on a pipe.

A pipe rather than a file: a full disk loses nothing, and a worker whose reader is gone ends at its next line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a measurement.

    Attributes:
        run: ``control`` (nothing is recorded) or ``recorded``.
        stage: loading libraries, first tensor, building the model, model loaded, training, analyzing memory.
        step: Completed steps.
        steps: Steps in total.
        device_bytes: Device memory that the process holds (``None``: the driver does not report it).
    """

    run: str
    stage: str
    step: int = 0
    steps: int = 0
    device_bytes: int | None = None

    def __str__(self) -> str:
        steps = f", step {self.step} of {self.steps}" if self.step else ""
        return f"{self.run} run: {self.stage}{steps}"


class Reporter:
    """Writes lines to a file descriptor; does nothing without one."""

    def __init__(self, descriptor: int | None = None, run: str = "control") -> None:
        self._descriptor = descriptor
        self._last = Progress(run, "loading libraries")

    def stage(self, name: str, device_bytes: int | None = None) -> None:
        """Report that a stage begins; ``device_bytes`` keeps its last value if it is ``None``."""
        self._report(device_bytes, stage=name)

    def step(self, step: int, steps: int, device_bytes: int | None) -> None:
        """Report that ``step`` of ``steps`` steps are complete."""
        self._report(device_bytes, stage="training", step=step, steps=steps)

    def result(self, result: Mapping[str, Any]) -> None:
        """Report the result of the run, as ``job.to_plain`` returns it."""
        self.write({"result": result})

    def write(self, content: Mapping[str, Any]) -> None:
        """Write one line.  Raises ``BrokenPipeError`` when nobody reads any more."""
        if self._descriptor is None:
            return
        line = memoryview(json.dumps(content).encode() + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]

    def _report(self, device_bytes: int | None, **changes: Any) -> None:
        held = self._last.device_bytes if device_bytes is None else device_bytes
        self._last = replace(self._last, device_bytes=held, **changes)
        self.write({"progress": asdict(self._last)})


def read_progress(content: Mapping[str, Any]) -> Progress:
    """Read the progress that a ``Reporter`` wrote."""
    return Progress(**content)
