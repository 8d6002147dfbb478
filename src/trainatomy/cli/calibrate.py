"""``trainatomy calibrate``: calibrate the timing model on this machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from trainatomy.cli.options import Debug, Json, in_run, output_file, time_limit_option
from trainatomy.cli.output import note, quiet_libraries, show, show_json
from trainatomy.reporters.text.catalog import calibration_page

Output = Annotated[
    Path,
    output_file("--output", "File for the calibration (default: calibration.json).", "FILE"),
]
TimeLimit = Annotated[
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
    time_limit: TimeLimit = 120.0,
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
