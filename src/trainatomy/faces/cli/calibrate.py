"""``trainatomy calibrate``: what the clock needs, measured on the GPU of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainatomy.faces.cli.options import Debug, Json
from trainatomy.faces.cli.output import note, show, show_json
from trainatomy.faces.cli.quiet import quiet_libraries
from trainatomy.faces.text.calibration import calibration_page

Output = Annotated[
    Path,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Where the calibration goes.",
        rich_help_panel="Output",
        dir_okay=False,
        show_default="calibration.json",
    ),
]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="What is not measured by then is left out (120 unless said).",
        rich_help_panel="Run",
        show_default=False,
        min=1,
    ),
]


def calibrate(
    output: Output = Path("calibration.json"), time_limit: TimeLimit = 120.0, json: Json = False, debug: Debug = False
) -> None:
    """Measure what the clock needs on the GPU of this machine: matrix products by shape and type, traffic by kind of
    operator and size, attention, optimizers, launches, memory from the driver.

    The file makes predictions of time for this kind of card more exact, also on another machine.
    """
    with quiet_libraries(debug=debug):
        from trainatomy.api import calibrate as measured

        calibration = measured(output, time_limit=time_limit)
    if json:
        show_json(dict(calibration.content))
    else:
        show(calibration_page(calibration, calibration.left_out))
    note(f"the calibration is in {output}")
