"""``trainatomy measure``: measure a training step on this machine's GPU.

``trainatomy calibrate``: calibrate the timing model on this machine's GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainatomy import api
from trainatomy.cli.options import DEBUG, FILE, JSON, command, command_line
from trainatomy.cli.output import note, quiet_libraries, show, show_json, show_result
from trainatomy.cli.progress import follow_measurement
from trainatomy.cli.report import HTML, OPEN, check_report, write_report
from trainatomy.cli.workloads import one_workload, workload_command
from trainatomy.errors import DeviceError, TrainatomyError
from trainatomy.option import option, output_file
from trainatomy.reporters.json import measurement_to_json
from trainatomy.reporters.text.gpus import calibration_page
from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.requests.measuring import CalibrateRequest, MeasureRequest
from trainatomy.results.measurement import Measurement
from trainatomy.workload.measurable import refuse_era


@dataclass(frozen=True, slots=True)
class MeasureCommand(MeasureRequest):
    """A measurement that is shown."""

    FIRST = ("trace", "html", "open_report")

    file: str | None = option(None, FILE)
    html: Path | None = option(None, HTML)
    open_report: bool = option(False, OPEN)
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)
    flags: Mapping[str, Any] = field(default_factory=dict)


@workload_command
def measure(request: MeasureCommand) -> None:
    """Measure a training step on this machine's GPU, in fresh processes, and show its memory beside the prediction.

    Running out of memory is a result, not an error. The prediction is for this machine's GPU unless `--gpu` names
    another.
    """
    workload = one_workload(request.file, request.flags)
    refuse_era([workload])
    page = check_report(request.html, request.open_report)
    request = replace(request, keep_gpus=request.flags.get("gpu") is not None, command=command_line())
    with quiet_libraries(debug=request.debug), follow_measurement() as progress:
        run = api.measure_and_record(workload, request, progress)
    if run.prediction_error is not None:
        note(f"there is no prediction beside: {run.prediction_error}")
    if run.record is not None:
        note(f"recorded in {run.record}")
    write_report(page, run.measurement, is_opened=request.open_report, prediction=run.prediction)
    show_result(measurement_to_json, measurement_page, run.measurement, run.prediction, json=request.json)
    if run.interrupted:
        raise KeyboardInterrupt
    if error := run.unsaved or _missing_part(run.measurement, request):
        raise error


def _missing_part(measurement: Measurement, request: MeasureRequest) -> TrainatomyError | None:
    """Return an error for requested results that are missing; the notes of the page give the reason."""
    why = f": {measurement.notes[-1]}" if measurement.notes else ""
    if request.components and measurement.memory is None and measurement.status == "completed":
        return DeviceError(f"there is no measured memory breakdown{why}")
    if request.trace is not None and measurement.tape_file is None:
        return TrainatomyError(f"the allocation trace was not written to {request.trace}{why}")
    return None


@dataclass(frozen=True, slots=True)
class CalibrateCommand(CalibrateRequest):
    """A calibration that is written and shown."""

    output: Path = output_file(
        Path("calibration.json"), "File for the calibration (default: calibration.json).", metavar="FILE"
    )
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)


@command
def calibrate(request: CalibrateCommand) -> None:
    """Measure the kernel times and launch costs that the timing model uses, on this machine's GPU.

    It measures matrix products by shape and dtype, memory bandwidth by kind of operator and size, attention,
    optimizers, kernel launches, and the driver's memory functions. With `--gpus 2`, also collectives by size
    on the links between the GPUs.

    It first waits until the machine is idle. If that does not happen, it writes no file and says why, unless `--force`
    is given.

    With the file, predicted times for this GPU are more accurate, on any machine:
    `trainatomy predict … --calibration FILE`, and likewise `ops`, `compare` and `measure`.
    """
    with quiet_libraries(debug=request.debug):
        calibration = api.calibrate(
            request.output, time_limit=request.time_limit, gpus=request.gpus, force=request.force
        )
    if request.json:
        show_json(dict(calibration.content))
    else:
        show(calibration_page(calibration, calibration.left_out))
    note(f"calibration written to {request.output}")
