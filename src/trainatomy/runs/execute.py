"""The runs of a campaign, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainatomy.errors import TrainatomyError
from trainatomy.records.key import key_of
from trainatomy.records.make import make_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction
    from trainatomy.results.record import Record
    from trainatomy.runs.machine import Machine
    from trainatomy.runs.plan import Plan
    from trainatomy.workload.schema import Workload

    Measure = Callable[[Workload], Measurement]
    """Runs one workload in a fresh process; raises ``TrainatomyError`` where that fails."""


class Records(Protocol):
    """What a campaign asks of a store (``records.store.Store``)."""

    def find(self, key: str, group: str = "", repeat: int = 0) -> Record | None:
        """The newest record of what was asked for."""

    def write(self, record: Record) -> str:
        """Keep a record; raises ``TrainatomyError`` where that is not possible."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that ended: ``row`` and ``repeat`` in the plan; ``measurement``, or the ``error`` that took its place.

    ``from_record``: it was not run, a record of it was there; ``unsaved``: why no record of it could be kept.
    """

    row: int
    repeat: int
    measurement: Measurement | None = None
    error: TrainatomyError | None = None
    from_record: bool = False
    unsaved: TrainatomyError | None = None


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
    """Every run of ``plan`` as it ends, in the plan's order.

    A run of which ``records`` has one made by such a machine is not run again.  A record is written before the run is
    handed out, so whoever stops in between loses nothing that was measured.  A run that fails is handed out with its
    error, and the next one begins.  ``starting`` is told row and repeat before each run that is really run.
    ``predictions``: one for each workload, for the records.
    """
    for row, repeat in plan.runs():
        workload = plan.workloads[row]
        known = records.find(key_of(workload.to_mapping()), plan.group, repeat)
        if known is not None and machine.made(known.measurement):
            yield Finished(row, repeat, known.measurement, from_record=True)
            continue
        if starting:
            starting(row, repeat)
        try:
            measurement = measure(workload)
        except TrainatomyError as error:
            yield Finished(row, repeat, error=error)
            continue
        record = make_record(measurement, predictions[row], command, plan.group, repeat)
        yield Finished(row, repeat, measurement, unsaved=_keep(record, records))


def _keep(record: Record, records: Records) -> TrainatomyError | None:
    """Write the record; a disk that is full costs the record, not the table of what was measured."""
    try:
        records.write(record)
    except TrainatomyError as error:
        return error
    return None
