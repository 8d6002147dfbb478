"""Nested mappings laid over each other, before anything is validated."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from trainatomy.workload.arguments import NEW_NAMES
from trainatomy.workload.gpu import without_instance

if TYPE_CHECKING:
    from trainatomy.workload.section import Path

_SET_BY_MODEL_FACTORY = ("id", "class", "config", "attn_implementation", "dtype")
_SET_BY_DATA_FACTORY = (
    "sequence_length",
    "target_length",
    "images",
    "image_size",
    "attention_mask",
    "padding",
    "pad_to_multiple_of",
    "packing",
    "padding_free",
    "lengths",
)
_REPLACES: dict[Path, tuple[Path, ...]] = {
    ("model", "id"): (("model", "factory"),),
    ("model", "class"): (("model", "factory"),),
    ("model", "factory"): tuple(("model", key) for key in _SET_BY_MODEL_FACTORY),
    ("data", "factory"): tuple(("data", key) for key in _SET_BY_DATA_FACTORY),
    **{("data", key): (("data", "factory"),) for key in _SET_BY_DATA_FACTORY},
    **{("train", old): (("train", new),) for new, old in NEW_NAMES.items()},
    ("train", "fp16"): (("train", "bf16"),),
    ("train", "bf16"): (("train", "fp16"),),
    ("train", "fp16_full_eval"): (("train", "bf16_full_eval"),),
    ("train", "bf16_full_eval"): (("train", "fp16_full_eval"),),
    ("instance",): (("gpu",), ("parallel", "gpus")),
}
"""Keys that a later source removes from an earlier one, because both in one workload would be a contradiction."""
_NEEDED_BY: dict[Path, tuple[Path, ...]] = {
    ("train", "gradient_checkpointing"): (
        ("train", "gradient_checkpointing_every"),
        ("train", "activation_checkpointing"),
    ),
}
"""Keys that a later source removes from an earlier one when it switches off what they need."""


def overlay(below: Any, above: Any) -> Any:
    """Return ``above`` laid over ``below`` key by key; anything but two mappings is replaced by a copy of ``above``."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return copy.deepcopy(above)
    merged = copy.deepcopy(dict(below))
    for key, value in above.items():
        merged[key] = overlay(merged.get(key), value)
    return merged


def set_key(mapping: dict[str, Any], path: Path, value: Any) -> None:
    """Set the value at ``path`` in nested dictionaries, which are created where they are missing."""
    here = mapping
    for key in map(str, path[:-1]):
        inner = here.get(key)
        if key == "gpu" and isinstance(inner, str):
            inner = {"base": inner}
        here[key] = dict(inner) if isinstance(inner, Mapping) else {}
        here = here[key]
    here[str(path[-1])] = value


def get_key(mapping: Mapping[str, Any], path: Path) -> Any:
    """Return the value at ``path`` in nested mappings, or None where there is none."""
    here: Any = mapping
    for key in map(str, path):
        here = here.get(key) if isinstance(here, Mapping) else None
    return here


def remove_replaced(mapping: dict[str, Any], changed: Collection[Path]) -> None:
    """Remove keys that contradict a changed one: ``train.bf16`` where ``train.fp16`` was switched on.

    Keys that need a setting which was switched off are removed too. Two changed keys that contradict each other both
    stay, and validation refuses them.
    """
    if ("gpu",) in changed and ("instance",) not in changed and mapping.get("instance"):
        without_instance(mapping)
    for path in changed:
        is_off = get_key(mapping, path) in (None, False)
        for other in (_NEEDED_BY if is_off else _REPLACES).get(path, ()):
            section = mapping.get(str(other[0])) if len(other) > 1 else mapping
            is_kept = any(each[: len(other)] == other for each in changed)
            if not is_kept and isinstance(section, dict):
                section.pop(str(other[-1]), None)
