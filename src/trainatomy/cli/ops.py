"""``trainatomy ops``: what the operations of a step do, group by group."""

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
    in_run,
    with_workload_options,
)
from trainatomy.cli.output import progress, show, show_json
from trainatomy.cli.quiet import quiet_libraries
from trainatomy.reporters.operations_json import anatomy_to_json
from trainatomy.reporters.text import operations_page
from trainatomy.workload.encoder_layer import ENCODER_LAYER, encoder_layer
from trainatomy.workload.overrides import merge

File = Annotated[
    str | None,
    typer.Argument(
        metavar="encoder-layer | WORKLOAD.yaml",
        help="A file that describes the training, or the published encoder layer of BERT-large.",
        show_default=False,
    ),
]
Top = Annotated[
    int,
    in_output("--top", "How many of the heaviest operations and modules to show (15 unless said).", metavar="N", min=1),
]
Measure = Annotated[bool, in_run("--measure", "Profile a step on this machine's GPU and join it.")]


@with_workload_options
def ops(
    file: File = None,
    top: Top = 15,
    measure: Measure = False,
    calibration: CalibrationFile = None,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **overrides: Any,
) -> None:
    """Take a training step apart into its operations: tensor contractions, statistical normalisations, element-wise
    operators. For each group and phase: FLOP, bytes moved, memory held at the peak; then the heaviest operations and
    the shapes that waste the card.

    `encoder-layer` stands for the layer of BERT-large whose operators were published in "Data Movement Is All You
    Need" (batch 8, sequence 512, fp16).
    """
    workload = merge(encoder_layer(), overrides) if file == ENCODER_LAYER else one_workload(file, overrides)
    with progress(f"executing {workload.name or 'the training'} on tensors without data"), quiet_libraries(debug=debug):
        from trainatomy.api import ops as anatomised

        anatomy = anatomised(
            workload, top=top, measured=measure, trust_remote_code=trust_remote_code, calibration=calibration
        )
    if json:
        show_json(anatomy_to_json(anatomy))
    else:
        show(operations_page(anatomy))
