"""Methods of peft besides LoRA, which change a model by peft's own code.

Models are on the meta device: a method that looks at values while it is made cannot be built there.

Towers and projectors of models that see or hear: which are not trained, and get no adapters.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.libraries import import_library
from trainatomy.workload.document import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def without(frozen: list[str], lora: LoraSpec) -> LoraSpec:
    """Return the settings of adapters that leave out frozen parts of the model."""
    if not frozen:
        return lora
    return lora.model_copy(update={"exclude_modules": excluded(frozen, lora.exclude_modules)})


def excluded(frozen: list[str], given: str | Sequence[str] | None) -> str:
    """Return what adapters leave out: what is given, and frozen parts of the model."""
    others = [given] if isinstance(given, str) else [rf"(.*\.)?{re.escape(name)}" for name in given or ()]
    return "|".join([*others, *(rf"{re.escape(name)}\..*" for name in frozen)])


METHODS = (
    "ADALORA DELORA GRALORA HIRA HRA IA3 LN_TUNING LOHA LOKR MISS OFT PREFIX_TUNING PROMPT_TUNING P_TUNING RANDLORA "
    "ROAD TRAINABLE_TOKENS VBLORA VERA".split()
)
"""Methods that are simulated."""
_VALUES = "looks at values of weights while it is made, which do not exist without a GPU's memory"
_FFT = "computes with cuFFT, whose workspaces are not known"
_TASKS = "needs the number of a task in each batch"
REFUSED = {
    "LORA": "is `model.lora`, with the same arguments",
    **dict.fromkeys(("ADAMSS", "BOFT", "FROD", "SHIRA", "UNILORA"), _VALUES),
    **dict.fromkeys(("C3A", "FOURIERFT"), _FFT),
    **dict.fromkeys(("MULTITASK_PROMPT_TUNING", "POLY"), _TASKS),
    "CPT": "needs the types of its tokens in each batch",
    "XLORA": "needs adapters that are trained already",
}
"""Why others are not."""


NOTES = {
    "ADALORA": "AdaLoRA: ranks are not changed and importances not kept, for which a loop has to call peft's "
    "update_and_allocate; the Trainer does not"
}
"""What a user of a method should know."""


def adapt_by_method(model: nn.Module, given: Mapping[str, Any]) -> nn.Module:
    """Let a method of peft change a model: ``peft_type`` and the arguments of its configuration.

    Raises:
        WorkloadError: peft has no such method, it is not simulated, or peft refuses an argument.
        MissingLibrary: peft, or a library that the method needs, is not installed.
    """
    peft = import_library("peft", "model.peft")
    kinds = {getattr(kind, "value", kind): made for kind, made in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = str(given["peft_type"]).upper()
    if name not in kinds:
        raise WorkloadError(f"model.peft: peft has no method {name}{suggestion(name, kinds)}", key="model.peft")
    if name not in METHODS:
        reason = REFUSED.get(name, "has not been checked")
        raise WorkloadError(f"model.peft: {name}: is not simulated: {reason}", key="model.peft")
    arguments = {key: value for key, value in given.items() if key != "peft_type"}
    try:
        adapted: nn.Module = peft.get_peft_model(model, kinds[name](**arguments))
    except ImportError as error:
        raise MissingLibrary(f"model.peft: {name} needs a library: {error}") from error
    except (LookupError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise WorkloadError(f"model.peft: peft refuses {name}: {error}", key="model.peft") from error
    return adapted
