"""``trainatomy measure``: measure a training step on this machine's GPU.

``trainatomy calibrate``: calibrate the timing model on this machine's GPU.
"""

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
from trainatomy.cli.workloads import one_workload, with_workload_options
from trainatomy.errors import DeviceError, TrainatomyError
from trainatomy.reporters.json import measurement_to_json
from trainatomy.reporters.text.gpus import calibration_page
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
    if run.interrupted:
        raise KeyboardInterrupt
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


Output = Annotated[
    Path,
    output_file("--output", "File for the calibration (default: calibration.json).", "FILE"),
]
CalibrationTimeLimit = Annotated[
    float,
    time_limit_option("Stop measuring after this many seconds (default: 120).", min=1),
]
Gpus = Annotated[
    int,
    in_run("--gpus", "Also measure collectives between this many GPUs of this machine (default: 1, none).", min=1),
]
Force = Annotated[
    bool,
    in_run("--force", "Calibrate even if the machine is busy with other work, which makes its CPU seem slow."),
]


def calibrate(
    output: Output = Path("calibration.json"),
    time_limit: CalibrationTimeLimit = 120.0,
    gpus: Gpus = 1,
    force: Force = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the kernel times and launch costs that the timing model uses, on this machine's GPU.

    It measures matrix products by shape and dtype, memory bandwidth by kind of operator and size, attention,
    optimizers, kernel launches, and the driver's memory functions. With `--gpus 2`, also collectives by size
    on the links between the GPUs.

    It first waits until the machine is idle. If that does not happen, it writes no file and says why, unless `--force`
    is given.

    With the file, predicted times for this GPU are more accurate, on any machine:
    `trainatomy predict … --calibration FILE`, and likewise `ops`, `compare` and `measure`.
    """
    with quiet_libraries(debug=debug):
        from trainatomy.api import calibrate as run_calibration

        calibration = run_calibration(output, time_limit=time_limit, gpus=gpus, force=force)
    if json:
        show_json(dict(calibration.content))
    else:
        show(calibration_page(calibration, calibration.left_out))
    note(f"calibration written to {output}")
