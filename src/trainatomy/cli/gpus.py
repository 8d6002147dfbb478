"""``trainatomy gpus``: the GPUs that ship as data."""

from __future__ import annotations

from typing import Annotated

import typer

from trainatomy.catalog.gpus import find_gpu as find
from trainatomy.catalog.gpus import gpus as all_gpus
from trainatomy.cli.options import Debug, Json
from trainatomy.cli.output import show, show_json
from trainatomy.reporters.json import gpus_to_json
from trainatomy.reporters.text.catalog import gpu_page, gpus_table

Name = Annotated[
    str | None, typer.Argument(metavar="GPU", help="Show one GPU, with the source of every figure.", show_default=False)
]


def gpus(gpu: Name = None, json: Json = False, debug: Debug = False) -> None:
    """List the known GPUs, or show one with the source of every figure."""
    chosen = all_gpus() if gpu is None else (find(gpu),)
    if json:
        show_json(gpus_to_json(chosen))
    else:
        show(gpus_table(chosen) if gpu is None else gpu_page(chosen[0]))
