"""Calibrate the timing model on this machine's GPU."""

from __future__ import annotations

import json
from pathlib import Path

from trainatomy.api.verb import verb
from trainatomy.catalog.calibrations import Calibration, parse
from trainatomy.measurement.calibration.calibrate import calibrate as calibrate_gpu
from trainatomy.measurement.calibration.calibrate import write
from trainatomy.measurement.measure import writable
from trainatomy.requests.measuring import CalibrateRequest


@verb(CalibrateRequest)
def calibrate(output: Path | str | None = None, *, request: CalibrateRequest) -> Calibration:
    """Measure what the timing model needs on this machine's GPU, and on the links between several.

    It waits until the machine does nothing else, and measures its CPU again where it did not stay so.

    Args:
        output: File to write the calibration to, as JSON.
        request: How to calibrate.

    Raises:
        DeviceError: There is no GPU, or fewer than ``gpus``.
        TrainatomyError: The machine is busy with other work.
        WorkloadError: ``output`` cannot be written; checked before anything is measured.
    """
    target = None if output is None else writable(Path(output), "--output")
    content = calibrate_gpu(time_limit=request.time_limit, gpus=request.gpus, force=request.force)
    if target is not None:
        write(content, target)
    return parse(json.dumps(content), str(output or "this machine"))
