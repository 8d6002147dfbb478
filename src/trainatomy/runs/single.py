"""A training, predicted and measured on this machine's GPU, and recorded.

Description of this machine, as far as measurements depend on it: its GPUs, its driver and its libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainatomy.catalog.gpus import GPU, find_gpu
from trainatomy.errors import MissingLibrary, TrainatomyError, WorkloadError
from trainatomy.libraries import version_of
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device.nvml import require_gpus
from trainatomy.measurement.measure import MeasurementInterrupted, require_gpu, task_of
from trainatomy.measurement.process.job import Job
from trainatomy.measurement.process.pool import Processes
from trainatomy.records.create import make_record
from trainatomy.records.store import store_of
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.workload.measurable import measurable, refuse_era
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.requests.measuring import MeasureRequest


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs and the driver of this machine.

    Attributes:
        gpus: Product names that the driver reports; empty where it cannot be asked without a GPU process.
        driver: Version of the driver.
    """

    gpus: tuple[str, ...]
    driver: str

    def resolve_gpu(self) -> GPU | None:
        """Return the catalogue's entry for the GPUs here, or None if it has none or they differ."""
        if len(set(self.gpus)) != 1:
            return None
        try:
            return find_gpu(self.gpus[0])
        except WorkloadError:
            return None

    def made(self, measurement: Measurement) -> bool:
        """Return whether ``measurement`` was made on such a GPU, with this driver and the libraries installed here."""
        if self.gpus and measurement.gpu not in self.gpus:
            return False
        if self.driver and measurement.driver != self.driver:
            return False
        return all(version_of(name) == version for name, version in measurement.versions.items() if name != "cuda")


def check_gpus(workloads: Iterable[Workload]) -> None:
    """Check that this machine has the GPUs of every training.

    Raises:
        DeviceError: It has fewer.
        WorkloadError: A training runs on several machines.
    """
    for workload in workloads:
        if workload.parallel.world_size > 1:
            require_gpus(workload.parallel)


def this_machine() -> Machine:
    """Return this machine as its driver describes it; raise ``DeviceError`` if there is no GPU."""
    require_gpu()
    try:
        with nvml.session() as driver:
            return Machine(tuple(each.name for each in driver.gpus), driver.version)
    except (MissingLibrary, nvml.NoAnswer):
        return Machine((), "")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured training.

    Attributes:
        measurement: The measurement.
        prediction: The prediction of the same step, or None where it failed.
        prediction_error: Why there is no prediction.
        record: Where the record is, or None where it could not be written.
        unsaved: Why the record could not be written.
        interrupted: Whether Ctrl-C ended the recorded run, so that the measurement is that of the control run alone.
    """

    measurement: Measurement
    prediction: Prediction | None
    prediction_error: TrainatomyError | None = None
    record: str | None = None
    unsaved: TrainatomyError | None = None
    interrupted: bool = False


def measure_and_record(
    workload: Workload,
    predict: Callable[[Workload], Prediction],
    measure: Callable[[Workload, Callable[[], None]], Measurement],
    request: MeasureRequest,
    processes: Processes,
) -> MeasuredRun:
    """Predict a training, measure it, and write a record of both.

    Args:
        workload: The training; predicted for this machine's GPU unless ``request.keep_gpus``.
        predict: Predicts a workload; can be pickled. Only a ``WorkloadError`` stops the measurement.
        measure: Measures a workload, and calls a function before its timed steps.
        request: How ``measure`` measures, and where to keep the record.
        processes: Where to predict, while the measurement prepares its timed steps.

    Raises:
        DeviceError: There is no GPU, or the process that used it failed.
        WorkloadError: The workload cannot be measured.
        TrainatomyError: Records cannot be written.
    """
    refuse_era([workload])
    check_gpus([workload])
    here = this_machine().resolve_gpu()
    if here is not None and not request.keep_gpus:
        workload = workload.replace("gpu", here.id)
    workload = measurable(workload)
    store = store_of(request.store)
    store.check()
    prediction, error = None, None
    predicting = processes.call(task_of(Job(workload.to_mapping())), predict, workload)

    def await_prediction() -> None:
        nonlocal prediction, error
        try:
            prediction = predicting()
        except WorkloadError:
            raise
        except TrainatomyError as failed:
            error = failed

    interrupted = False
    try:
        measurement = measure(workload, await_prediction)
    except MeasurementInterrupted as interrupt:
        measurement, interrupted = interrupt.measurement, True
    run = MeasuredRun(measurement, prediction, error, interrupted=interrupted)
    try:
        record = store.write(make_record(measurement, prediction, request.command, components=request.components))
    except TrainatomyError as unsaved:
        return replace(run, unsaved=unsaved)
    return replace(run, record=record)
