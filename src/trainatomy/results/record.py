"""Records: measured runs as they are kept on disk, and the rows of a history of them.

The difference between two records: what changed in the setup, and where memory and time went.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainatomy.results.measurement import Measurement, Status
from trainatomy.results.memory import Instant
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


About = Literal["workload", "gpu", "driver", "versions"]
Source = Literal["measured", "predicted"]


@dataclass(frozen=True, slots=True)
class SetupChange:
    """A setting, GPU, driver or version that differs: ``("workload", "train.bf16", False, True)``.

    ``None`` means unset or absent.  A setting that a workload leaves out has its default value.
    """

    about: About
    name: str
    before: object
    after: object


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Bytes before and after; ``None`` where not known.

    ``component`` is a component of the memory breakdown, or empty for a figure of the whole process.  ``name`` is the
    line of the component or the name of the figure, and empty for the component itself.  A line that one side does
    not have holds 0 bytes there.
    """

    component: str
    name: str
    before: int | None
    after: int | None

    @property
    def change(self) -> int | None:
        """Bytes after minus before; ``None`` where one of them is not known."""
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """``step_seconds``, ``samples_per_second`` or ``tokens_per_second``, before and after."""

    name: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """After / before; ``None`` where one of them is not known."""
        return self.after / self.before if self.before and self.after is not None else None


@dataclass(frozen=True, slots=True)
class Difference:
    """Two records, ``before`` and ``after``, and everything that differs between them.

    ``components`` are all components of the memory breakdowns at the peak, ``lines`` the parts that differ, and
    ``peaks`` the instants of the two breakdowns.  ``source`` says which breakdowns: measured if both records have one,
    else predicted if both have that, else ``None``.  ``figures`` are PyTorch's counters and device memory as measured;
    ``nvml`` are the driver's figures.
    """

    before: Summary
    after: Summary
    changes: tuple[SetupChange, ...]
    source: Source | None
    components: tuple[MemoryChange, ...]
    lines: tuple[MemoryChange, ...]
    peaks: tuple[Instant, ...]
    figures: tuple[MemoryChange, ...]
    nvml: tuple[MemoryChange, ...]
    paces: tuple[SpeedChange, ...]
