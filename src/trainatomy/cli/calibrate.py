"""``trainatomy calibrate``: what the clock needs, measured on the GPU of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from trainatomy.cli.options import Debug, Json, in_output, in_run
from trainatomy.cli.output import note, show, show_json
from trainatomy.cli.quiet import quiet_libraries
from trainatomy.reporters.text import calibration_page

Output = Annotated[
    Path,
    in_output("--output", "Where the calibration goes (calibration.json unless said).", metavar="FILE", dir_okay=False),
]
TimeLimit = Annotated[
    float,
    in_run("--time-limit", "What is not measured by then is left out (120 unless said).", metavar="SECONDS", min=1),
]


def calibrate(
    output: Output = Path("calibration.json"), time_limit: TimeLimit = 120.0, json: Json = False, debug: Debug = False
) -> None:
    """Measure what the clock needs on the GPU of this machine: matrix products by shape and type, traffic by kind of
    operator and size, attention, optimizers, launches, memory from the driver.

    The file makes predictions of time for this kind of card more exact, also on another machine:
    `trainatomy predict … --calibration FILE`; so do `ops`, `compare` and `measure`.
    """
    with quiet_libraries(debug=debug):
        from trainatomy.api import calibrate as measured

        calibration = measured(output, time_limit=time_limit)
    if json:
        show_json(dict(calibration.content))
    else:
        show(calibration_page(calibration, calibration.left_out))
    note(f"the calibration is in {output}")
