"""A record: one measured run, with all that is needed to read it again without the machine it was made on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Record:
    """``id``: sorts by time, unique in its folder; ``created``: UTC, ISO 8601, seconds; ``command``: how it was asked
    for; ``group``: name of the comparison that it belongs to, or nothing; ``repeat``: from 0, of the same workload in
    that group; ``key``: a hash of what was asked for (workload, steps), by which an interrupted comparison knows what
    it has.
    """

    id: str
    created: str
    command: str
    group: str
    repeat: int
    key: str
    measurement: Measurement
    prediction: Prediction | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One row of a history: what tells a record from others, and its figures.

    ``file``: where it lies; ``device_bytes``, ``step_seconds``, ``samples_per_second``: as measured, ``None`` where
    that is not known; ``predicted_device_bytes``: ``None`` without a prediction; ``gap``: predicted / measured - 1 of
    device memory, of a run that completed.
    """

    id: str
    file: str
    created: str
    name: str
    gpu: str
    status: Literal["completed", "out of memory"]
    group: str
    repeat: int
    key: str
    device_bytes: int | None
    predicted_device_bytes: int | None
    gap: float | None
    step_seconds: float | None
    samples_per_second: float | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file in a folder of records that could not be read as one, and why."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class History:
    """The records of one folder that were asked for, oldest first, and the files that are none."""

    folder: str
    records: tuple[Summary, ...]
    skipped: tuple[Skipped, ...]
