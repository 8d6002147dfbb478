"""A pasted configuration of a framework as a workload, of which a server reads no files and runs no code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainatomy.app.form import MAX_CONFIG_CHARACTERS, MOST, hub_name
from trainatomy.errors import WorkloadError
from trainatomy.workload.arguments import is_own
from trainatomy.workload.dialects.recognise import dialect_of, read_configuration
from trainatomy.workload.dialects.translation import DIALECTS, dialect
from trainatomy.workload.document import parse
from trainatomy.workload.schema import Workload

_SECTIONS = frozenset({"model", "data", "train", "trl", "preference", "loop", "parallel"})
_OF_MODEL = frozenset({
    "id", "dtype", "trainable_dtype", "attn_implementation", "lora", "quantization", "freeze_vision_tower",
    "freeze_multi_modal_projector", "kernels", "float32_parameters", "enable_input_require_grads",
    "frozen_tower",
})  # fmt: skip
_OF_DATA = frozenset({
    "sequence_length", "prompt_length", "attention_mask", "padding", "pad_to_multiple_of", "packing", "padding_free",
    "image_size", "image_limits", "image_pixels", "float_dtype",
})  # fmt: skip
"""Keys that a pasted configuration may set: none of them names a file, or code."""
_MODELS = ("model_name_or_path", "base_model", "model")
"""Keys that name a model, whose configuration is read where it is a folder."""
_MOST_GPUS = 64


def workload_of(text: str, gpu: str) -> Workload:
    """Return the workload that a pasted configuration says, on a GPU.

    Raises:
        WorkloadError: It is no configuration of a framework that is read, names files or code, or is too large.
    """
    if len(text) > MAX_CONFIG_CHARACTERS:
        raise WorkloadError(f"{len(text)} characters were pasted; at most {MAX_CONFIG_CHARACTERS} are read")
    document = parse(text, "the configuration")
    table = dialect_of(document.value) if isinstance(document.value, Mapping) else None
    if table is None:
        known = ", ".join(dialect(name).name for name in DIALECTS)
        raise WorkloadError(f"This is no configuration of {known}: none of their keys is in it.")
    for key in _MODELS:
        if key in document.value:
            hub_name(str(document.value[key]))
    raw = read_configuration(document, table, None, text)
    _check(raw.mapping)
    return raw.with_flags({"gpu": gpu}).validate()


def _check(said: Mapping[str, Any]) -> None:
    """Refuse what a server does not do for visitors: read files, run code of theirs or of the hub, train too much."""
    model, train, data = (said.get(name) or {} for name in ("model", "train", "data"))
    hub_name(str(model.get("id", "")))
    other = {*(said.keys() - _SECTIONS), *(model.keys() - _OF_MODEL), *(data.keys() - _OF_DATA)}
    optimizer, attention = str(train.get("optim", "")), str(model.get("attn_implementation", ""))
    if other or is_own(optimizer) or "/" in attention or isinstance(train.get("deepspeed"), str):
        raise WorkloadError("The configuration names files or code, which this page neither reads nor runs.")
    sizes = {
        "batch": train.get("per_device_train_batch_size", 1),
        "length": data.get("sequence_length", 1),
        "accumulation": train.get("gradient_accumulation_steps", 1),
    }
    for name, value in sizes.items():
        if isinstance(value, int) and value > MOST[name]:
            raise WorkloadError(f"{value:,} is more than this page predicts for one {name}: {MOST[name]:,}")
    gpus = (said.get("parallel") or {}).get("gpus", 1)
    if isinstance(gpus, int) and gpus > _MOST_GPUS:
        raise WorkloadError(f"{gpus} GPUs are more than this page predicts: {_MOST_GPUS}")
