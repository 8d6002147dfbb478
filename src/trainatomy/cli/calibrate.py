"""``trainatomy calibrate``: calibrate the timing model on this machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from trainatomy.cli.options import Debug, Json, in_output, in_run, time_limit_option
from trainatomy.cli.output import note, quiet_libraries, show, show_json
from trainatomy.reporters.text.catalog import calibration_page

Output = Annotated[
    Path,
    in_output("--output", "File for the calibration (default: calibration.json).", metavar="FILE", dir_okay=False),
]
TimeLimit = Annotated[
    float,
    time_limit_option("Stop measuring after so many seconds (default: 120).", min=1),
]
Gpus = Annotated[
    int,
    in_run("--gpus", "Measure collectives between so many GPUs of this machine too (default: 1, none).", min=1),
]
Force = Annotated[
    bool,
    in_run("--force", "Calibrate also where the machine is busy with other work, which makes its CPU seem slow."),
]


def calibrate(
    output: Output = Path("calibration.json"),
    time_limit: TimeLimit = 120.0,
    gpus: Gpus = 1,
    force: Force = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what the timing model needs on this machine's GPU.

    That is: matrix products by shape and dtype, memory bandwidth by kind of operator and size, attention, optimizers,
    kernel launches, and the driver's memory functions. With `--gpus 2`, also collectives by size on the links between
    the GPUs.

    It first waits until the machine does nothing else. If that does not happen, it keeps no file and says why, unless
    `--force` is given.

    Predictions of time for this GPU become more accurate with the file, on any machine:
    `trainatomy predict … --calibration FILE`, and likewise with `ops`, `compare` and `measure`.
    """
    with quiet_libraries(debug=debug):
        from trainatomy.api import calibrate as run_calibration

        calibration = run_calibration(output, time_limit=time_limit, gpus=gpus, force=force)
    if json:
        show_json(dict(calibration.content))
    else:
        show(calibration_page(calibration, calibration.left_out))
    note(f"calibration written to {output}")
