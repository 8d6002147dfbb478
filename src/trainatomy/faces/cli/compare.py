"""``trainatomy compare``: several trainings side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainatomy.faces.cli.asked import published_table, several_workloads
from trainatomy.faces.cli.options import Debug, Json, TrustRemoteCode, with_workload_options
from trainatomy.faces.cli.output import progress, show, show_json
from trainatomy.faces.cli.quiet import quiet_libraries
from trainatomy.faces.json import comparison_to_json
from trainatomy.faces.text import comparison_page

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="notebook | WORKLOAD.yaml…", help="Files (one may hold several rows), or the notebook's nine trainings."
    ),
]


@with_workload_options
def compare(
    files: Files,
    json: Json = False,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
    **overrides: Any,
) -> None:
    """Predict several trainings and show them side by side, with the difference to the first. Options apply to all of
    them.

    `notebook` stands for the nine trainings of BERT-large in Hugging Face's guide of January 2022: as they were then,
    beside the published figures, or with `--gpu` on another card with today's software.
    """
    workloads = several_workloads(files, overrides)
    with progress(f"executing {len(workloads)} trainings on tensors without data"), quiet_libraries(debug=debug):
        from trainatomy.api import compare as compared

        predictions = compared(workloads, trust_remote_code=trust_remote_code)
    published = published_table(files, workloads)
    if json:
        show_json(comparison_to_json(predictions, published))
    else:
        show(comparison_page(predictions, published))
