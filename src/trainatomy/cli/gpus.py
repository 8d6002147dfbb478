"""``trainatomy gpus``: the GPUs that ship as data.

``trainatomy models``: the model architectures that ship as data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from trainatomy.catalog.architectures import architectures
from trainatomy.catalog.gpus import find_gpu as find
from trainatomy.catalog.gpus import gpus as all_gpus
from trainatomy.cli.options import Debug, Jobs, Json, in_run
from trainatomy.cli.output import progress, quiet_libraries, show, show_json
from trainatomy.reporters.json import architectures_to_json, gpus_to_json, to_json
from trainatomy.reporters.text.gpus import architectures_table, catalog_table, gpu_page
from trainatomy.units import many
from trainatomy.workload.reading import read

For = Annotated[
    str | None,
    in_run(
        "--for", "Predict this training on every GPU: where it fits, how tightly, how fast.", metavar="WORKLOAD.yaml"
    ),
]
Name = Annotated[
    str | None, typer.Argument(metavar="GPU", help="Show one GPU, with the source of every figure.", show_default=False)
]


def gpus(
    gpu: Name = None,
    workload: For = None,
    jobs: Jobs = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the known GPUs, or show one with the source of every figure.

    With `--for`, predict a training as it is on each of them; `trainatomy compare --gpu all` does so for one that
    options describe, and `trainatomy fit --gpu all` also finds the best settings for each.
    """
    if workload is not None:
        _show_for(workload, [gpu] if gpu else None, jobs, json=json, debug=debug)
        return
    chosen = all_gpus() if gpu is None else (find(gpu),)
    if json:
        show_json(gpus_to_json(chosen))
    else:
        show(catalog_table(chosen) if gpu is None else gpu_page(chosen[0]))


def _show_for(file: str, names: Sequence[str] | None, jobs: int | None, *, json: bool, debug: bool) -> None:
    """Predict a training on several GPUs."""
    from trainatomy.reporters.text.gpus import gpus_for_page
    from trainatomy.runs.options import PredictOptions
    from trainatomy.runs.predicting import jobs_for

    chosen = [find(name) for name in names] if names else all_gpus()
    workload = read(file, {})
    workloads = [workload.replace({"gpu": each.id, "name": each.name}) for each in chosen]
    with quiet_libraries(debug=debug), progress(f"simulating {workload.display_name} on {many(len(chosen), 'GPU')}"):
        from trainatomy import api

        comparison = api.predict_comparison(workloads, PredictOptions(), jobs=jobs_for(len(workloads), jobs))
    if json:
        show_json(to_json(comparison))
    else:
        show(gpus_for_page(comparison))


def models(json: Json = False, debug: Debug = False) -> None:
    """List the model architectures that need no network, by their name on the Hugging Face hub."""
    entries = architectures()
    if json:
        show_json(architectures_to_json(entries))
    else:
        show(architectures_table(entries))
