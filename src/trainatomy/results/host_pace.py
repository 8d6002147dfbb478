"""Pace of a machine's CPU while a training ran on it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

TRIMMED_SHARE = 0.2
"""Share of the readings that are left out at either end before the mean is taken: some are of stalls."""


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
        backward_seconds: The part of each time that autograd's thread took, which launches backward passes; in the
            order of the times before, between and after the steps.  Empty: not known.
        backward_reference_share: That part's share of ``reference_seconds``; ``None``: not known.
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
    backward_seconds: tuple[float, ...] = ()
    backward_reference_share: float | None = None

    @property
    def seconds(self) -> float:
        """Mean time beside the steps, without the extremes: the last one before them, those between, the first after.

        A step takes as long as its parts together, so that a mean says more of it than a median does.  Where nothing
        was read between steps, all times before and after them count.
        """
        return _mean_beside(self.before_seconds, self.during_seconds, self.after_seconds)

    @property
    def relative(self) -> float | None:
        """The pace beside the reference host's; above 1 this host was slower."""
        return None if self.reference_seconds is None else self.beside(self.reference_seconds)

    def beside(self, seconds: float, backward_share: float | None = None) -> float:
        """Return the pace as a multiple of that of a host on which the probe takes so long and no thread waits.

        Args:
            seconds: Time of the probe on that host.
            backward_share: Share of a step's CPU time that autograd's thread spends.  The two threads are on different
                processors, each of which other work may slow, so that each share counts at its own thread's pace.
        """
        running = 1.0 - (self.waited_share or 0.0)
        parts = self._parts()
        if backward_share is None or parts is None or self.backward_reference_share is None:
            return float((self.seconds / seconds) ** self.exponent / running)
        main, backward = parts
        reference = self.backward_reference_share * seconds
        main_pace = (main / (seconds - reference)) ** self.exponent
        backward_pace = (backward / reference) ** self.exponent
        return float(((1 - backward_share) * main_pace + backward_share * backward_pace) / running)

    def _parts(self) -> tuple[float, float] | None:
        """Return the mean times of the probe on the main thread and on autograd's; ``None``: not known."""
        times = (self.before_seconds, self.during_seconds, self.after_seconds)
        if len(self.backward_seconds) != sum(map(len, times)):
            return None
        left = iter(self.backward_seconds)
        backward = [tuple(next(left) for _ in part) for part in times]
        main = [
            tuple(a - b for a, b in zip(part, taken, strict=True)) for part, taken in zip(times, backward, strict=True)
        ]
        return _mean_beside(*main), _mean_beside(*backward)


def _mean_beside(before: tuple[float, ...], during: tuple[float, ...], after: tuple[float, ...]) -> float:
    beside = sorted((*before[-1:], *during, *after[:1]) if during else (*before, *after))
    left_out = max(1, int(TRIMMED_SHARE * len(beside)))
    return fmean(beside[left_out:-left_out] or beside)
