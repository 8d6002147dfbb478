"""Monitors beside the steps of a measured run: the host's pace, waiting for data, and the GPU's power."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainatomy.measurement.device.power_use import power_use

if TYPE_CHECKING:
    from trainatomy.measurement.device.host_probe import HostProbe
    from trainatomy.measurement.device.power import PowerSampler
    from trainatomy.measurement.step.data_wait import DataWaits
    from trainatomy.measurement.step.stopwatch import Stopwatch
    from trainatomy.results.data_wait import DataWait
    from trainatomy.results.host_pace import HostPace
    from trainatomy.results.power import PowerUse


class Monitors:
    """Watches from the beginning of the first timed step to the end of the last one; each part may be missing.

    The time that the probe takes between steps is left out of them.  ``between`` is False where other ranks would wait
    for it: then it runs before and after the steps only.
    """

    def __init__(
        self,
        host_probe: HostProbe | None = None,
        data_waits: DataWaits | None = None,
        power: PowerSampler | None = None,
        *,
        between: bool = True,
    ) -> None:
        self.host_probe, self.data_waits, self.power = host_probe, data_waits, power
        self._between = between
        self._stopwatch: Stopwatch | None = None
        self._began = 0.0
        self._first_step = 0
        self._ended = False

    def prepare(self) -> None:
        """Attach what needs to be in place before the training's loop begins."""
        if self.data_waits is not None:
            self.data_waits.attach()

    def begin(self, stopwatch: Stopwatch, first_step: int) -> None:
        """Begin to watch, just before the first tick of ``stopwatch``; ``first_step``: number of the first step."""
        self._stopwatch, self._first_step = stopwatch, first_step
        if self.host_probe is not None:
            self.host_probe.before()
        if self.power is not None:
            self.power.start()
        if self.data_waits is not None:
            self.data_waits.begin()
        self._began = time.perf_counter()

    def step_ended(self) -> None:
        """End a step, just after its tick, and take the host's pace if it is due."""
        if self.data_waits is not None:
            self.data_waits.end_step()
        if self.host_probe is not None and self._between and self._stopwatch is not None and self.host_probe.is_due():
            self.host_probe.between()
            self._stopwatch.leave_out()

    def end(self) -> None:
        """Stop watching, however the run ended."""
        if self.data_waits is not None:
            self.data_waits.detach()
        if self._ended or self._stopwatch is None:
            return
        self._ended = True
        if self.power is not None:
            self.power.stop()
        if self.host_probe is not None:
            self.host_probe.after()

    def host_pace(self) -> HostPace | None:
        """Return how fast the CPU was."""
        return None if self.host_probe is None else self.host_probe.result()

    def data_wait(self, skipped: int = 0) -> DataWait | None:
        """Return how long all steps but the first ``skipped`` waited for data."""
        return None if self.data_waits is None else self.data_waits.result(skipped)

    def power_use(self, samples: float, tokens: float | None) -> PowerUse | None:
        """Return the power during the timed steps of this many samples and tokens each."""
        if self.power is None or self._stopwatch is None:
            return None
        return power_use(self.power, self._began, self._stopwatch.ends, self._first_step, samples, tokens)
