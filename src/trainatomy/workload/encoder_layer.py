"""The built-in workload ``encoder-layer``: forward and backward of the layer whose operators were published.

The paper has no optimizer; the loop's SGD step is a separate phase and not part of the comparison.
"""

from __future__ import annotations

from importlib.resources import files

import yaml

from trainatomy.workload.schema import Workload

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
