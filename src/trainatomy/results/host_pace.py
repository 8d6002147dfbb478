"""How fast the CPU of a machine was while a training ran on it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

FEW = 5
"""Readings between steps below which a median is left to chance: a single one may be of a stall."""


@dataclass(frozen=True, slots=True)
class HostPace:
    """Seconds that a fixed piece of CPU work (the probe) took, on the threads that launch the kernels of a training.

    Attributes:
        probe: Name and version of the work; only times of the same probe can be compared.
        before_seconds: Times just before the first timed step.
        during_seconds: Times between timed steps.
        after_seconds: Times just after the last one.
        reference_seconds: Time on the reference host while nothing else ran on it; ``None``: not known.
        others_share: Time that other processes ran meanwhile, as a share of all processors' time; ``None``: not known.
        stolen_share: Time that the hypervisor gave to other machines, likewise.
        throttled_share: Share of the time in which the container's limit of processors stopped its processes.
        waited_share: Waits for a processor, as a share of the time in which the launching threads ran or waited;
            ``None``: not known.
        exponent: Power of the probe's time with which a step's CPU time grows.
    """

    probe: str
    before_seconds: tuple[float, ...] = ()
    during_seconds: tuple[float, ...] = ()
    after_seconds: tuple[float, ...] = ()
    reference_seconds: float | None = None
    others_share: float | None = None
    stolen_share: float | None = None
    throttled_share: float | None = None
    waited_share: float | None = None
    exponent: float = 1.0

    @property
    def seconds(self) -> float:
        """Median time between steps; of all times where those are fewer than `FEW`."""
        around = () if len(self.during_seconds) >= FEW else (*self.before_seconds, *self.after_seconds)
        return median((*self.during_seconds, *around))

    @property
    def relative(self) -> float | None:
        """The pace beside the reference host's; above 1 this host was slower."""
        return None if self.reference_seconds is None else self.beside(self.reference_seconds)

    def beside(self, seconds: float) -> float:
        """Return the pace as a multiple of that of a host on which the probe takes so long and no thread waits."""
        running = 1.0 - (self.waited_share or 0.0)
        return float((self.seconds / seconds) ** self.exponent / running)
