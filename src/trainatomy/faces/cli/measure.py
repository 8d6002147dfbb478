"""``trainatomy measure``: the same step on the GPU of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainatomy.faces.cli.asked import one_workload
from trainatomy.faces.cli.options import Debug, Json, TrustRemoteCode, with_workload_options
from trainatomy.faces.cli.output import progress, show, show_json
from trainatomy.faces.cli.predict import File
from trainatomy.faces.cli.quiet import quiet_libraries
from trainatomy.faces.json import measurement_to_json
from trainatomy.faces.text import measurement_page

Tape = Annotated[
    Path | None,
    typer.Option(
        "--tape",
        metavar="FILE",
        help="Keep the stream of allocations in this file.",
        rich_help_panel="Output",
        dir_okay=False,
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="SECONDS", help="Give up after so many seconds.", rich_help_panel="Run"),
]


@with_workload_options
def measure(
    file: File = None,
    tape: Tape = None,
    time_limit: TimeLimit = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **overrides: Any,
) -> None:
    """Run the training's step on the GPU of this machine, in a fresh process, and show the measured memory beside the
    prediction.

    Out of memory is a result, not an error. The prediction is made for the card that the workload names (`--gpu`).
    """
    workload = one_workload(file, overrides)
    with quiet_libraries(debug=debug):
        from trainatomy.api import measure as measured
        from trainatomy.api import predict as predicted

        measurement = measured(workload, tape=tape, time_limit=time_limit)
        with progress("predicting the same step"):
            prediction = predicted(workload, trust_remote_code=trust_remote_code)
    if json:
        show_json(measurement_to_json(measurement, prediction))
    else:
        show(measurement_page(measurement, prediction))
