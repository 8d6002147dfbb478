"""The ready workload ``encoder-layer``: the layer whose operators were published, forward and backward.

The paper has no optimizer; the loop's (SGD) is a phase of its own and no part of what is compared.
"""

from __future__ import annotations

from importlib.resources import files

import yaml

from trainatomy.workload.schema import Workload

ENCODER_LAYER = "encoder-layer"
#: Modules and phases that the paper counts.
MODULE, PHASES = "layer", ("forward", "backward")


def encoder_layer() -> Workload:
    """The workload; its card is the paper's."""
    text = files(__package__).joinpath(f"{ENCODER_LAYER}.yaml").read_text(encoding="utf-8")
    return Workload.from_mapping(yaml.safe_load(text))


def is_encoder_layer(workload: Workload) -> bool:
    """Whether a workload trains that layer, whatever its card and settings are."""
    return workload.model.factory == encoder_layer().model.factory
