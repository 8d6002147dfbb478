"""Times that the steps of a training waited for their data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataWait:
    """Waiting for the DataLoader, by timed step.

    Attributes:
        host_seconds: Time that the training's thread spent fetching batches; without worker processes this is the
            time to make them.
        gpu_seconds: Time of it in which the GPU had nothing left to do.  The rest was hidden behind the GPU's work.
    """

    host_seconds: tuple[float, ...]
    gpu_seconds: tuple[float, ...]
