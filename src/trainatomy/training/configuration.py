"""Load the configuration of a transformers model and apply the workload's overrides.

A configuration comes from a local folder, from the architectures that ship with trainatomy, or from the hub; weights
are never fetched.  Shipped ones come before the hub, so that the answer does not depend on a network: the configuration
of published weights does not change.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.catalog.architectures import architecture, nearest
from trainatomy.errors import WorkloadError
from trainatomy.libraries import version_of
from trainatomy.training import stored_weights
from trainatomy.training.model_class import transformers_class
from trainatomy.training.stored_weights import fetch_config
from trainatomy.workload.defaults import STORED_QUANTISED
from trainatomy.workload.document import suggestion
from trainatomy.workload.section import spell_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from trainatomy.workload.model import ModelSpec
    from trainatomy.workload.schema import Workload


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
