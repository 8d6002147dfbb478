"""The difference between two records: what changed in the setup, and where memory and time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainatomy.results.memory import Instant
from trainatomy.results.record import Summary

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
