"""Messages about training runs that cannot be predicted, with the names that the page gives its fields."""

from __future__ import annotations

import re

FIELDS = {
    "model.id": "Model",
    "model.class": "config.json",
    "model.config": "config.json",
    "model.lora": "LoRA rank",
    "model.quantization": "Quantised weights",
    "data.sequence_length": "Sequence length",
    "train.per_device_train_batch_size": "Batch size of the device",
    "train.gradient_accumulation_steps": "Accumulation steps",
    "train.gradient_checkpointing": "Gradient checkpointing",
    "train.optim": "Optimizer",
    "train.bf16": "Precision",
    "train.fp16": "Precision",
    "gpu": "GPU",
    "batch": "Batch size of the device",
    "length": "Sequence length",
    "accumulation": "Accumulation steps",
    "lora_rank": "LoRA rank",
    "precision": "Precision",
    "quantization": "Quantised weights",
    "optimizer": "Optimizer",
}
"""Titles of the page by keys of a workload, and by fields of the form."""

_REWORDED = (
    ("or let the search choose: --allow precision", "or let the search change it: tick precision above the button"),
    ("reads no text: leave it out", "reads no text: set it to 0"),
    (
        "quantised weights cannot be trained: add model.lora, or ask for mode: inference",
        "quantised weights cannot be trained: set a LoRA rank, so that adapters are",
    ),
)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+|`trainatomy [a-z]")


def in_terms_of_the_page(error: Exception) -> str:
    """Return the message of an error as the page says it.

    Keys of a workload become the titles of fields, and advice that names options becomes advice about the page; of an
    option that is left it says that it is one of the command line.
    """
    text = str(error)
    for said, meant in _REWORDED:
        text = text.replace(said, meant)
    if "--trust-remote-code" in text:
        return (
            "Model: this model needs code of its own from the hub, which this page does not run; the command line can"
        )
    key, colon, rest = text.partition(": ")
    if colon and key in FIELDS:
        text = f"{FIELDS[key]}: {rest}"
    keys = sorted((key for key in FIELDS if "." in key), key=len, reverse=True)
    for name in keys:
        text = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", FIELDS[name], text)
    return f"{text} (on the command line)" if _OPTION.search(text) else text
