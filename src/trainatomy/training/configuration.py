"""Load the configuration of a transformers model and apply the workload's overrides.

A configuration comes from a local folder, from the architectures that ship with trainatomy, or from the hub; weights
are never fetched.  Shipped ones come before the hub, so that the answer does not depend on a network: the configuration
of published weights does not change.

Find the class of a transformers model: by name, or the one that its configuration was trained with.

Classes are looked up one by one in the lazy ``transformers`` module, so that only the files of that model are imported.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.catalog.architectures import architecture, nearest
from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.libraries import version_of
from trainatomy.results.prediction import LeadingNote
from trainatomy.training import stored_weights
from trainatomy.training.stored_weights import fetch_config
from trainatomy.workload.defaults import STORED_QUANTISED
from trainatomy.workload.document import suggestion
from trainatomy.workload.section import spell_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from trainatomy.workload.model import ModelSpec
    from trainatomy.workload.schema import Workload


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


_EXPERTS, _EXPERTS_KINDS = "experts_implementation", ("eager", "batched_mm", "grouped_mm")
"""Setting that chooses how a mixture computes its experts; a configuration takes it and does not keep it."""

MOST_LAYERS = 2_000
"""Layers of a model that are executed; the deepest that are trained have some hundred."""

Raw = dict[str, Any]
"""The content of a ``config.json``."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of weights that a workload can ask for."""


