"""Records: measured runs as they are kept on disk, and the rows of a history of them."""

from __future__ import annotations

from dataclasses import dataclass

from trainatomy.results.measurement import Measurement, Status
from trainatomy.results.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Record:
    """A measured run, with everything needed to read it without the machine it ran on.

    ``id`` sorts by time and is unique in its folder; ``created`` is UTC in ISO 8601, to the second; ``command`` is the
    command line; ``group`` is the name of the comparison run it belongs to, or empty; ``repeat`` counts from 0 among
    runs of the same workload in that group; ``key`` is a hash of workload and steps, by which an interrupted
    comparison finds the runs that are already done.
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
    """A row of a history: what identifies a record, and its main figures.

    ``device_bytes``, ``step_seconds`` and ``samples_per_second`` are as measured (``None``: not known);
    ``predicted_device_bytes`` is ``None`` without a prediction; ``gap`` is predicted / measured - 1 of device memory,
    for a run that completed.
    """

    id: str
    file: str
    created: str
    name: str
    gpu: str
    status: Status
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
    """A file in a folder of records that is not a readable record, and the reason."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class History:
    """Records of one folder, oldest first, and the files that could not be read."""

    folder: str
    records: tuple[Summary, ...]
    skipped: tuple[Skipped, ...]
