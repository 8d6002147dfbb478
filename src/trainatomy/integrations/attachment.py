"""Watch somebody's own training on a GPU, from inside its process, and say what it held.

``Attachment`` binds the parts together: signals (where the loop is), notes (what is written down), recording (PyTorch's
history), clock.  It takes no memory on the card and never waits for it, except once at the end.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainatomy.integrations.allocation_history import Recording
from trainatomy.integrations.breakdown import bill_of
from trainatomy.integrations.notes import Counted, Notes, counted
from trainatomy.integrations.reading import Utilization, utilization
from trainatomy.integrations.remarks import remarks
from trainatomy.integrations.signals import Signals
from trainatomy.measurement.process.job import WARM_UP_STEPS
from trainatomy.measurement.step.here import driver_version, is_out_of_memory, versions
from trainatomy.measurement.step.stopwatch import Stopwatch
from trainatomy.measurement.traces.settled import Counted as Totals
from trainatomy.measurement.traces.settled import Failure
from trainatomy.results.measurement import Measurement, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from trainatomy.measurement.traces.settled import RealBill

UNFINISHED = "the training did not come to its end"
RESERVED = "peak reserved"
"""Beginning of a note that means nothing where a part of a watch is left: the most was reserved in another part."""


class Attachment:
    """One watched training: ``start``, run the loop, ``stop``; ``result`` at any time after ``start``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        name: str = "",
        workload: Mapping[str, Any] | None = None,
        *,
        keeps_batch: bool = False,
    ) -> None:
        """``workload``: the training as the mapping of a workload file, as far as it is known; ``keeps_batch``: keep
        the first batch on the host."""
        self.name = name or type(model).__name__
        self._workload = workload or {"model": {"class": type(model).__name__}}
        self.model, self._optimizer, self._keeps_batch = model, optimizer, keeps_batch
        self._status: Literal["completed", "out of memory"] = "completed"
        self._message = ""
        self._failure: Failure | None = None
        self._final: Measurement | None = None

    def start(self) -> None:
        """Begin here.  What was allocated before is known by address or stands on a line of its own."""
        self._device = _device_of(self.model)
        self._before = utilization(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._clock = Stopwatch(self._device)
        self._recording = Recording(self._device)
        self._retries = _retries(self._device)
        self.notes = Notes(self.model, self._optimizer, self._clock, self._counted, self._roll)
        self._signals = Signals(self.model, self._optimizer, self.notes)
        self.notes.keeps_batch = self._keeps_batch
        self.notes.optimizer = self._signals.optimizer
        self._recording.start(self._counted(), self.notes.known())
        self.notes.follow()
        self._signals.attach()
        self._clock.tick()

    def stop(self, error: BaseException | None = None, *, unfinished: bool = False) -> Measurement:
        """End here, with the ``error`` that ended the loop if one did; the result, which stays the same from now on.

        ``unfinished``: the loop did not come to its end, and what ended it is not known.
        """
        if self._final is not None:
            return self._final
        try:
            self._signals.detach()
            self.notes.unfollow()
            if error is not None:
                self._fail(_first_line(error), out_of_memory=is_out_of_memory(error))
            elif unfinished:
                self._fail(UNFINISHED, out_of_memory=self._was_refused())
            with contextlib.suppress(RuntimeError):  # after a CUDA error nothing can be waited for
                torch.cuda.synchronize(self._device)
            self._clock.finish()
            self._final = self.result()
        finally:
            self._recording.stop()
        return self._final

    def result(self) -> Measurement:
        """What was measured so far."""
        if self._final is not None:
            return self._final
        now = self._counted()
        window = self._recording.window(now, self.notes.notes, self.notes.followed, latest=self._failure is not None)
        after = utilization(self._device)
        totals = self._totals(after)
        bill = bill_of(window, totals, self._device, self._failure) if window.complete else None
        found = remarks(self._before, after, is_complete=window.complete, is_borrowed=self._recording.is_borrowed)
        ended = (f"the loop was ended by {self._message}",) if self._message and self._status == "completed" else ()
        noted = bill.notes if bill is not None else ()
        noted = tuple(note for note in noted if window.is_whole or not note.startswith(RESERVED))
        return self._measurement(after, totals, bill, (*found, *ended, *noted))

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the start."""
        return self._counted().peak_bytes

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _was_refused(self) -> bool:
        """Whether the allocator refused a request after the last thing that the loop said."""
        last = self.notes.notes[-1].at if self.notes.notes else 0
        return self._recording.refused_since(self._counted(), last)

    def _fail(self, message: str, *, out_of_memory: bool) -> None:
        self._message = message
        if out_of_memory:
            self._status = "out of memory"
            reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
            self._failure = Failure(self.notes.instant(), 0, allocated, reserved)
        self.notes.failed()

    def _counted(self) -> Counted:
        return counted(self._device)

    def _roll(self, now: Counted) -> None:
        if self._recording.is_full(now):
            self._recording.keep(now, self.notes.notes, self.notes.followed)
            self._recording.start(now, self.notes.known())
            self.notes.follow()

    def _totals(self, after: Utilization) -> Totals:
        reserved, context = torch.cuda.max_memory_reserved(self._device), after.context_bytes
        return Totals(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            peak_reserved_bytes=reserved,
            device_bytes=None if context is None else reserved + context,
            model_bytes=self._before.allocated_bytes,
            num_alloc_retries=_retries(self._device) - self._retries,
        )

    def _measurement(
        self, after: Utilization, totals: Totals, bill: RealBill | None, notes: tuple[str, ...]
    ) -> Measurement:
        seconds = tuple(self._clock.seconds[WARM_UP_STEPS:])
        return Measurement(
            name=self.name,
            workload=dict(self._workload),
            status=self._status,
            gpu=after.gpu,
            driver=driver_version(),
            versions=versions(),
            date=datetime.now(UTC).date().isoformat(),
            peak_allocated_bytes=totals.peak_allocated_bytes,
            peak_reserved_bytes=totals.peak_reserved_bytes,
            device_bytes=totals.device_bytes,
            process_bytes=after.process_bytes,
            nvml_used_bytes=after.used_bytes,
            idle_bytes=None,
            context_bytes=after.context_bytes,
            model_bytes=totals.model_bytes,
            num_alloc_retries=totals.num_alloc_retries,
            step_seconds=median(seconds) if seconds else None,
            steps=self.notes.steps,
            message=self._message,
            tape_file=None,
            memory=bill.memory if bill else None,
            modules=bill.modules if bill else (),
            stages=(_stage("before the watch", self._before), _peak_stage(totals, after)),
            timed_step_seconds=seconds,
            recorded_step_seconds=median(seconds) if seconds else None,
            samples_per_second=_rate(self.notes.samples, self._clock.seconds),
            tokens_per_second=_rate(self.notes.tokens, self._clock.seconds),
            out_of_memory=bill.out_of_memory if bill else None,
            notes=notes,
        )


def _peak_stage(totals: Totals, after: Utilization) -> Stage:
    return Stage(
        "training", totals.device_bytes, after.used_bytes, totals.peak_allocated_bytes, totals.peak_reserved_bytes
    )


def _stage(name: str, found: Utilization) -> Stage:
    return Stage(name, found.process_bytes, found.used_bytes, found.allocated_bytes, found.reserved_bytes)


def _device_of(model: nn.Module) -> int:
    """The GPU that the model lies on, or the current one while it still lies on the host."""
    for parameter in model.parameters():
        if parameter.is_cuda and parameter.device.index is not None:
            return parameter.device.index
    return torch.cuda.current_device()


def _retries(device: int) -> int:
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _rate(amounts: list[int], seconds: list[float]) -> float | None:
    """The median of amount per second over the steps after the warm-up; ``None`` where nothing was counted."""
    rates = [amount / time for amount, time in zip(amounts, seconds, strict=False) if time > 0][WARM_UP_STEPS:]
    return median(rates) if rates and any(rates) else None
