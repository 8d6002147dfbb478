"""What differs between two records: what was asked and with what, and where the memory and the time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainatomy.results.memory import Instant
from trainatomy.results.record import Summary

About = Literal["workload", "gpu", "driver", "versions"]
Source = Literal["measured", "predicted"]


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is not the same: ``("workload", "train.bf16", False, True)``, ``("versions", "torch", ...)``.

    ``None``: unset, or not there.  A setting that a workload leaves at its default has the default's value.
    """

    about: About
    name: str
    before: object
    after: object


@dataclass(frozen=True, slots=True)
class Shift:
    """Bytes before and after. ``component``: as in ``Components``, or nothing for a figure of the whole process;
    ``name``: the line of the component, or the figure; nothing for the component itself.

    ``None``: not known; a line that one side does not have holds 0.
    """

    component: str
    name: str
    before: int | None
    after: int | None

    @property
    def change(self) -> int | None:
        """After less before; ``None`` where one is not known."""
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True, slots=True)
class Pace:
    """A figure of time or throughput before and after: ``step_seconds``, ``samples_per_second``,
    ``tokens_per_second``."""

    name: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """After / before; ``None`` where one is not known."""
        return self.after / self.before if self.before and self.after is not None else None


@dataclass(frozen=True, slots=True)
class Difference:
    """Two records, ``before`` and ``after``, and what lies between them.

    ``components`` are those of the bill at the peak, all of them, ``lines`` their parts that differ, ``peaks`` the
    instants that these two bills are of; ``source`` says whose bills: measured where both records have one, else
    predicted where both have that, else ``None``.  ``figures``: PyTorch's counters and device memory as measured;
    ``nvml``: what the driver said.
    """

    before: Summary
    after: Summary
    changes: tuple[Change, ...]
    source: Source | None
    components: tuple[Shift, ...]
    lines: tuple[Shift, ...]
    peaks: tuple[Instant, ...]
    figures: tuple[Shift, ...]
    nvml: tuple[Shift, ...]
    paces: tuple[Pace, ...]
