"""Ready comparisons: the nine trainings that trainatomy is measured against (``notebook.yaml``), and the guide's table
of fp16 against fp32 by batch size (``notebook-fp16.yaml``)."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Literal

import yaml

from trainatomy.workload.reading import ROWS, overlay
from trainatomy.workload.schema import Workload

Era = Literal["today", "2022"]

NOTEBOOK = "notebook"
NOTEBOOK_FP16 = "notebook-fp16"
READY = (NOTEBOOK, NOTEBOOK_FP16)
"""The names of the ready comparisons; each is a data file beside this module."""


def notebook(era: Era = "today", gpu: str | None = None) -> tuple[Workload, ...]:
    """The notebook's rows in its order, with today's software or with that of its day; ``gpu`` replaces the card."""
    return ready(NOTEBOOK, era, gpu)


def ready(name: str, era: Era = "today", gpu: str | None = None) -> tuple[Workload, ...]:
    """The rows of one of ``READY``, with today's software or with that of January 2022; ``gpu`` replaces the card."""
    document = _data(f"{name}.yaml")
    rows = document.pop(ROWS)
    if era == "2022":
        document = overlay(document, _data("notebook-2022.yaml"))
    if gpu is not None:
        document["gpu"] = gpu
    return tuple(Workload.from_mapping(overlay(document, row)) for row in rows)


def _data(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(files(__package__).joinpath(name).read_text(encoding="utf-8"))
    return read
