"""``trainatomy measure``: the same step on the GPU of this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trainatomy.cli.asked import one_workload
from trainatomy.cli.measuring import following
from trainatomy.cli.options import (
    CalibrationFile,
    Debug,
    Json,
    Records,
    TrustRemoteCode,
    in_output,
    in_run,
    with_workload_options,
)
from trainatomy.cli.output import note, progress, show, show_json
from trainatomy.cli.predict import File
from trainatomy.cli.quiet import quiet_libraries
from trainatomy.errors import DeviceError, TrainatomyError, WorkloadError
from trainatomy.reporters.json import measurement_to_json
from trainatomy.reporters.text import measurement_page

if TYPE_CHECKING:
    from trainatomy.records.store import Store
    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction
    from trainatomy.workload.schema import Workload

AllocationTrace = Annotated[
    Path | None,
    in_output("--trace", "Keep the recorded run's stream of allocations in this file.", metavar="FILE", dir_okay=False),
]
TimeLimit = Annotated[float | None, in_run("--time-limit", "Give up after so many seconds.", metavar="SECONDS", min=0)]
Components = Annotated[
    bool,
    in_run("--components/--no-components", "Run it a second time with allocations recorded, for the bill."),
]


@with_workload_options
def measure(
    file: File = None,
    components: Components = True,
    trace: AllocationTrace = None,
    time_limit: TimeLimit = None,
    records: Records = None,
    calibration: CalibrationFile = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **overrides: Any,
) -> None:
    """Run the training's step on the GPU of this machine, each time in a fresh process, and show the measured memory
    beside the prediction.

    Out of memory is a result, not an error. The prediction is made for this machine's card unless `--gpu` names
    another.
    """
    from trainatomy.records.store import Store
    from trainatomy.runs.machine import this_machine

    workload = one_workload(file, overrides)
    if workload.era is not None:
        raise WorkloadError(
            f"{workload.where('era')}: a measurement runs the software that is installed; era {workload.era} can be "
            "predicted, not measured"
        )
    gpu = this_machine().resolve_gpu()
    if gpu is not None and overrides.get("gpu") is None:
        workload = workload.model_copy(update={"gpu": gpu.id})
    store = Store(records)
    store.check()
    with quiet_libraries(debug=debug):
        from trainatomy.api import measure as measured

        prediction = _predicted(workload, trust_remote_code, calibration)
        with following() as tell:
            measurement = measured(workload, components=components, trace=trace, time_limit=time_limit, progress=tell)
    unsaved = _keep(measurement, prediction, store, components)
    if json:
        show_json(measurement_to_json(measurement, prediction))
    else:
        show(measurement_page(measurement, prediction))
    if error := unsaved or _lacking(measurement, components, trace):
        raise error


def _predicted(workload: Workload, trust_remote_code: bool, calibration: Path | None) -> Prediction | None:
    """What cannot be predicted can still be measured, unless its description is wrong."""
    from trainatomy.api import predict

    with progress("predicting the same step"):
        try:
            return predict(workload, trust_remote_code=trust_remote_code, calibration=calibration)
        except WorkloadError:
            raise
        except TrainatomyError as error:
            note(f"there is no prediction beside: {error}")
            return None


def _keep(
    measurement: Measurement, prediction: Prediction | None, store: Store, components: bool
) -> TrainatomyError | None:
    """Write the record; where that fails the measurement is still shown."""
    from trainatomy.records.make import make_record

    command = shlex.join(["trainatomy", *sys.argv[1:]])
    try:
        note(f"recorded in {store.write(make_record(measurement, prediction, command, components=components))}")
    except TrainatomyError as error:
        return error
    return None


def _lacking(measurement: Measurement, components: bool, trace: Path | None) -> TrainatomyError | None:
    """What was asked for and is not there; the notes of the page say why."""
    why = f": {measurement.notes[-1]}" if measurement.notes else ""
    if components and measurement.memory is None and measurement.status == "completed":
        return DeviceError(f"there is no measured bill{why}")
    if trace is not None and measurement.tape_file is None:
        return TrainatomyError(f"the stream of allocations is not in {trace}{why}")
    return None
