"""``trainatomy measure``: measure a training step on this machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trainatomy.catalog.calibrations import resolve_calibration
from trainatomy.cli.options import (
    CalibrationFile,
    Debug,
    File,
    Json,
    Records,
    TrustRemoteCode,
    command_line,
    in_run,
    output_file,
    time_limit_option,
)
from trainatomy.cli.output import note, quiet_libraries, show, show_json
from trainatomy.cli.progress import follow_measurement
from trainatomy.cli.report import Html, Open, check_report, write_report
from trainatomy.cli.workload_options import with_workload_options
from trainatomy.cli.workloads import one_workload
from trainatomy.errors import DeviceError, TrainatomyError
from trainatomy.reporters.json import measurement_to_json
from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.runs.options import PredictOptions, RunOptions, refuse_era

if TYPE_CHECKING:
    from trainatomy.results.measurement import Measurement

AllocationTrace = Annotated[
    Path | None,
    output_file("--trace", "File for the allocation trace of the recorded run.", "FILE"),
]
TimeLimit = Annotated[float | None, time_limit_option("Stop after this many seconds.")]
Components = Annotated[
    bool,
    in_run("--components/--no-components", "Make a second, recorded run, which attributes memory to components."),
]


@with_workload_options
def measure(
    file: File = None,
    components: Components = True,
    trace: AllocationTrace = None,
    time_limit: TimeLimit = None,
    html: Html = None,
    open_report: Open = False,
    records: Records = None,
    calibration: CalibrationFile = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Measure a training step on this machine's GPU, in fresh processes, and show its memory beside the prediction.

    Running out of memory is a result, not an error. The prediction is for this machine's GPU unless `--gpu` names
    another.
    """
    workload = one_workload(file, flags)
    refuse_era([workload])
    page = check_report(html, open_report)
    with quiet_libraries(debug=debug), follow_measurement() as progress:
        from trainatomy import api

        run = api.measure_and_record(
            workload,
            PredictOptions(trust_remote_code=trust_remote_code, calibration=resolve_calibration(calibration)),
            RunOptions(
                store=records,
                time_limit=time_limit,
                keep_gpus=flags.get("gpu") is not None,
                command=command_line(),
            ),
            components=components,
            trace=trace,
            progress=progress,
        )
    if run.prediction_error is not None:
        note(f"there is no prediction beside: {run.prediction_error}")
    if run.record is not None:
        note(f"recorded in {run.record}")
    write_report(page, run.measurement, is_opened=open_report, prediction=run.prediction)
    if json:
        show_json(measurement_to_json(run.measurement, run.prediction))
    else:
        show(measurement_page(run.measurement, run.prediction))
    if error := run.unsaved or _missing_part(run.measurement, components, trace):
        raise error


def _missing_part(measurement: Measurement, components: bool, trace: Path | None) -> TrainatomyError | None:
    """Return an error for requested results that are missing; the notes of the page give the reason."""
    why = f": {measurement.notes[-1]}" if measurement.notes else ""
    if components and measurement.memory is None and measurement.status == "completed":
        return DeviceError(f"there is no measured memory breakdown{why}")
    if trace is not None and measurement.tape_file is None:
        return TrainatomyError(f"the allocation trace was not written to {trace}{why}")
    return None
