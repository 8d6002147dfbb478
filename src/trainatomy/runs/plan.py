"""The runs of a comparison: which ones, in which order, and under which name they are recorded."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from trainatomy.errors import TrainatomyError
from trainatomy.measurement.measure import MeasurementInterrupted
from trainatomy.measurement.process.job import Progress
from trainatomy.records.create import key_of, make_record
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.results.record import Record
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.runs.single import Machine

    Measure = Callable[[Workload], Measurement]
    """Runs one workload in a fresh process; raises ``TrainatomyError`` where that fails."""

HASH_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of a comparison: ``workloads``, each run ``repeats`` times and recorded under the name ``group``."""

    workloads: tuple[Workload, ...]
    group: str
    repeats: int = 1

    def __len__(self) -> int:
        return len(self.workloads) * self.repeats

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield row and repeat of each run: every row once, then every row again.

        An interrupted comparison thus has whole tables, and a GPU that warms up does not favour the first rows.
        """
        for repeat in range(self.repeats):
            for row in range(len(self.workloads)):
                yield row, repeat


def group_name(title: str, workloads: Sequence[Workload], *, fresh: datetime | None = None) -> str:
    """Return a name such as ``notebook-3fa9c1b7``: the title and a hash of the workloads, their names and their order.

    The number of repeats does not change the name, so that further repeats continue the recorded ones. With ``fresh``,
    a time, the name is new: ``notebook-3fa9c1b7-20261121T122005``.
    """
    content = json.dumps([workload.to_mapping() for workload in workloads], sort_keys=True, default=str)
    digest = hashlib.sha256(content.encode()).hexdigest()[:HASH_DIGITS]
    name = f"{re.sub(r'[^A-Za-z0-9._]+', '-', title).strip('-.') or 'comparison'}-{digest}"
    return f"{name}-{fresh.astimezone(UTC):%Y%m%dT%H%M%S}" if fresh else name


class Records(Protocol):
    """The part of ``records.store.Store`` that a comparison needs."""

    def find(self, key: str, group: str = "", repeat: int = 0) -> Record | None:
        """Return the newest record of a run, or None."""

    def write(self, record: Record) -> str:
        """Write a record and return where it is; raise ``TrainatomyError`` if that fails."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that ended.

    Attributes:
        row: Index of the workload in the plan.
        repeat: Index of the repeat.
        measurement: The result, or None where the run failed.
        error: Why the run failed.
        from_record: Whether the result was on record already, so that nothing was run.
        unsaved: Why no record could be written.
    """

    row: int
    repeat: int
    measurement: Measurement | None = None
    error: TrainatomyError | None = None
    from_record: bool = False
    unsaved: TrainatomyError | None = None


class RunObserver:
    """Observer of the runs of a comparison; override the methods of interest."""

    def planned(self, plan: Plan) -> None:
        """Handle the end of all predictions, once, before the first run."""

    def starting(self, row: int, repeat: int) -> None:
        """Handle the start of a run; not called for runs that are on record."""

    def progress(self, progress: Progress) -> None:
        """Handle the progress of a run."""

    def finished(self, run: Finished) -> None:
        """Handle the end of a run."""

    def note(self, message: str) -> None:
        """Handle a message that the user should see; warn unless overridden."""
        warnings.warn(message, stacklevel=4)


class _Callback(RunObserver):
    """Observer that calls a function for each run that ended."""

    def __init__(self, call: Callable[[Finished], None]) -> None:
        self._call = call

    def finished(self, run: Finished) -> None:
        """Call the function."""
        self._call(run)


def observer_of(progress: Callable[[Finished], None] | RunObserver | None) -> RunObserver:
    """Return the observer for the ``progress`` of ``trainatomy.compare``: an observer, a function or None."""
    if isinstance(progress, RunObserver):
        return progress
    return RunObserver() if progress is None else _Callback(progress)


def run(
    plan: Plan,
    predictions: Sequence[Prediction | None],
    records: Records,
    machine: Machine,
    measure: Measure,
    *,
    command: str = "",
    starting: Callable[[int, int], None] | None = None,
) -> Iterator[Finished]:
    """Yield every run of ``plan`` as it ends, in the plan's order.

    A run that is on record from an equal machine is not repeated. Records are written before a run is yielded, so that
    nothing measured is lost if the caller stops, or if Ctrl-C ends a run that has been timed. A run that fails is
    yielded with its error, and the next one starts.

    Args:
        plan: The runs.
        predictions: A prediction or None for each workload, for the records.
        records: The store.
        machine: This machine.
        measure: Runs one workload.
        command: The command line, for the records.
        starting: Called with row and repeat before each run that is really made.
    """
    for row, repeat in plan.runs():
        known = on_record(plan, row, repeat, records, machine)
        if known is not None:
            yield Finished(row, repeat, known, from_record=True)
            continue
        if starting:
            starting(row, repeat)
        interrupt = None
        try:
            measurement = measure(plan.workloads[row])
        except TrainatomyError as error:
            yield Finished(row, repeat, error=error)
            continue
        except MeasurementInterrupted as interrupted:
            interrupt, measurement = interrupted, interrupted.measurement
        record = make_record(measurement, predictions[row], command, plan.group, repeat)
        yield Finished(row, repeat, measurement, unsaved=_keep(record, records))
        if interrupt is not None:
            raise interrupt


def on_record(plan: Plan, row: int, repeat: int, records: Records, machine: Machine) -> Measurement | None:
    """Return the measurement of a run that is on record from an equal machine."""
    known = records.find(key_of(plan.workloads[row].to_mapping()), plan.group, repeat)
    return known.measurement if known is not None and machine.made(known.measurement) else None


def _keep(record: Record, records: Records) -> TrainatomyError | None:
    """Write the record and return the error, if any: a full disk must not cost the measurements."""
    try:
        records.write(record)
    except TrainatomyError as error:
        return error
    return None
