"""``accelerate estimate-memory``: bytes of the parameters times a constant.

Its own functions are called, with the shipped architecture instead of one from the hub.  It knows neither batch nor
sequence length; for training it assumes Adam, so rows with other optimizers, adapters or frozen parameters do not count
against it.
"""

from __future__ import annotations

from typing import Any

from rivals import About, NoAnswer
from rivals.shipped import shipped

ABOUT = About(
    tool="accelerate estimate-memory",
    packages=("accelerate", "transformers"),
    figure="allocated",
    how="“Training using Adam” (a batch of one), or “Total Size” for inference, by architecture and precision",
)
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
ADAM = ("adamw_torch", "adamw_torch_fused")


def answer(line: dict[str, Any]) -> int:
    """Return its estimate for the row of a measured line, bytes."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    row = shipped(line)
    total, _ = calculate_maximum_sizes(row.model)
    if row.workload.mode == "inference":
        return int(total if row.precision == "fp32" else total // 2)
    spec, optimizer = row.workload.model, row.workload.train.optim
    if optimizer not in ADAM or spec.lora is not None or spec.freeze:
        raise NoAnswer("it only estimates training all parameters with Adam")
    return int(max(estimate_training_usage(total, DTYPES[row.precision]).values()))
