"""``trainatomy predict``: what one training holds at its peak, and whether it fits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainatomy.cli.asked import one_workload
from trainatomy.cli.options import (
    CalibrationFile,
    Debug,
    Json,
    TrustRemoteCode,
    in_output,
    with_workload_options,
)
from trainatomy.cli.output import progress, show, show_json
from trainatomy.cli.quiet import quiet_libraries
from trainatomy.errors import DoesNotFit
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text import prediction_page, render, verdict_line

File = Annotated[
    str | None, typer.Argument(metavar="WORKLOAD.yaml", help="A file that describes the training.", show_default=False)
]
Check = Annotated[bool, in_output("--check", "Exit with code 8 where the training does not fit.")]
Timeline = Annotated[bool, in_output("--timeline", "Add memory by component over the step.")]


@with_workload_options
def predict(
    file: File = None,
    check: Check = False,
    timeline: Timeline = False,
    calibration: CalibrationFile = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **overrides: Any,
) -> None:
    """Predict what every part of GPU memory holds at the peak of a training step, whether the training fits, and how
    long a step takes.

    The training is described by a file, by options, or by both: options win. Options carry the names of
    TrainingArguments, with hyphens or underscores; docs/workload.md describes the file.
    """
    workload = one_workload(file, overrides)
    with progress(f"executing {workload.name or 'the training'} on tensors without data"), quiet_libraries(debug=debug):
        from trainatomy.api import predict as predicted

        prediction = predicted(
            workload, timeline=timeline, trust_remote_code=trust_remote_code, calibration=calibration
        )
    if json:
        show_json(to_json(prediction))
    else:
        show(prediction_page(prediction))
    if check and not prediction.fits:
        raise DoesNotFit(render(verdict_line(prediction), width=1000).strip())