def build_configuration(spec: ModelSpec, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Return the configuration that ``spec`` describes, overrides included.

    Raises:
        WorkloadError: A name, key or value is wrong.
        NetworkError: The model neither ships with trainatomy nor can be fetched.
    """
    raw, config_class = _source(spec, trust_remote_code)
    overrides = _canonical_overrides(spec.config, raw, config_class)
    merged = _merge(raw, overrides)
    quantization = stored_weights.take(merged)
    try:
        config = config_class(**copy.deepcopy(merged))  # some classes take keys out of nested mappings
    except Exception as error:  # transformers checks values itself and raises exceptions of many kinds
        raise _refused(config_class, error) from error
    config._name_or_path = spec.id or ""
    stored_weights.remember(config, quantization)
    return config


def _refused(config_class: type[PreTrainedConfig], error: Exception) -> WorkloadError:
    """Return the error for values that a configuration of transformers refuses."""
    said = " ".join(str(error).split()) or type(error).__name__
    return WorkloadError(
        f"model.config: {config_class.__name__} refuses these values: {said.rstrip('.')}. Give others in model.config, "
        f"or install the release of transformers that the model is for (found {version_of('transformers')})",
        key="model.config",
    )


def dtype_to_load(workload: Workload, config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype in which the weights of ``workload`` are loaded.

    ``model.dtype`` decides unless it is ``auto``.  ``auto`` does what transformers 5 does in ``from_pretrained`` and
    ``from_config`` (``modeling_utils.py``, ``_get_dtype`` and ``_from_config``, 5.17): it takes the ``dtype`` of the
    configuration, and else that of the first weight that is stored in floating point.  Where that is not known, weights
    are taken to be in float32, or in bfloat16 beside others that are stored quantised.  Before 5.0, and so in the era
    of 2022, the default was float32.
    """
    spec = workload.model
    if spec.dtype != "auto":
        return DTYPES[spec.dtype]
    if workload.era == "2022" and not {"dtype", "torch_dtype"} & spec.config.keys():
        return torch.float32
    stored = stored_dtype(config)
    if stored not in (None, *DTYPES.values()):
        raise WorkloadError(
            f"model.dtype: {spec.id or type(config).__name__} stores its weights in {_name(stored)}, which is not "
            f"simulated: name one of {', '.join(DTYPES)}",
            key="model.dtype",
        )
    return stored or _dtype_without_a_name(config)


def _dtype_without_a_name(config: PreTrainedConfig) -> torch.dtype:
    return torch.float32 if stored_weights.settings_of(config) is None else torch.bfloat16


def stored_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype that a configuration names for its weights, or ``None``."""
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else None


def dtype_note(workload: Workload, config: PreTrainedConfig) -> str | None:
    """Return what to tell about the weights' dtype if the workload leaves it to the checkpoint, else ``None``.

    ``config`` is the configuration as loaded, before the model was built from it.
    """
    spec = workload.model
    if spec.id is None or spec.dtype != "auto" or workload.era == "2022" or "dtype" in spec.config:
        return None
    stored = stored_dtype(config)
    if stored is None:
        assumed = _name(_dtype_without_a_name(config))
        return (
            f"weights in {assumed}: the configuration of {spec.id} does not name the dtype of its checkpoint; "
            "model.dtype sets another"
        )
    if stored == torch.float32:
        return None
    return f"weights in {_name(stored)}, as the checkpoint stores them; model.dtype sets another"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _source(spec: ModelSpec, trust_remote_code: bool) -> tuple[Raw, type[PreTrainedConfig]]:
    """Return the raw configuration, without overrides, and its class."""
    if spec.id is None:
        assert spec.class_ is not None  # the schema requires one of id, class, factory
        model_class = transformers_class(spec.class_)
        config_class = getattr(model_class, "config_class", None)
        if config_class is None:
            raise WorkloadError(
                f"model.class: {spec.class_} stands for many models: give model.id too", key="model.class"
            )
        return _default_parts(spec, config_class), config_class
    raw = _raw(spec.id)
    if "auto_map" in raw and raw.get("model_type") not in _known_types():
        return raw, _remote_config_class(spec.id, raw, trust_remote_code)
    return raw, _config_class(spec.id, raw)


def _default_parts(spec: ModelSpec, config_class: type[PreTrainedConfig]) -> Raw:
    """Return what the class sets by default in the sub-configurations that ``spec`` overrides.

    They differ from the defaults of their own classes: LLaVA's images have 336 pixels, CLIP's 224.
    """
    overridden = {name: value for name, value in spec.config.items() if isinstance(value, Mapping)}
    if not overridden.keys() & config_class.sub_configs.keys():
        return {}
    try:
        default = config_class()
    except Exception:  # one made of others, without defaults (``EncoderDecoderConfig``): see ``_keys``
        return {}
    parts: Raw = {}
    for name, value in overridden.items():
        part: Any = getattr(default, name, None)
        if hasattr(part, "to_dict") and value.get("model_type", part.model_type) == part.model_type:
            own = type(part)().to_dict()
            changed = {key: each for key, each in part.to_dict().items() if key not in own or own[key] != each}
            tokens = {key for key in changed if key.endswith("_token_id") and "vocab_size" in value}  # of another one
            parts[name] = {key: each for key, each in changed.items() if key not in tokens}
            parts[name]["model_type"] = part.model_type
    return parts


def _raw(name: str) -> Raw:
    """Return ``config.json`` of a local folder, of a shipped architecture or of the hub, in this order."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _read_folder(folder)
    shipped = _shipped(name)
    if shipped is not None:
        return shipped
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise WorkloadError(f"model.id: there is no folder {folder}", key="model.id")
    shipped_names = nearest(name)
    hint = f"; shipped under a similar name: {', '.join(shipped_names)}" if shipped_names else ""
    return fetch_config(name, hint=hint)


def _read_folder(folder: Path) -> Raw:
    from transformers import PreTrainedConfig

    if not (folder / "config.json").is_file():
        raise WorkloadError(f"model.id: the folder {folder} has no config.json", key="model.id")
    raw, _ = PreTrainedConfig.get_config_dict(str(folder), local_files_only=True)
    return {"dtype": stored_weights.dtype_of_files(folder), **raw}


def _shipped(name: str) -> Raw | None:
    """Return the configuration that ships under ``name``, or ``None``."""
    found = architecture(name)
    if found is None:
        return None
    return {"architectures": [found.class_name], **found.config}


def _known_types() -> Mapping[str, Any]:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING


def _config_class(name: str, raw: Raw) -> type[PreTrainedConfig]:
    model_type = raw.get("model_type")
    if model_type is None:
        raise WorkloadError(f"model.id: the configuration of {name} names no model_type", key="model.id")
    known = _known_types()
    if model_type not in known:
        raise WorkloadError(
            f"model.id: {name} is of type {model_type!r}, which transformers {version_of('transformers')} does not know"
            f"{suggestion(model_type, known)}",
            key="model.id",
        )
    return known[model_type]


def _remote_config_class(name: str, raw: Raw, trust_remote_code: bool) -> type[PreTrainedConfig]:
    if not trust_remote_code:
        raise WorkloadError(
            f"model.id: {name} brings its own code, which would run on this machine: read it at "
            f"https://huggingface.co/{name}, then allow it with --trust-remote-code",
            key="model.id",
        )
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(raw["auto_map"]["AutoConfig"], name)


def _canonical_overrides(overrides: Mapping[str, Any], raw: Raw, config_class: type[PreTrainedConfig]) -> Raw:
    """Return the overrides under the names that the class itself uses; refuse unknown names.

    A configuration accepts any keyword and keeps it, so a misspelt override would silently change nothing.
    """
    aliases = {**config_class.attribute_map, "torch_dtype": "dtype"}
    known = {
        *_keys(config_class),
        *raw,
        *aliases,
        *STORED_QUANTISED,
        "num_labels",
        "rope_theta",
        "rope_scaling",
        _EXPERTS,
    }
    canonical: Raw = {}
    for key, value in overrides.items():
        if key not in known and not _is_read(key, config_class):
            shown = sorted(name for name in known if not name.startswith("_"))
            raise WorkloadError(
                f"model.config.{key}: {config_class.__name__} has no such key{suggestion(key, shown)}",
                key=f"model.config.{key}",
            )
        canonical[aliases.get(key, key)] = value
    if "dtype" in canonical:
        canonical["dtype"] = _checked_dtype(canonical["dtype"])
    if canonical.get(_EXPERTS, "eager") not in _EXPERTS_KINDS:
        raise WorkloadError(
            f"model.config.{_EXPERTS}: must be one of {', '.join(_EXPERTS_KINDS)}, whose kernels are PyTorch's, found "
            f"{canonical[_EXPERTS]!r}",
            key=f"model.config.{_EXPERTS}",
        )
    return canonical


def _is_read(key: str, config_class: type[PreTrainedConfig]) -> bool:
    """Return whether a model reads a key that its configuration does not declare: ``head_dim`` of Qwen3-MoE."""
    code = sys.modules[config_class.__module__].__file__
    read = re.compile(rf"config\.{re.escape(key)}\b|getattr\((?:self\.)?config, [\"']{re.escape(key)}[\"']")
    return code is not None and any(
        read.search(file.read_text(encoding="utf-8")) for file in Path(code).parent.glob("modeling_*.py")
    )


def _keys(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the keys of a configuration; one made of others (``EncoderDecoderConfig``) has no default instance."""
    try:
        return set(config_class().to_dict())
    except Exception:  # of several kinds: ValueError, or what transformers' check of the types of fields raises
        from transformers import PreTrainedConfig

        return {*PreTrainedConfig().to_dict(), *config_class.sub_configs}


def _checked_dtype(value: Any) -> str:
    name = spell_dtype(value)
    if name not in DTYPES:
        raise WorkloadError(
            f"model.config.dtype: must be one of {', '.join(DTYPES)}, found {value!r}", key="model.config.dtype"
        )
    return str(name)


def _merge(raw: Raw, overrides: Raw) -> Raw:
    """Overlay the raw configuration: sub-configurations key by key, lists by layer cut to the new depth."""
    merged = {**raw, **overrides}
    if "dtype" in overrides:
        merged.pop("torch_dtype", None)
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(raw.get(key), Mapping):
            merged[key] = _merge(dict(raw[key]), dict(value))
    if "num_labels" in overrides:
        for key in ("id2label", "label2id"):
            if key not in overrides:
                merged.pop(key, None)
    for key in ("num_hidden_layers", "num_layers", "n_layer"):
        if key in overrides and (type(overrides[key]) is not int or overrides[key] < 0):
            raise WorkloadError(
                f"model.config.{key}: must be a number of layers, found {overrides[key]!r}", key=f"model.config.{key}"
            )
        if isinstance(depth := merged.get(key), int) and depth > MOST_LAYERS:
            raise WorkloadError(
                f"model.config.{key}: {depth:,} layers would take hours to execute, one by one: at most "
                f"{MOST_LAYERS:,}",
                key=f"model.config.{key}",
            )
        if key in raw and key in overrides:
            merged.update(_fit_layer_lists(raw, overrides, int(raw[key]), int(overrides[key])))
    return merged


def _fit_layer_lists(raw: Raw, overrides: Raw, old_depth: int, depth: int) -> Raw:
    """Return the lists with one entry per layer (``layer_types``, …), repeated or cut to ``depth`` entries."""
    return {
        key: [value[index % old_depth] for index in range(depth)]
        for key, value in raw.items()
        if key.startswith(("layer", "mlp_layer")) and isinstance(value, list) and len(value) == old_depth > 0
        if key not in overrides
    }
