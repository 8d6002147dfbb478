"""Find the class of a transformers model: by name, or the one that its configuration was trained with.

Classes are looked up one by one in the lazy ``transformers`` module, so that only the files of that model are imported.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.results.prediction import LeadingNote
from trainatomy.workload.document import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_HEADS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
)
"""Tables of transformers that map a model type to a class with a loss; the first that has the type decides.

Masked language models come before causal ones, because most encoders are in both tables.
"""


def transformers_class(name: str) -> Any:
    """Return the class called ``name``; raise ``WorkloadError`` with the nearest names, or ``MissingLibrary``."""
    import transformers

    found = getattr(transformers, name, None)
    if found is None or not isinstance(found, type):
        raise WorkloadError(
            f"model.class: transformers {transformers.__version__} has no {name!r}{_near(name)}", key="model.class"
        )
    if found.__module__.startswith("transformers.utils.dummy"):
        backends = ", ".join(getattr(found, "_backends", ["?"]))
        raise MissingLibrary(f"model.class: {name} needs {backends}: pip install {backends.replace(',', '')}")
    return found


def _near(name: str) -> str:
    import transformers

    suffixes = ("Model", "LMHeadModel")
    models = [each for each in dir(transformers) if "For" in each or each.endswith(suffixes)]
    return suggestion(name, models)


def model_class(config: PreTrainedConfig, name: str | None, *, trust_remote_code: bool = False) -> Any:
    """Return the class to build: ``name`` if given, else the configuration's own, else one with a suitable head."""
    if name is not None:
        return _checked(transformers_class(name), config, name)
    if trust_remote_code and (remote := _remote_class(config)) is not None:
        return remote
    import transformers

    for own in config.architectures or ():
        found = getattr(transformers, own, None)
        if found is not None and _has_loss(found):
            return found
    return _class_with_head(config)


def embedding_class(config: PreTrainedConfig, name: str | None) -> Any:
    """Return the class that sentence-transformers loads, the model without a head; ``name`` must be such a one."""
    import transformers

    found = _checked(transformers_class(name or "AutoModel"), config, name or "AutoModel")
    if _has_loss(found):
        raise WorkloadError(
            f"model.class: {found.__name__} has a head, which embedding models do not have: leave model.class out",
            key="model.class",
        )
    if getattr(config, "is_encoder_decoder", False) and "Encoder" not in found.__name__:
        encoder = found.__name__.removesuffix("Model") + "EncoderModel"
        instead = f"set model.class: {encoder}" if hasattr(transformers, encoder) else "it has no class of its own"
        raise WorkloadError(
            f"model.class: sentence-transformers trains the encoder of {found.__name__} alone: {instead}",
            key="model.class",
        )
    return found


_OF_PRETRAINING = ("ForMaskedLM", "ForPreTraining")
_FINE_TUNED = {
    "input_ids": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "classification"),
    "pixel_values": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "classification"),
    "input_values": ("MODEL_FOR_CTC_MAPPING_NAMES", "speech recognition"),
    "input_features": ("MODEL_FOR_CTC_MAPPING_NAMES", "speech recognition"),
}
"""Tables of the classes that are mostly fine-tuned, by the main input of the model."""


def head_note(config: PreTrainedConfig, built: Any, name: str | None) -> LeadingNote | None:
    """Return that a model has the head of its pre-training, where nobody named a class and others are fine-tuned."""
    from transformers.models.auto import modeling_auto

    table, purpose = _FINE_TUNED.get(getattr(built, "main_input_name", "input_ids"), ("", ""))
    usual = getattr(modeling_auto, table, {}).get(config.model_type)
    if name is not None or usual is None or not built.__name__.endswith(_OF_PRETRAINING):
        return None
    return LeadingNote(
        f"{built.__name__} is the class of the checkpoint, with the head of its pre-training; for {purpose}: "
        f"--model-class {usual} (model.class in a file)"
    )


def _checked(found: Any, config: PreTrainedConfig, name: str) -> Any:
    """Resolve ``AutoModelFor…`` for this configuration; refuse a class that belongs to another model."""
    mapping = getattr(found, "_model_mapping", None)
    if mapping is not None:
        if type(config) not in mapping:
            raise WorkloadError(f"model.class: {name} has no class for a {config.model_type} model", key="model.class")
        resolved = mapping[type(config)]
        return resolved[0] if isinstance(resolved, tuple) else resolved
    expected = getattr(found, "config_class", None)
    if expected is None or not hasattr(found, "_from_config"):
        raise WorkloadError(f"model.class: {name} is not a model", key="model.class")
    if not isinstance(config, expected):
        raise WorkloadError(
            f"model.class: {name} is built from a {expected.__name__}, but model.id has a {type(config).__name__}"
        )
    return found


def _has_loss(model: Any) -> bool:
    """Return whether the forward can compute a loss; a bare ``…Model`` returns hidden states only."""
    return not {"labels", "return_loss", "start_positions"}.isdisjoint(inspect.signature(model.forward).parameters)


def _class_with_head(config: PreTrainedConfig) -> Any:
    from transformers.models.auto import modeling_auto

    for table in _HEADS:
        entry = getattr(modeling_auto, table, {}).get(config.model_type)
        if entry is not None:
            return transformers_class(entry if isinstance(entry, str) else entry[0])
    raise WorkloadError(
        f"model.class: a {config.model_type} model has no default head: name a class", key="model.class"
    )


def _remote_class(config: PreTrainedConfig) -> Any | None:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    auto_map = getattr(config, "auto_map", None) or {}
    heads = [key for key in auto_map if key.startswith("AutoModelFor")]
    if not heads:
        return None
    chosen = "AutoModelForCausalLM" if "AutoModelForCausalLM" in heads else heads[0]
    return get_class_from_dynamic_module(auto_map[chosen], config._name_or_path)
