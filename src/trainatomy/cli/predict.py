"""``trainatomy predict``: predict the memory and the time of one training step."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainatomy.cli.options import (
    CalibrationFile,
    Debug,
    Json,
    TrustRemoteCode,
    in_output,
    one_workload,
    skip_unused_imports,
    with_workload_options,
)
from trainatomy.cli.output import progress, quiet_libraries, show, show_json
from trainatomy.errors import DoesNotFit
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.prediction import prediction_page, verdict_line
from trainatomy.reporters.text.rendering import render

File = Annotated[
    str | None,
    typer.Argument(metavar="WORKLOAD.yaml", help="A file that describes the training.", show_default=False),
]
Check = Annotated[bool, in_output("--check", "Exit with code 8 if the training does not fit.")]
Timeline = Annotated[bool, in_output("--timeline", "Show memory by component over the step.")]
JsonVersion = Annotated[
    int, in_output("--json-version", "Version of the JSON; 2 is a draft.", min=1, max=2, hidden=True)
]


@with_workload_options
def predict(
    file: File = None,
    check: Check = False,
    timeline: Timeline = False,
    calibration: CalibrationFile = None,
    json: Json = False,
    json_version: JsonVersion = 1,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Predict what a training step holds in GPU memory at its peak, whether it fits on the GPU, and how long it takes.

    Describe the training by a file, by options, or by both; options override the file. Options have the names of
    TrainingArguments, with hyphens or underscores.
    """
    workload = one_workload(file, flags)
    skip_unused_imports([workload], trust_remote_code=trust_remote_code)
    with progress(f"simulating {workload.display_name}"), quiet_libraries(debug=debug):
        from trainatomy import api

        prediction = api.predict(
            workload, timeline=timeline, trust_remote_code=trust_remote_code, calibration=calibration
        )
    if json:
        show_json(to_json(prediction, version=json_version))
    else:
        show(prediction_page(prediction))
    if check and not prediction.fits:
        raise DoesNotFit(render(verdict_line(prediction), width=1000).strip())
