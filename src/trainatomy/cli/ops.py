"""``trainatomy ops``: break a training step down into its operations."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainatomy.cli.options import CalibrationFile, Debug, Json, TrustRemoteCode, in_output, in_run
from trainatomy.cli.output import progress, quiet_libraries, show, show_json
from trainatomy.cli.report import Html, Open, check_report, write_report
from trainatomy.cli.unused_imports import skip_collections, skip_unused_imports
from trainatomy.cli.workload_options import with_workload_options
from trainatomy.cli.workloads import one_workload, refuse_misspelt
from trainatomy.reporters.json import operations_to_json
from trainatomy.reporters.text.operations import operations_page
from trainatomy.workload.encoder_layer import ENCODER_LAYER, encoder_layer
from trainatomy.workload.overrides import merge

File = Annotated[
    str | None,
    typer.Argument(
        metavar="encoder-layer | WORKLOAD.yaml",
        help="A file that describes the training, or the built-in encoder layer of BERT-large.",
        show_default=False,
    ),
]
Top = Annotated[
    int,
    in_output("--top", "How many of the heaviest operations and modules to show (default: 15).", metavar="N", min=1),
]
Measure = Annotated[bool, in_run("--measure", "Add a profile of this machine's GPU.")]


@with_workload_options
def ops(
    file: File = None,
    top: Top = 15,
    measure: Measure = False,
    html: Html = None,
    open_report: Open = False,
    calibration: CalibrationFile = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Break a training step down into its operations: tensor contractions, normalisations, element-wise operators.

    For each group and phase: FLOP, bytes moved, time, and memory at the peak; then the heaviest operations, and shapes
    that use the GPU badly. `encoder-layer` is the layer of BERT-large whose operators were published in "Data Movement
    Is All You Need" (batch 8, sequence 512, fp16).
    """
    skip_collections()
    if file is not None:
        refuse_misspelt(file, (ENCODER_LAYER,))
    workload = merge(encoder_layer(), flags) if file == ENCODER_LAYER else one_workload(file, flags)
    if not measure:
        skip_unused_imports([workload], trust_remote_code=trust_remote_code)
    page = check_report(html, open_report)
    with progress(f"simulating {workload.display_name}"), quiet_libraries(debug=debug):
        from trainatomy import api

        anatomy = api.ops(
            workload, top=top, measured=measure, trust_remote_code=trust_remote_code, calibration=calibration
        )
    write_report(page, anatomy, is_opened=open_report)
    if json:
        show_json(operations_to_json(anatomy))
    else:
        show(operations_page(anatomy))
