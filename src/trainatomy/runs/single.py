"""A training, predicted and measured on this machine's GPU, and recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.records.create import make_record
from trainatomy.records.store import Store
from trainatomy.runs import machine as machines
from trainatomy.runs.options import refuse_era
from trainatomy.workload.measurable import measurable

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction
    from trainatomy.runs.options import RunOptions
    from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured training.

    Attributes:
        measurement: The measurement.
        prediction: The prediction of the same step, or None where it failed.
        prediction_error: Why there is no prediction.
        record: Where the record is, or None where it could not be written.
        unsaved: Why the record could not be written.
    """

    measurement: Measurement
    prediction: Prediction | None
    prediction_error: TrainatomyError | None = None
    record: str | None = None
    unsaved: TrainatomyError | None = None


def measure_and_record(
    workload: Workload,
    predict: Callable[[Workload], Prediction],
    measure: Callable[[Workload], Measurement],
    options: RunOptions,
    *,
    components: bool = True,
) -> MeasuredRun:
    """Predict a training, measure it, and write a record of both.

    Args:
        workload: The training; predicted for this machine's GPU unless ``options.keep_gpus``.
        predict: Predicts a workload. Only a ``WorkloadError`` stops the measurement.
        measure: Measures a workload.
        options: How to run and where to keep the record.
        components: Whether ``measure`` attributes memory to components, for the record.

    Raises:
        DeviceError: There is no GPU, or the process that used it failed.
        WorkloadError: The workload cannot be measured.
        TrainatomyError: Records cannot be written.
    """
    refuse_era([workload])
    machines.check_gpus([workload])
    here = machines.this_machine().resolve_gpu()
    if here is not None and not options.keep_gpus:
        workload = workload.replace("gpu", here.id)
    workload = measurable(workload)
    store = options.store if isinstance(options.store, Store) else Store(options.store)
    store.check()
    prediction, error = None, None
    try:
        prediction = predict(workload)
    except WorkloadError:
        raise
    except TrainatomyError as failed:
        error = failed
    measurement = measure(workload)
    record = make_record(measurement, prediction, options.command, components=components)
    try:
        return MeasuredRun(measurement, prediction, error, record=store.write(record))
    except TrainatomyError as unsaved:
        return MeasuredRun(measurement, prediction, error, unsaved=unsaved)
