"""Built-in workloads: comparisons of Hugging Face's guide, and the encoder layer of a paper.

Built-in comparisons from Hugging Face's guide of January 2022.

``notebook.yaml`` holds its nine training runs of BERT-large, ``notebook-fp16.yaml`` its table of fp16 against fp32,
``parallel.yaml`` its experiment on two GPUs.

The built-in workload ``encoder-layer``: forward and backward of the layer whose operators were published.

The paper has no optimizer; the loop's SGD step is a separate phase and not part of the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

import yaml

from trainatomy.workload.overlay import overlay
from trainatomy.workload.overrides import RawWorkload, validate_all
from trainatomy.workload.reading import ROWS
from trainatomy.workload.schema import Workload

Era = Literal["today", "2022"]

NOTEBOOK = "notebook"
NOTEBOOK_FP16 = "notebook-fp16"
PARALLEL = "parallel"
READY = (NOTEBOOK, NOTEBOOK_FP16, PARALLEL)
"""The names of the built-in comparisons; each is a data file beside this module."""


def notebook(era: Era = "today", gpu: str | None = None) -> tuple[Workload, ...]:
    """Return the nine training runs of the guide (see ``ready``)."""
    return ready(NOTEBOOK, era, gpu)


def ready(
    name: str, era: Era = "today", gpu: str | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[Workload, ...]:
    """Return the rows of a built-in comparison.

    Args:
        name: One of ``READY``.
        era: ``"2022"`` emulates the libraries of January 2022.
        gpu: Replaces the comparison's own GPU.
        flags: Command-line flags to lay over every row (see ``RawWorkload.with_flags``).
    """
    document = _data(f"{name}.yaml")
    rows = document.pop(ROWS)
    if era == "2022":
        document = overlay(document, _data("notebook-2022.yaml"))
        if name == PARALLEL:
            document = overlay(document, _data("parallel-2022.yaml"))
    if gpu is not None:
        document["gpu"] = gpu
    return validate_all(RawWorkload(overlay(document, row)).with_flags(flags or {}) for row in rows)


def _data(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(files(__package__).joinpath(name).read_text(encoding="utf-8"))
    return read


ENCODER_LAYER = "encoder-layer"
#: The module and the phases that the paper covers.
MODULE, PHASES = "layer", ("forward", "backward")


def encoder_layer() -> Workload:
    """Return the workload, on the paper's GPU."""
    text = files(__package__).joinpath(f"{ENCODER_LAYER}.yaml").read_text(encoding="utf-8")
    return Workload.from_mapping(yaml.safe_load(text))


def is_encoder_layer(workload: Workload) -> bool:
    """Return whether a workload trains that layer, on any GPU and with any settings."""
    return workload.model.factory == encoder_layer().model.factory
