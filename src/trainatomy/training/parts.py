"""Towers and projectors of models that see or hear: which are not trained, and get no adapters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from trainatomy.workload.model import LoraSpec, ModelSpec


_TOWER = re.compile(
    r"(visual|vision_tower|vision_model|vision_encoder|image_encoder|image_newline|audio_tower|audio_encoder|"
    r"audio_model|vpm|apm)"
)
_PROJECTOR = re.compile(
    r"(\w*projector|\w*merger\w*|\w*connector|resampler|aligner|modality_projection|embed_vision|embed_audio|\w*abstractor)"
)
"""Names of modules of models that see or hear, in transformers 5.17; a projector may lie in a tower."""


def frozen_parts(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the towers and projectors that are not trained, without those that lie in one of the list."""
    if not (spec.freeze_vision_tower or spec.freeze_multi_modal_projector):
        return []
    names = [name for name, _ in model.named_modules() if name]
    projectors = [name for name in names if _PROJECTOR.fullmatch(name.rpartition(".")[-1])]
    towers = [name for name in names if _TOWER.fullmatch(name.rpartition(".")[-1])]
    inside = [name for name in projectors if any(name.startswith(f"{tower}.") for tower in towers)]
    frozen = projectors if spec.freeze_multi_modal_projector else []
    if spec.freeze_vision_tower:
        whole = spec.freeze_multi_modal_projector or not inside
        frozen = [*frozen, *(towers if whole else _beside(names, towers, inside))]
    return [name for name in frozen if not any(name.startswith(f"{other}.") for other in frozen)]


def _beside(names: list[str], towers: list[str], inside: list[str]) -> list[str]:
    """Return the direct parts of towers that neither are nor hold one of the modules ``inside``."""
    parts = [name for name in names if name.rpartition(".")[0] in towers]
    return [part for part in parts if not any(f"{name}.".startswith(f"{part}.") for name in inside)]


def keep_of_frozen(model: nn.Module, frozen: list[str], kept: str) -> None:
    """Let frozen parts of a model keep for backward what a framework lets them keep.

    Args:
        model: The model, before it gets adapters.
        frozen: Names of its frozen parts.
        kept: ``kept``: all activations, since only layers that are trained are checkpointed
            (``get_custom_gradient_checkpointing_func`` of LLaMA-Factory); ``without_grad``: nothing, where whole towers
            are frozen (``patch_frozen_module`` of ms-swift; LLaMA-Factory without adapters).
    """
    for name in frozen:
        part = model.get_submodule(name)
        if kept == "kept":
            part.register_forward_pre_hook(_checkpoint_nothing)
        elif kept == "without_grad" and _TOWER.fullmatch(name.rpartition(".")[-1]):
            part.forward = torch.no_grad()(part.forward)


def _checkpoint_nothing(part: Any, _: object) -> None:
    for layer in part.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer.gradient_checkpointing = False


def without(frozen: list[str], lora: LoraSpec) -> LoraSpec:
    """Return the settings of adapters that leave out frozen parts of the model."""
    if not frozen:
        return lora
    return lora.model_copy(update={"exclude_modules": excluded(frozen, lora.exclude_modules)})


def excluded(frozen: list[str], given: str | Sequence[str] | None) -> str:
    """Return what adapters leave out: what is given, and frozen parts of the model."""
    others = [given] if isinstance(given, str) else [rf"(.*\.)?{re.escape(name)}" for name in given or ()]
    return "|".join([*others, *(rf"{re.escape(name)}\..*" for name in frozen)])
